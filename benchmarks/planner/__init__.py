"""Seconds that planning takes."""
