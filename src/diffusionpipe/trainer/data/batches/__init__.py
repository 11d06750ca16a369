"""Makes batches of raw inputs from samples, ahead of training, in worker processes."""
