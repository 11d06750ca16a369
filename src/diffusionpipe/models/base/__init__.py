"""Families of models, and parts that any family can add: the kind of its pipeline, the fed-back estimate."""
