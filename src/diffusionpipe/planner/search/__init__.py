"""The best plan among many: candidates, their estimates, and full simulations of the best."""
