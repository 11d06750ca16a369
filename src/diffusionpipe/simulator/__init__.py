"""Schedule x costs -> timeline."""

from diffusionpipe.simulator.simulate import activations_in_flight, simulate
from diffusionpipe.simulator.uniform import uniform_costs

__all__ = ["activations_in_flight", "simulate", "uniform_costs"]
