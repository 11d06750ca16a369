"""What other systems would do with the same model and machines."""
