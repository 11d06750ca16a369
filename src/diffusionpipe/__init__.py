"""DiffusionPipe: train large diffusion models on several devices by pipeline parallelism."""

__version__ = "0.1.0"
