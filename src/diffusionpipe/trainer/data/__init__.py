"""Makes batches of raw inputs from pictures, captions and labels, keyed by sample."""
