"""Runs and plans as one page: its data, part by part, and the server of `diffusionpipe watch`."""
