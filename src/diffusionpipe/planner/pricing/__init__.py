"""What work costs where: stages, encoders, collectives, and how ranks become pipelines."""
