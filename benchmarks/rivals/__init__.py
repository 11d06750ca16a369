"""Systems that only benchmarks compare with: tuned copies, quantised bases, copies of a stage, split baselines."""
