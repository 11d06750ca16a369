"""Steps by tokens beside steps of one size, simulated."""
