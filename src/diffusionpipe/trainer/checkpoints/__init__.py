"""The files that a training keeps: written whole or not at all, verified before they are read."""
