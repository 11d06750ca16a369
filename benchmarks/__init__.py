"""One package per table; each runs as `python -m benchmarks.<name>`."""
