"""The fullest phase of a run; tests/profiler/test_held_in_phases.py measures what each of them holds."""

from dataclasses import fields, replace

from diffusionpipe.holding.memory import TRAITS, MemoryUse, Trait
from diffusionpipe.planner.phases import Phases


def test_the_fullest_phase_counts_beside_what_stands():
    phases = Phases(validation=1, drawing=2, decoding=5, averages=3, exchange=4)
    assert phases.peak == 8
    assert replace(phases, averages=0, decoding=0).peak == 4
    use = MemoryUse(parameters=1, optimizer=2, frozen_outputs=4, activations=100, messages=100)
    assert use.having(Trait.LASTING) == 7


def test_each_item_of_memory_has_its_traits_in_the_table():
    assert list(TRAITS) == [field.name for field in fields(MemoryUse)]
    whole = MemoryUse(**{name: 2**place for place, name in enumerate(TRAITS)})
    for trait in Trait:
        assert whole.having(trait) == sum(2**place for place, traits in enumerate(TRAITS.values()) if trait in traits)
    assert whole.having(Trait.LASTING) == whole.having(Trait.COUNTED) + whole.frozen_outputs
