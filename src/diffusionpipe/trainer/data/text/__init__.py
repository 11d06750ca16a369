"""Captions to the texts and tokens that an encoder reads."""
