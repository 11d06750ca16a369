"""Probes add their work to a step, and no bubble."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest

from diffusionpipe.costs import Costs, StageCosts
from diffusionpipe.errors import ScheduleError
from diffusionpipe.ir import Edge, Op
from diffusionpipe.ir.files import schedule_from_text, schedule_to_text
from diffusionpipe.passes import connect_blocks
from diffusionpipe.schedules import REGISTRY
from diffusionpipe.schedules.families.one_f_one_b import one_f_one_b
from diffusionpipe.schedules.several.probes import with_probes
from diffusionpipe.simulator import activations_in_flight, simulate
from diffusionpipe.timing.legal import check


def probed(schedule, k):
    """The family's schedule with the last k micro-batches conditioned, and a chain of blocks that leads back."""
    blocks = sorted({stage.weights for stage in schedule.placement.stages})
    edges = [Edge(producer=a, consumer=b, tensors=("x",), gradients=("x",)) for a, b in pairwise(blocks)]
    back = Edge(producer=blocks[-1], consumer=blocks[0], tensors=("estimate",), gradients=())
    total = sum(len(pipeline.microbatches) for pipeline in schedule.placement.pipelines)
    return connect_blocks(with_probes(schedule, {"": Fraction(k, total)}), [*edges, back])


def time_of(schedule):
    stages = (StageCosts(forward=1, backward=2, input_grad=1, weight_grad=1),) * len(schedule.placement.stages)
    return simulate(schedule, Costs(stages=stages)).makespan


GOLDEN = {
    (2, 2, 1): 10,
    (2, 4, 2): 17,
    (4, 4, 2): 23,
    (4, 8, 4): 37,
    (8, 8, 4): 49,
    (8, 16, 8): 77,
    (2, 4, 4): 19,
    (4, 8, 8): 41,
    (8, 16, 16): 85,
    (4, 4, 4): 25,
}
"""(stages, micro-batches, conditioned ones) -> time with F = T = 1, B = 2 and free messages."""


@pytest.mark.parametrize(("p", "m", "k"), GOLDEN)
def test_probes_add_their_work_and_no_bubble(p, m, k):
    schedule = probed(one_f_one_b(p, m), k)
    check(schedule)
    assert time_of(schedule) == GOLDEN[p, m, k] == m * 3 + k + (p - 1) * 3
    assert activations_in_flight(schedule) == activations_in_flight(one_f_one_b(p, m))


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_every_family_takes_probes(name, k):
    plain = REGISTRY[name](4, 8, 1)
    schedule = probed(plain, k)
    check(schedule)
    rounds = len(plain.placement.stages) // 4 * k
    assert time_of(schedule) <= time_of(plain) + rounds + 8
    assert schedule_from_text(schedule_to_text(schedule)) == schedule


def test_without_conditioned_samples_nothing_changes():
    plain = one_f_one_b(2, 2)
    assert with_probes(plain, {"": Fraction(0)}) is plain
    assert with_probes(plain, {"another": Fraction(1)}) is plain


def test_a_micro_batch_with_any_conditioned_sample_is_probed():
    schedule = with_probes(one_f_one_b(2, 4, 4), {"": Fraction(5, 16)})
    assert [pipeline.numbers for pipeline in schedule.placement.pipelines] == [range(4), range(2, 4)]


def changed(schedule, **fields):
    *others, probe = schedule.placement.pipelines
    return replace(schedule, placement=replace(schedule.placement, pipelines=(*others, replace(probe, **fields))))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"ops": frozenset({Op.F, Op.B})}, "a probe has F alone"),
        ({"probes_from": 9}, "probes from micro-batch 9 on, of 2"),
        ({"microbatches": (1, 1, 1)}, "but 0 other pipelines"),
        ({"model": "another"}, "but 0 other pipelines"),
        ({"stages": (3, 2)}, "its stages differ from the stages"),
        ({"probes_from": None}, "both train block"),
    ],
)
def test_the_checker_knows_what_a_probe_is(fields, words):
    with pytest.raises(ScheduleError, match=words):
        check(changed(probed(one_f_one_b(2, 2), 1), **fields))


def test_nothing_flows_back_into_a_probe():
    schedule = probed(one_f_one_b(2, 2), 1)
    real, probe = schedule.placement.pipelines
    edges = tuple(replace(e, gradients=e.tensors) for e in real.edges)
    wrong = replace(schedule, placement=replace(schedule.placement, pipelines=(replace(real, edges=edges), probe)))
    with pytest.raises(ScheduleError, match="nothing flows back into a probe"):
        check(wrong)


def test_an_estimate_that_is_read_before_its_probe_is_a_deadlock():
    schedule = probed(one_f_one_b(2, 2), 2)
    late = tuple((*order[2:], *order[:2]) for order in schedule.orders)
    with pytest.raises(ScheduleError, match="deadlock"):
        check(replace(schedule, orders=late))
