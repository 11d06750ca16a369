"""What a training keeps: written whole or not at all, verified before it is read."""
