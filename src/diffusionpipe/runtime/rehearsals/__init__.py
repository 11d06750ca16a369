"""Plans run without a model: waits take the place of compute, on real or virtual ranks."""
