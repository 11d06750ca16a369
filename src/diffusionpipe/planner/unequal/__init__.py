"""Micro-batches of unequal tokens: the cut of a step's samples, its orders, and the time of steps as they are drawn."""
