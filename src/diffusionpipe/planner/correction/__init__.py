"""A profile corrected by what a run has recorded, so that it predicts that run."""
