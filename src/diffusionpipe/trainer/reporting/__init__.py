"""Metrics, trackers and progress of a run, for files, services and screens."""
