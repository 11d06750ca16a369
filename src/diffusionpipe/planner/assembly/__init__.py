"""Layout -> plan: cuts, blocks, buckets, schedule and passes."""
