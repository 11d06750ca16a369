"""Training objectives: noise, times, targets and weights of the loss."""
