"""Speed beside torch.distributed.pipelining: real compute, waits, and Python time per action."""
