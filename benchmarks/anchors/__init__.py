"""Computed profiles beside published measurements."""
