"""Everything that decides what a parameter holds: shards, host memory, older versions, gradients."""
