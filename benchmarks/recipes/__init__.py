"""What recipes of training do for the digits of examples/digits."""
