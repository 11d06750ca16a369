"""Samples to batches of raw inputs, made ahead by worker processes."""
