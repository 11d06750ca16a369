"""The fullest phase of a run; tests/profiler/test_held_in_phases.py measures what each of them holds."""

from dataclasses import replace

from diffusionpipe.holding.memory import MemoryUse
from diffusionpipe.planner.phases import Phases, standing


def test_the_fullest_phase_counts_beside_what_stands():
    phases = Phases(validation=1, drawing=2, decoding=5, averages=3, exchange=4)
    assert phases.peak == 8
    assert replace(phases, averages=0, decoding=0).peak == 4
    assert standing(MemoryUse(parameters=1, optimizer=2, frozen_outputs=4, activations=100, messages=100)) == 7
