"""Schedule x costs -> timeline."""

from diffusionpipe.simulator.simulate import simulate
from diffusionpipe.simulator.uniform import uniform_costs
from diffusionpipe.timing.held import activations_in_flight

__all__ = ["activations_in_flight", "simulate", "uniform_costs"]
