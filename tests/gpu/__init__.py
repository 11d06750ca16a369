"""What only a machine with a GPU can show; see docs/gpu.md."""
