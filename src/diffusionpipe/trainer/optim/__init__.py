"""Everything that changes a trained parameter: optimizers, rates, norms, averages."""
