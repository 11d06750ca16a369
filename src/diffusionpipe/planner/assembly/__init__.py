"""Makes a plan from a layout: cuts, blocks, buckets, schedule and passes."""
