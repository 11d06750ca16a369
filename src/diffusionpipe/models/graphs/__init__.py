"""A model as a graph of layers: its description without weights, and one run of it."""
