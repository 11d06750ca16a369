"""Other systems with the same model and machines: their layouts and times."""
