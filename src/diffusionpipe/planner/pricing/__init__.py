"""Prices the work of a plan on its devices: stages, encoders, collectives, and how ranks become pipelines."""
