"""Steps and samples to one loss for three batches, beside the formulas of the gradient noise scale."""
