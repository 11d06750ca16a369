"""Pictures, captions and labels to batches of raw inputs, keyed by sample."""
