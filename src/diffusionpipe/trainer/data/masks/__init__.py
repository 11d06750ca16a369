"""Holes that a model learns to fill, and masks of the loss."""
