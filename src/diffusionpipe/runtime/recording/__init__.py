"""Recording what ran when."""
