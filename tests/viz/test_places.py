from fractions import Fraction

from diffusionpipe.schedules import gpipe
from diffusionpipe.schedules.families.bitpipe import bitpipe
from diffusionpipe.schedules.families.chimera import chimera
from diffusionpipe.schedules.several.probes import with_probes
from diffusionpipe.simulator import simulate, uniform_costs
from diffusionpipe.viz import explained_sketch
from diffusionpipe.viz.places import PROBE, is_later, places_of_stages


def places(schedule):
    return places_of_stages(simulate(schedule, uniform_costs(schedule)).spans)


def later(schedule):
    return {stage for stage, place in places(schedule).items() if is_later(*place)}


def test_one_stage_on_each_worker_is_never_later():
    assert places(gpipe(3, 2)) == {0: (0, 1), 1: (0, 1), 2: (0, 1)}
    assert not later(gpipe(3, 2))


def test_a_probe_stands_in_no_direction():
    schedule = with_probes(gpipe(2, 2), {"": Fraction(1, 2)})
    assert places(schedule) == {0: (0, 1), 1: (0, 1), 2: PROBE, 3: PROBE}
    sketch = explained_sketch(simulate(schedule, uniform_costs(schedule)), width=120)
    assert "0 | P1 F0 F1" in sketch
    assert "P0: its forward without gradients, ahead" in " ".join(sketch.split())


def test_the_stages_of_the_second_direction_are_later():
    for schedule in (chimera(4, 4), bitpipe(4, 4), chimera(8, 8, directions=4)):
        half = len(schedule.placement.stages) // 2
        assert later(schedule) == set(range(half, 2 * half))


def test_stages_of_a_worker_are_counted_in_the_order_of_direction_and_chunk():
    found = {stage: place for stage, (place, _) in places(bitpipe(2, 2)).items()}
    on_worker_0, on_worker_1 = [0, 3, 5, 6], [1, 2, 4, 7]
    for stages in (on_worker_0, on_worker_1):
        assert [found[stage] for stage in stages] == [0, 1, 2, 3]
