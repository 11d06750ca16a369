"""On a GPU's streams no kernel touches what another one still writes, or reads what is written later."""

import copy
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from threading import get_ident
from unittest import mock

import pytest
import torch
from kit.asynchronous_device import AsynchronousDevice, AsynchronousRecorder, random_lengths
from kit.descriptions import described
from kit.layout_cases import can_run, scattered
from kit.layouts import CPU, rows_of
from kit.reusing_pool import planted_pools
from kit.streams import (
    BACKEND,
    Event,
    Stream,
    Streams,
    StreamTransport,
    Work,
    devices_with_streams,
    page_locked,
    without_order,
)
from kit.tiers import quick_and_slow
from kit.tiny_models import raw_inputs, tiny_dit, tiny_stable_diffusion

from diffusionpipe.ir import Action, Sharded
from diffusionpipe.ir.flows import TIMED_OPS
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.runtime.comm.places import encoded_rows
from diffusionpipe.runtime.comm.threads import run_threads
from diffusionpipe.runtime.compute.stage import Precision
from diffusionpipe.runtime.compute.store import RowStore
from diffusionpipe.runtime.engine import executor
from diffusionpipe.runtime.engine.executor import Executor
from diffusionpipe.runtime.engine.worker import build_worker
from diffusionpipe.runtime.machine.upload import Upload
from diffusionpipe.runtime.weights.gradients import BlockGradients
from diffusionpipe.runtime.weights.sharding import Reductions, ShardedBlock
from diffusionpipe.schedules import REGISTRY
from diffusionpipe.trainer.inference.denoise import PipelinePredictor
from diffusionpipe.trainer.optim.ema import Ema
from diffusionpipe.trainer.optim.optimizer import build_optimizer
from diffusionpipe.trainer.optim.undo import Backup
from diffusionpipe.trainer.step import host_sum
from diffusionpipe.trainer.step.host_sum import HostSum

BATCH = 8
KINDS = {
    "plain": {},
    "replicas": {"replicas": (2, 1)},
    "data-parallel": {"data_parallel": 2},
    "sharded": {"data_parallel": 2, "sharded": Sharded.ALL},
    "offloaded": {"encoders": "host"},
    "ahead": {},
}
"""Kind -> what its layout has beside the schedule. Splitting the backward is a matter of the schedule."""


def layout_of(kind, schedule):
    return Layout(batch=BATCH, stages=2, microbatches=4, encode_chunk=3, schedule=schedule, **KINDS[kind])


@cache
def prepared(model_of, dtype=torch.float64):
    graph = model_of(dtype=dtype)
    autocast = torch.bfloat16 if dtype is torch.float32 else None
    return graph, described(graph, autocast=autocast), raw_inputs(graph, BATCH)


QUICK = [
    ("plain", "1f1b"), ("replicas", "gpipe"), ("data-parallel", "zb-h1"), ("sharded", "1f1b"), ("offloaded", "zb-v"),
    ("ahead", "1f1b"),
]  # fmt: skip
ALL = [
    (kind, schedule)
    for turn, schedule in enumerate(REGISTRY)
    for place, kind in enumerate(KINDS)
    # Each schedule meets every third layout, in turn.
    if ((turn + place) % 3 == 0 or (kind, schedule) in QUICK)
    and can_run(layout_of(kind, schedule), prepared(tiny_dit)[1])
]
CASES = quick_and_slow(ALL, QUICK)


@dataclass
class Seen:
    """What the checkers of all ranks have seen."""

    races: list[str] = field(default_factory=list)
    kernels: int = 0
    streams: set[str] = field(default_factory=set)


def check_times(recording):
    """The worker computes or is idle, and both make up the iteration."""
    busy, length = recording.busy()
    spans, same_length = recording.spans()
    computing = [span for span in spans if span.action.op in TIMED_OPS]
    starts, ends = [span.start for span in computing], [span.end for span in computing]
    assert starts == sorted(starts)
    casts = sum(end - start for (start, end), step in marked_steps(recording) if not isinstance(step, Action))
    idle = sum(start - end for start, end in zip([*starts, length], [0.0, *ends], strict=True)) - casts
    assert busy + idle == pytest.approx(length)
    assert 0 <= busy <= length == same_length
    assert idle >= 0


def marked_steps(recording):
    """The times and the work of each step."""
    times = recording.recorder.times()
    return [((times[start], times[end]), step) for (start, end), step in recording.steps]


def printed(numbers):
    """The numbers as the host reads them."""
    return " ".join(format(float(number), "g") for number in numbers)


def watch(model_of, kind, schedule="1f1b", *, num_steps=2, phases=False, is_narrow=False):
    """Training steps as the trainer runs them: fed, summed, updated before the sum is there, averaged."""

    def loaded(inputs):
        return {name: page_locked(value) for name, value in inputs.items()}

    graph, model, inputs = prepared(model_of, torch.float32 if is_narrow else torch.float64)
    layout = layout_of(kind, schedule)
    plan = build_plan(model, layout, filler=scattered(1) if kind == "ahead" else None)
    precision = Precision(autocast=torch.bfloat16 if is_narrow else None)
    transports, devices, everyone = {}, {}, tuple(range(plan.mesh.num_ranks))

    def main(rank, threads):
        streams = Streams()
        device = devices[get_ident()] = AsynchronousDevice(random_lengths(rank))
        transport = StreamTransport(threads, rank, streams)
        worker = build_worker(copy.deepcopy(graph), model, plan, rank, transport, device=CPU, precision=precision)
        parameters = list(worker.parameters.values())
        optimizer = build_optimizer("AdamW", worker.parameters, 1e-3, {"foreach": True})
        average, backup = Ema(worker.parameters, dict.fromkeys(worker.parameters, 0.9)), Backup(parameters, optimizer)
        own = rows_of(worker, inputs) if worker.encoded is not None else {}
        pending, recordings = None, []
        transports[get_ident()] = transport
        transport.held = worker.train._held
        with streams:
            if worker.prologue is not None:
                worker.feed(worker.prologue, loaded(own))
                worker.prologue.run()
            for _ in range(num_steps):
                worker.reset_gradients()
                worker.feed(worker.train, loaded(own))
                num_waits = len(device.waits)
                outputs = worker.train.run()
                assert len(device.waits) == num_waits, "the host has waited for the device"
                recordings.append(worker.train.recording)
                if len(recordings) > 1:  # while the device is in the next iteration
                    check_times(recordings[-2])
                if pending is not None:
                    printed(pending.wait())
                    factor = pending.total[0] + 1
                    for parameter in parameters:
                        parameter.grad.mul_(factor)
                losses = sum((output.value.double().sum() for output in outputs), torch.zeros((), dtype=torch.float64))
                pending = HostSum(losses.reshape(1), [1.0])
                backup.keep()
                if optimizer is not None:
                    optimizer.step()
                average.update(0)
            printed(pending.wait())
            if phases:
                rows = encoded_rows(worker.validate.schedule, worker.place.worker)
                first = worker.place.group * BATCH // plan.mesh.data_parallel
                if rows is not None:
                    held_out = {k: v[first + rows.start : first + rows.stop] for k, v in inputs.items()}
                    worker.feed(worker.validate, loaded(held_out))
                worker.validate.run()
                num_rows = worker.sample().schedule.placement.pipelines[0].num_samples
                predictor = PipelinePredictor(
                    worker, transport, model.backbones[0], conditions={}, num_rows=num_rows, device=CPU
                )
                latents = torch.zeros(num_rows, *model.tensor("noisy").shape) if predictor.holds_latents else None
                for time in (5, 3):
                    predicted = predictor(latents, torch.tensor(time))
                    latents = None if latents is None else latents - predicted.to(latents.dtype)
        return streams

    def sum_over_all(total, *, async_op):
        return transports[get_ident()].all_reduce(total, everyone)

    with (
        devices_with_streams(),
        mock.patch.object(executor, "recorder_for", side_effect=lambda _: AsynchronousRecorder(devices[get_ident()])),
        mock.patch.object(host_sum, "_runs_ahead", return_value=True),
        mock.patch.object(host_sum, "_host_vector", lambda length, _: page_locked(torch.empty(length).double())),
        mock.patch.object(host_sum.dist, "all_reduce", sum_over_all),
    ):
        ranks = run_threads(plan.mesh.num_ranks, main)
    return Seen(
        races=[race for streams in ranks for race in streams.races],
        kernels=sum(streams.num_kernels for streams in ranks),
        streams={str(stream) for streams in ranks for stream in streams.transfers},
    )


@pytest.mark.parametrize("is_waited_for", [False, True])
def test_freed_memory_may_be_used_again_behind_what_the_host_has_waited_for(is_waited_for):
    with devices_with_streams(), Streams() as streams:
        value, copies, event = torch.ones(4), Stream("copies"), Event()
        copies.wait_stream(BACKEND.current_stream())
        with BACKEND.stream(copies):
            value.clone()
            event.record(copies)
        if is_waited_for:
            event.synchronize()
        del value
        torch.ones(4)
    assert streams.races == (
        []
        if is_waited_for
        else ["memory is used again on compute while it may still be read by aten.clone.default on copies"]
    )


@pytest.mark.parametrize(("kind", "schedule"), CASES)
def test_no_kernel_races_with_another(kind, schedule):
    seen = watch(tiny_dit, kind, schedule)
    assert seen.races == []
    assert seen.kernels > 1000


@pytest.mark.parametrize("kind", quick_and_slow(KINDS, quick=["replicas"]))
def test_skips_narrow_copies_validation_and_sampling_race_with_nothing(kind):
    seen = watch(tiny_stable_diffusion, kind, phases=True, is_narrow=True)
    assert seen.races == []
    assert {"up", "down"} <= seen.streams


def do_nothing(*_, **__):
    """In the place of what orders streams."""


def unordered(wait):
    """The data arrive, but the stream does not wait for them."""

    def waited(self, *arguments):
        with without_order():
            return wait(self, *arguments)

    return waited


def read_at_once(self):
    """Numbers in the host's memory, which nobody has waited for; the stream that computes waits for their sum."""
    self._wait_for_works()
    return self._host


@contextmanager
def filled_again(self, inputs, *, brought=Upload.brought):
    """The host's memory of a batch is used for another one as soon as the copies are on their way."""
    with brought(self, inputs) as copies:
        yield copies
    for value in inputs.values():
        value.zero_()


def clear_at_once(self, works, release):
    """A reduction whose gradients are dropped as soon as it has been started."""
    release()


def unawaited_end(self):
    """The end of an iteration that waits for nothing."""
    for works in self._works:
        works.clear()
    for held in self._held:
        held.clear()


def send_unheld(self, tensor, destination, *, send=StreamTransport.send):
    """A tensor that may go as soon as it is on its way."""
    work = send(self, tensor, destination)
    for held in self.held:
        held.clear()
    return work


def ignoring(waiter):
    """Events for which this one does not wait: the copies of weights, or the compute."""

    def wait(self, stream):
        if (stream.name == "compute") != (waiter == "compute"):
            stream.knows(self.clock)

    return wait


def averaged_beside(self, step, *, update=Ema.update):
    """The moving average on a stream of its own, for which the one that computes waits, but not the other way round."""
    stream = Stream("average")
    with BACKEND.stream(stream):
        update(self, step)
    BACKEND.current_stream().wait_stream(stream)


def one_for_all(make):
    """One value for all calls with the same first argument."""
    made = {}
    return lambda first, *others, **more: made.setdefault(id(first), (first, make(first, *others, **more)))[1]


FAULTS = {
    "arrivals are not waited for": ("plain", Work, "wait", unordered(Work.wait), "receive from"),
    "sent tensors are not held": ("plain", StreamTransport, "send", send_unheld, "may still be read by send"),
    "the end of the iteration waits for nothing": ("replicas", Executor, "_finish", unawaited_end, "sum on"),
    "batches are not waited for": (
        "plain",
        Upload,
        "_copied",
        unordered(Upload._copied),
        "copy_.default on a stream",
    ),
    "copies of batches do not wait for compute": (
        "plain",
        Event,
        "wait",
        ignoring("a stream"),
        "memory is used again on a stream while it may still be read",
    ),
    "numbers are read before they are there": (
        "plain",
        HostSum,
        "wait",
        read_at_once,
        "read by aten._local_scalar_dense.default on host",
    ),
    "a batch's memory is filled again at once": ("plain", Upload, "brought", filled_again, "zero_.default on host"),
    "averages do not wait for the optimizer": (
        "plain",
        Ema,
        "update",
        averaged_beside,
        "_foreach_lerp_.Scalar on average",
    ),
    "rows are another batch's too early": (
        "ahead",
        executor,
        "RowStore",
        one_for_all(RowStore),
        "written by receive from",
    ),
    "sums are not waited for": ("data-parallel", BlockGradients, "finish", do_nothing, "sum on"),
    "gathers are not waited for": ("sharded", ShardedBlock, "present", unordered(ShardedBlock.present), "broadcast"),
    "gathers do not wait for compute": ("sharded", Stream, "wait_stream", do_nothing, "may still be"),
    "reductions are released at once": ("sharded", Reductions, "add", clear_at_once, "may still be read by sum"),
    "copies of weights do not wait for compute": (
        "offloaded",
        Event,
        "wait",
        ignoring("a stream"),
        "copy_.default on a stream",
    ),
    "compute does not wait for copies of weights": (
        "offloaded",
        Event,
        "wait",
        ignoring("compute"),
        "copy_.default on a stream",
    ),
}
"""What is missing -> kind, what is replaced by what, and words of a report."""


QUICK_FAULTS = [
    "arrivals are not waited for",
    "batches are not waited for",
    "copies of batches do not wait for compute",
    "numbers are read before they are there",
]


@pytest.mark.parametrize("name", quick_and_slow(FAULTS, quick=QUICK_FAULTS))
def test_a_missing_wait_is_reported(name):
    kind, owner, attribute, faulty, words = FAULTS[name]
    in_order = Event.wait
    with mock.patch.object(owner, attribute, faulty):
        races = watch(tiny_dit, kind).races
    assert Event.wait is in_order, "the fault outlives its test"
    assert [race for race in races if words in race], races[:3]


@pytest.mark.slow
def test_a_buffer_that_is_given_out_while_it_is_in_use_stops_the_backward(monkeypatch):
    """Autograd counts the versions of what it keeps; so no checker of streams is needed for this one."""
    planted_pools(monkeypatch, num_overlooked=10**6)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        watch(tiny_dit, "plain", "gpipe")


def send_kept(self, tensor, destination, *, send=StreamTransport.send):
    """As the works of torch 2.7 and later: nobody else holds the tensor, but the work does until the stream waits."""
    work = send_unheld(self, tensor, destination, send=send)
    return _Kept(work.streams, work.event, work.inner, tensor)


@dataclass(slots=True)
class _Kept(Work):
    tensor: torch.Tensor | None

    def wait(self):
        Work.wait(self)
        self.tensor = None


@pytest.mark.slow
def test_a_sent_tensor_that_its_work_alone_holds_is_safe():
    with mock.patch.object(StreamTransport, "send", send_kept):
        assert watch(tiny_dit, "plain").races == []
