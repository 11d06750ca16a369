"""The costs of work at its place: stages, encoders, collectives, and how ranks become pipelines."""
