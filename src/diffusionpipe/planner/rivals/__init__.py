"""Layouts that other systems would use for the same model and machines, with their times."""
