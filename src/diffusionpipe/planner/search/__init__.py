"""Searches the fastest plans: candidates, their estimates, and full simulations of the best."""
