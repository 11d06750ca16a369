"""The costs of every layer of a model: measured on a device, or computed for a device that this machine lacks.

It offers:

    profile_model      times layers one by one, forward and backward, at several batch sizes
    profile_job        the same on all ranks of a job at once, with its links and its optimizer
    analytic_profile   counts operations and bytes on fake tensors, over the rates of a known device;
    analytic_profiles  of several devices
    measure_links      latency and bandwidth between ranks
"""

from diffusionpipe.profiler.analytic import analytic_profile, analytic_profiles
from diffusionpipe.profiler.links import Links, Trial, measure_links
from diffusionpipe.profiler.measured import profile_model
from diffusionpipe.profiler.together import profile_job

__all__ = ["Links", "Trial", "analytic_profile", "analytic_profiles", "measure_links", "profile_job", "profile_model"]
