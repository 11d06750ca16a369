"""A finished run as a folder that other programs open, with its model card."""
