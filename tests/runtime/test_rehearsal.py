from time import perf_counter

import pytest

from diffusionpipe.costs import Costs, StageCosts, TensorSpec
from diffusionpipe.errors import ConfigError, PeerError, ScheduleError
from diffusionpipe.ir import Mesh, Op
from diffusionpipe.passes import bring_parameters, communicate, reduce_gradients, shard_parameters
from diffusionpipe.planner.assembly.buckets import subdivide
from diffusionpipe.runtime.comm.threads import run_threads
from diffusionpipe.runtime.job.local_ranks import local_ranks
from diffusionpipe.runtime.rehearsals.rehearsal import DeviceClock, VirtualRun, rehearse, time_messages
from diffusionpipe.runtime.rehearsals.virtual_reductions import VirtualCollectives, meeting_ranks
from diffusionpipe.schedules import REGISTRY
from diffusionpipe.simulator import simulate, uniform_costs

TENSORS = {
    "input": TensorSpec(name="input", shape=(3,)),
    "hidden": TensorSpec(name="hidden", shape=(3,), needs_gradient=True),
    "loss": TensorSpec(name="loss", shape=(), needs_gradient=True),
}


def run_of(name="1f1b", *, data_parallel=1, reduce=0.002):
    """Two stages of 1 and 2 ms; reductions under data parallelism."""
    costs = Costs(stages=tuple(StageCosts(forward=t, backward=t) for t in (0.001, 0.002)), reduces=(reduce, reduce))
    schedule = reduce_gradients(REGISTRY[name](2, 3, 2), is_data_parallel=data_parallel > 1)
    schedule = communicate(schedule, simulate(schedule, costs))
    mesh = Mesh(data_parallel=data_parallel, pipeline=2)
    return VirtualRun(schedule=schedule, costs=costs, tensors=TENSORS, mesh=mesh, inputs=("input",))


def fail_with(job, error):
    if job.membership.rank == 1:
        raise error
    return "fine"


def die(job):
    if job.membership.rank == 1:
        import os

        os._exit(3)


def name_of(job):
    return job.membership.rank


@pytest.fixture(scope="module")
def pair():
    with local_ranks(2) as ranks:
        yield ranks


def test_every_rank_measures_every_action_of_its_order(pair):
    runs = {"one": run_of("gpipe"), "other": run_of("1f1b")}
    found = pair.run(rehearse, runs, ["one", "other", "one"])
    for rank, iterations in enumerate(found):
        assert {name: len(measured) for name, measured in iterations.items()} == {"one": 2, "other": 1}
        for name, measured in iterations.items():
            for iteration in measured:
                assert tuple(span.action for span in iteration.spans) == runs[name].schedule.orders[rank]
                assert {span.worker for span in iteration.spans} == {rank}


def test_the_first_rank_reports_every_iteration_while_the_ranks_are_at_work(pair):
    reported = []
    found = pair.run(rehearse, {"run": run_of()}, ["run"] * 3, progress=reported.append)
    assert reported == [0, 1, 2, 3]
    assert [len(rank["run"]) for rank in found] == [3, 3]


def test_no_rank_is_over_before_its_device_has_waited_for_every_action(pair):
    # A whole iteration may end sooner than it is simulated: a late rank does not know when a message came.
    run = run_of()
    found = pair.run(rehearse, {"run": run}, ["run"])
    for measured, stage in zip(found, run.costs.stages, strict=True):
        assert measured["run"][0].end - measured["run"][0].start >= 3 * (stage.forward + stage.backward)


def test_messages_are_timed_by_the_lower_rank_of_each_pair(pair):
    lower, upper = pair.run(time_messages, (64, 4096), 2)
    assert [size for size, _ in lower] == [64, 4096]
    assert all(seconds > 0 for _, seconds in lower)
    assert upper == []


def test_an_op_that_the_executor_does_not_know_is_an_error_that_names_the_action():
    run = run_of()
    order = [a if a.op is not Op.B else type(a)(stage=a.stage, op=Op.STEP)
             for a in run.schedule.orders[1]]  # fmt: skip
    broken = type(run.schedule)(
        name="broken",
        placement=run.schedule.placement,
        orders=(run.schedule.orders[0], tuple(order)),
        messages=run.schedule.messages,
    )
    changed = VirtualRun(schedule=broken, costs=run.costs, tensors=TENSORS, mesh=run.mesh, inputs=("input",))
    with local_ranks(2) as ranks, pytest.raises(ScheduleError, match="worker 1: 1STEP"):
        ranks.run(rehearse, {"run": changed}, ["run"])


def test_errors_for_the_user_come_from_the_ranks_as_they_are():
    with local_ranks(2) as ranks:
        assert ranks.run(name_of) == [0, 1]
        with pytest.raises(ConfigError, match="too little"):
            ranks.run(fail_with, ConfigError("too little"))


def test_another_error_names_the_rank_and_shows_its_traceback():
    with local_ranks(2) as ranks, pytest.raises(PeerError, match=r"(?s)rank 1 of 2 failed.*fail_with"):
        ranks.run(fail_with, ValueError("a bug"))


def test_a_rank_that_dies_ends_the_call_with_an_error():
    with local_ranks(2) as ranks, pytest.raises(PeerError, match=r"rank [01] of 2"):
        ranks.run(die)


def test_reductions_are_summed_by_all_ranks_that_hold_a_block():
    run = run_of(data_parallel=2)
    assert meeting_ranks(run.schedule, run.mesh) == {0: (0, 2), 1: (1, 3)}
    assert meeting_ranks(run_of().schedule, Mesh(pipeline=2)) == {}


def test_a_reduction_ends_its_length_after_the_last_rank_came_to_it():
    run = run_of(data_parallel=2)
    waits = {}

    def main(rank, transport):
        holders = {0: (0, 1), 1: (1, 3)}
        reduction = VirtualCollectives(
            schedule=run.schedule,
            costs=run.costs,
            worker=0,
            rank=rank,
            holders=holders,
            transport=transport,
            wait=lambda d: waits.setdefault(rank, d),
        ).reductions()[0]
        reduction.reduce()
        reduction.finish()
        return reduction.stream.free, float(reduction._starts.max())

    results = run_threads(2, main)
    assert results[0] == results[1]
    free, last = results[0]
    assert free == last + 0.002
    assert all(0 <= duration <= 0.002 for duration in waits.values())


def test_compute_waits_for_gathers_and_no_iteration_is_shorter_than_predicted(pair):
    schedule = shard_parameters(subdivide(REGISTRY["1f1b"](1, 1, 2), 3))
    schedule = communicate(schedule, simulate(schedule, uniform_costs(schedule)))
    stage = StageCosts(forward=0.001, backward=0.002)
    costs = Costs(stages=(stage,) * 3, reduces=(0.004,) * 3, unshards=(0.003,) * 3)
    mesh = Mesh(data_parallel=2, shard=2)
    run = VirtualRun(schedule=schedule, costs=costs, tensors=TENSORS, mesh=mesh, inputs=("hidden",))
    assert meeting_ranks(schedule, mesh) == {0: (0, 1), 1: (0, 1), 2: (0, 1)}
    found = pair.run(rehearse, {"run": run}, ["run"])
    predicted = simulate(schedule, costs)
    assert predicted.makespan == pytest.approx(0.027)
    starts = {str(span.action): span.start for span in predicted.spans if span.action.op in (Op.F, Op.B)}
    for rank in found:
        iteration = rank["run"][0]
        assert iteration.end - iteration.start >= 0.99 * predicted.makespan
        for span in iteration.spans:
            if str(span.action) in starts:
                assert span.end >= starts[str(span.action)]


def test_parameters_come_from_their_owners_beside_the_first_forwards_and_no_iteration_is_shorter(pair):
    schedule = reduce_gradients(subdivide(REGISTRY["1f1b"](1, 2, 2), 3), is_data_parallel=True)
    schedule = bring_parameters(schedule)
    schedule = communicate(schedule, simulate(schedule, uniform_costs(schedule)))
    stage = StageCosts(forward=0.003, backward=0.006)
    costs = Costs(stages=(stage,) * 3, reduces=(0.004,) * 3, unshards=(0.003,) * 3)
    mesh = Mesh(data_parallel=2, owners=2)
    run = VirtualRun(schedule=schedule, costs=costs, tensors=TENSORS, mesh=mesh, inputs=("hidden",))
    assert meeting_ranks(schedule, mesh) == {0: (0, 1), 1: (0, 1), 2: (0, 1)}
    predicted = simulate(schedule, costs)
    # One parameter is waited for, all others travel beside compute; of the sums one is left at the end.
    assert predicted.makespan == pytest.approx(0.003 + 2 * 3 * 0.009 + 0.004)
    for rank in pair.run(rehearse, {"run": run}, ["run"]):
        iteration = rank["run"][0]
        assert iteration.end - iteration.start >= 0.99 * predicted.makespan


def test_what_the_host_was_late_by_is_taken_from_its_next_wait():
    clock = DeviceClock()
    clock.begin()
    start = clock.free
    clock.wait(0.001)
    assert perf_counter() >= start + 0.001
    clock.wait(0.0)
    assert clock.free == start + 0.001
