"""Masks of the holes that an inpainting model learns to fill, and masks of the loss."""
