"""Filled bubbles beside encoders before the backbone."""
