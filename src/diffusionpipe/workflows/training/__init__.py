"""The work around a training: checks before it, expectations, and its first steps held against the prediction."""
