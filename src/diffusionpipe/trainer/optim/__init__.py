"""All code that changes trained parameters: optimizers, learning rates, gradient norms, averages."""
