"""The work of `diffusionpipe sample`: models of runs and folders, requests, ranks that draw."""
