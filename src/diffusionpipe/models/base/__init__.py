"""What a family of models is, and what any family can add: the kind of its pipeline, the fed-back estimate."""
