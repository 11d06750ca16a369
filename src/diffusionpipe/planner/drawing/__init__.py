"""Predicts the time and memory of drawing samples, in a pipeline or parallel in time."""
