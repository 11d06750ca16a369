"""One training step, with and without a flush, and the decisions that follow from its numbers."""
