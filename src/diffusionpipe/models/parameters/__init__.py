"""Weights: random or read from files, narrower ones, and adapters."""
