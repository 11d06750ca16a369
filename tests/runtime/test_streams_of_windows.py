"""Without a flush, too, no kernel touches what another one still writes, or reads what is written later."""

from threading import get_ident
from unittest import mock

import pytest
import torch
from kit.asynchronous_device import AsynchronousDevice, AsynchronousRecorder, random_lengths
from kit.layout_cases import scattered
from kit.streams import Streams, StreamTransport, devices_with_streams, without_order
from kit.tiers import quick_and_slow
from kit.windowed import layout_of, model_of, run_windows

from diffusionpipe.ir.versions import batches_held
from diffusionpipe.planner import build_plan
from diffusionpipe.runtime.comm.threads import run_threads
from diffusionpipe.runtime.engine import executor, windows
from diffusionpipe.runtime.weights.gradients import BlockGradients

KINDS = {
    "stashed": layout_of("stashed", 3, 2),
    "predicted": layout_of("predicted", 3, 2),
    "data-parallel": layout_of("stashed", 2, 2, data_parallel=2),
}
STOPS = (3, 5)
"""The batches before which there is a flush."""


def races_of(kind, *, is_filled, model="dit"):
    """The reports of all ranks in five windows; `is_filled`: these encode, at any place, what begins later."""
    graph, described, batches = model_of(model)
    plan = build_plan(described, KINDS[kind], filler=scattered(5) if is_filled else None)
    devices = {}

    def main(rank, threads):
        streams = Streams()
        devices[get_ident()] = AsynchronousDevice(random_lengths(rank))
        transport = StreamTransport(threads, rank, streams)
        with streams:
            run_windows(
                graph, described, plan, rank, transport, batch_of=batches.__getitem__, names=["adamw"], stops=STOPS,
                autocast=torch.bfloat16 if model == "float32" else None,
            )  # fmt: skip
        return streams

    def recorder(_):
        return AsynchronousRecorder(devices[get_ident()])

    with (
        devices_with_streams(),
        mock.patch.object(executor, "recorder_for", recorder),
        mock.patch.object(windows, "recorder_for", recorder),
    ):
        ranks = run_threads(plan.mesh.num_ranks, main)
    assert all(streams.num_kernels > 1000 for streams in ranks)
    return [race for streams in ranks for race in streams.races]


ALL = [(kind, True, "dit") for kind in KINDS] + [("stashed", False, "dit"), ("predicted", False, "float32")]


@pytest.mark.parametrize(("kind", "is_filled", "model"), quick_and_slow(ALL, quick=[("stashed", True, "dit")]))
def test_no_kernel_of_a_window_races_with_another(kind, is_filled, model):
    assert races_of(kind, is_filled=is_filled, model=model) == []


def unordered(wait):
    """The data arrive, but the stream does not wait for them."""

    def waited(self, *arguments):
        with without_order():
            wait(self, *arguments)

    return waited


FAULTS = {
    "rows are another batch's too early": (
        "stashed", windows, "batches_held", lambda schedule: batches_held(schedule) - 1, "races with read by send",
    ),
    "rows that are sent are not waited for": (
        "stashed", windows._Context, "finish", unordered(windows._Context.finish), "read by send",
    ),
    "sums are not waited for": (
        "data-parallel", BlockGradients, "finish", unordered(BlockGradients.finish), "written by sum on",
    ),
}  # fmt: skip
"""What is missing -> kind, what is replaced by what, and words of a report."""


@pytest.mark.parametrize("name", quick_and_slow(FAULTS, quick=["rows are another batch's too early"]))
def test_a_missing_wait_in_a_window_is_reported(name):
    kind, owner, attribute, faulty, words = FAULTS[name]
    with mock.patch.object(owner, attribute, faulty):
        races = races_of(kind, is_filled=True)
    assert [race for race in races if words in race], races[:3]
