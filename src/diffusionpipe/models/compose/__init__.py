"""Several models trained as one: cascades, and encoders that they have in common."""
