import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusionpipe.errors import ConfigError, ScheduleError
from diffusionpipe.ir import Action, Op
from diffusionpipe.ir.action import COMPUTE_OPS
from diffusionpipe.ir.schedule import lone_blocks
from diffusionpipe.passes import communicate, reduce_gradients, replicate, shard_parameters
from diffusionpipe.planner.assembly.buckets import subdivide
from diffusionpipe.schedules import REGISTRY, gpipe, one_f_one_b, zeropp
from diffusionpipe.simulator import simulate, uniform_costs
from diffusionpipe.timing.legal import check

SHORT = {Op.UNSHARD: "U", Op.RESHARD: "R", Op.REDUCE_GRAD: "G"}


def text(order) -> str:
    return " ".join(f"{a.stage}{SHORT[a.op]}" if a.op in SHORT else str(a) for a in order)


def alone(blocks: int, microbatches: int = 1, family=one_f_one_b, **options):
    return subdivide(family(1, microbatches), blocks, **options)


def can_be_sharded(schedule) -> bool:
    return lone_blocks(schedule) >= {stage.weights for stage in schedule.placement.stages}


def most_whole(schedule, worker: int) -> int:
    whole, most = 0, 0
    for action in schedule.orders[worker]:
        whole += (action.op is Op.UNSHARD) - (action.op is Op.RESHARD)
        most = max(most, whole)
    return most


def test_blocks_are_gathered_one_run_ahead_and_the_last_ones_stay_for_their_backward():
    schedule = shard_parameters(alone(3))
    assert text(schedule.orders[0]) == "0U 1U 0F0 0R 2U 1F0 2F0 2B0 2R 2G 0U 1B0 1R 1G 0B0 0R 0G"


def test_without_prefetch_a_block_is_gathered_right_before_its_run():
    schedule = shard_parameters(alone(3), prefetch=0)
    assert text(schedule.orders[0]) == "0U 0F0 0R 1U 1F0 1R 2U 2F0 2B0 2R 2G 1U 1B0 1R 1G 0U 0B0 0R 0G"


def test_block_by_block_a_block_is_gathered_twice_however_many_micro_batches_there_are():
    schedule = shard_parameters(alone(6, 4, gpipe, is_breadth_first=True))
    assert sum(action.op is Op.UNSHARD for action in schedule.orders[0]) == 2 * 6 - 2  # two stay
    assert sum(action.op is Op.REDUCE_GRAD for action in schedule.orders[0]) == 6
    one_by_one = shard_parameters(alone(6, 4))
    assert sum(action.op is Op.REDUCE_GRAD for action in one_by_one.orders[0]) == 4 * 6


def test_zeropp_gathers_a_chunk_once_for_each_unit_and_direction():
    """A unit of zeropp stays with a chunk for all its micro-batches; that is what the schedule is for."""
    schedule = shard_parameters(zeropp(2, 6, unit=3, chunks=4), prefetch=0)
    gathers = sum(action.op is Op.UNSHARD for action in schedule.orders[0])
    assert gathers <= 2 * 2 * 4 * 2  # units, directions, chunks; weight gradients come apart from input gradients


@given(st.sampled_from(sorted(REGISTRY)), st.integers(1, 4), st.integers(1, 6), st.integers(1, 3), st.integers(0, 2))
def test_every_family_whose_blocks_are_alone_can_be_sharded(name, workers, microbatches, parts, prefetch):
    try:
        plain = REGISTRY[name](workers, microbatches)
    except ConfigError:
        return
    if not can_be_sharded(plain) or name.startswith("ordered"):
        return
    schedule = subdivide(plain, parts)
    sharded = shard_parameters(schedule, prefetch=prefetch)
    check(sharded)
    for worker, (order, before) in enumerate(zip(sharded.orders, schedule.orders, strict=True)):
        assert tuple(action for action in order if action.op in COMPUTE_OPS) == before
        assert most_whole(sharded, worker) <= prefetch + 1
    check(communicate(sharded, simulate(sharded, uniform_costs(sharded))))


@given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 9))
def test_gathers_that_take_no_time_change_no_time(blocks, microbatches, reduce):
    plain = reduce_gradients(alone(blocks, microbatches), is_data_parallel=True)
    sharded = shard_parameters(alone(blocks, microbatches))
    assert simulate(sharded, uniform_costs(sharded)).makespan == simulate(plain, uniform_costs(plain)).makespan


def test_what_is_explicit_already_or_held_twice_is_refused():
    with pytest.raises(ScheduleError, match="before its messages and reductions"):
        shard_parameters(reduce_gradients(alone(2), is_data_parallel=True))
    with pytest.raises(ScheduleError, match="several workers hold it"):
        shard_parameters(replicate(one_f_one_b(2, 4, 2), [2, 1]))
    with pytest.raises(ConfigError, match="prefetch=-1"):
        shard_parameters(alone(2), prefetch=-1)


def edited(schedule, change):
    from dataclasses import replace

    return replace(schedule, orders=(tuple(change(list(schedule.orders[0]))),))


def without(number: int, op: Op):
    def change(order):
        places = [i for i, action in enumerate(order) if action.op is op]
        del order[places[number]]
        return order

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(1, Op.UNSHARD), "1F0 reads block 1, which is in parts; UNSHARD it before"),
        (without(-1, Op.RESHARD), "block 0 is still whole at the end"),
        (without(0, Op.RESHARD), "0UNSHARD gathers block 0, which is whole"),
        (without(0, Op.REDUCE_GRAD), "the gradients of 2B0 are not reduced"),
        (lambda order: [*order, Action(stage=0, op=Op.RESHARD)], "0RESHARD drops block 0, which is in parts"),
        (lambda order: [*order, Action(stage=0, op=Op.REDUCE_GRAD)], "0REDUCE_GRAD reduces no gradients of block 0"),
    ],
)
def test_the_checker_names_what_is_wrong(change, message):
    with pytest.raises(ScheduleError) as caught:
        check(edited(shard_parameters(alone(3)), change))
    assert any(message in problem for problem in caught.value.problems), caught.value.problems
