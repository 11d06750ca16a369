"""Corrects a profile by the times that a run has recorded, so that it predicts that run."""
