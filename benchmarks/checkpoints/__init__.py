"""How long training stands still for a checkpoint."""
