"""The interpreter: a plan compiled for a rank into a program, and its execution."""
