from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.strategies import sized, trainers

from diffusionpipe.errors import ConfigError, ScheduleError
from diffusionpipe.ir import Op, Range
from diffusionpipe.passes import (
    PlacedFill,
    communicate,
    insert_encoding,
    insert_fills,
    prologue,
    reduce_gradients,
    replicate,
)
from diffusionpipe.schedules import REGISTRY
from diffusionpipe.simulator import simulate, uniform_costs
from diffusionpipe.timing import Streams
from diffusionpipe.timing.legal import check

NUM_LAYERS = 6
OUTPUTS = {0: ("noisy", "text"), 1: ("text",), 2: ("text", "target")}


@st.composite
def filled_schedules(draw):
    """Any schedule, with fills of two layer ranges at random places and random shares."""
    num_stages, num_microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    schedule = sized(draw(trainers), num_stages, num_microbatches, 2)
    if draw(st.booleans()):
        schedule = replicate(schedule, [2 if stage.worker == 0 else 1 for stage in schedule.placement.stages])
    batch = schedule.placement.num_samples
    borders = sorted(
        draw(st.lists(st.integers(0, batch), min_size=schedule.num_workers - 1, max_size=schedule.num_workers - 1))
    )
    parts = [Range(a, b) for a, b in zip([0, *borders], [*borders, batch], strict=True)]
    fills = {}
    for worker, part in enumerate(parts):
        if not part:
            continue
        length = len(schedule.orders[worker])
        cut = draw(st.integers(1, NUM_LAYERS - 1))
        first, second = sorted([draw(st.integers(0, length)), draw(st.integers(0, length))])
        fills[worker] = [
            PlacedFill(position=first, component="vae", layers=Range(0, cut), samples=part),
            PlacedFill(position=second, component="vae", layers=Range(cut, NUM_LAYERS), samples=part),
        ]
    return insert_fills(schedule, fills, block=9, outputs=OUTPUTS)


@given(filled_schedules(), st.sampled_from(Streams))
def test_fills_at_any_place_are_legal_before_and_after_communication(schedule, streams):
    check(schedule, streams=streams)
    schedule = reduce_gradients(schedule, is_data_parallel=True)
    if streams is not Streams.HOST:  # its host can wait for reductions only where `communicate` has put them
        check(schedule, streams=streams)
    schedule = communicate(schedule, simulate(schedule, uniform_costs(schedule)))
    check(schedule, streams=streams)


@given(filled_schedules(), st.sampled_from(Streams))
def test_the_prologue_runs_the_same_fills_and_messages_alone(schedule, streams):
    schedule = communicate(schedule, simulate(schedule, uniform_costs(schedule)))
    first = prologue(schedule)
    check(first, streams=streams)
    assert first.fills == schedule.fills
    for order, whole in zip(first.orders, schedule.orders, strict=True):
        encodes = [action for action in order if action.op is Op.ENCODE]
        assert encodes == [action for action in whole if action.op is Op.ENCODE]
    frozen = [m for m in schedule.messages if schedule.placement.is_frozen(m.source)]
    assert list(first.messages) == frozen
    assert not {action.op for _, action in first.actions()} - {Op.ENCODE, Op.SEND_F, Op.RECV_F}


def test_work_ahead_delays_no_forward_of_this_iteration():
    schedule = REGISTRY["1f1b"](2, 2, 2)
    fills = {1: [PlacedFill(position=4, component="vae", layers=Range(0, NUM_LAYERS), samples=Range(0, 4))]}
    filled = insert_fills(schedule, fills, block=9, outputs=OUTPUTS)
    timeline = simulate(filled, uniform_costs(filled, encode=5))
    plain = simulate(schedule, uniform_costs(schedule))
    starts = {span.action: span.start for span in timeline.spans if span.action.op is not Op.ENCODE}
    assert starts == {span.action: span.start for span in plain.spans}
    serial = insert_encoding(schedule, block=9, outputs=OUTPUTS, num_layers=NUM_LAYERS, max_chunk=4)
    assert simulate(serial, uniform_costs(serial, encode=5)).makespan > plain.makespan


def test_a_missing_sample_of_work_ahead_is_found():
    schedule = REGISTRY["1f1b"](2, 2, 2)
    fills = {0: [PlacedFill(position=0, component="vae", layers=Range(0, NUM_LAYERS), samples=Range(0, 4))]}
    filled = insert_fills(schedule, fills, block=9, outputs=OUTPUTS)
    shorter = replace(filled, fills=(replace(filled.fills[0], samples=Range(0, 3)),))
    with pytest.raises(ScheduleError, match="sample 3"):
        check(shorter)


@pytest.mark.parametrize(
    ("fills", "problem"),
    [
        ({0: [PlacedFill(position=0, component="", layers=Range(0, 6), samples=Range(0, 3))]}, "end at sample 3 of 4"),
        ({1: [PlacedFill(position=0, component="", layers=Range(0, 6), samples=Range(1, 4))]}, "at sample 0 of 4"),
        ({0: [PlacedFill(position=99, component="", layers=Range(0, 6), samples=Range(0, 4))]}, "before action 99"),
    ],
)
def test_fills_that_do_not_fit_are_refused(fills, problem):
    with pytest.raises(ConfigError, match=problem):
        insert_fills(REGISTRY["1f1b"](2, 2, 2), fills, block=9, outputs=OUTPUTS)
