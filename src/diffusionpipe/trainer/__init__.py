"""Recipe -> trained model: data, optimizer, checkpoints, metrics, sampling, the loop."""
