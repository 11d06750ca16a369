"""Exports a run's result as a folder that other programs open, with its model card."""
