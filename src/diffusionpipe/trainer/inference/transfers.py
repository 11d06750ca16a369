"""The messages between workers after a step of sampling: predictions, sent to workers that hold noisy latents."""

from collections.abc import Iterable, Mapping, Sequence

from diffusionpipe.costs import Backbone
from diffusionpipe.runtime.engine.worker import Worker


def transfers(
    writers: Mapping[int, Sequence[tuple[int, int]]], holders: Iterable[int]
) -> list[tuple[int, int, int, int]]:
    """Each message after a step of sampling, as (worker that predicts, worker that holds latents, first row, end row).

    `writers`: the rows (first, end) that each worker predicts. `holders`: the workers that hold latents. The end row is
    the first one after the message's rows.

    All workers take the messages in this order, so none waits in a circle, even if a transfer blocks its host until the
    other end is there. If all sent first, three workers that predict and hold latents could wait for each other:

        worker 0   to 1, to 2      worker 1   to 2, to 0      worker 2   to 0, to 1

    >>> transfers({1: [(2, 4), (0, 2)], 0: [(4, 6)]}, holders=(0, 1))
    [(0, 1, 4, 6), (1, 0, 0, 2), (1, 0, 2, 4)]
    """
    return sorted(
        (writer, holder, *rows)
        for writer, spans in writers.items()
        for holder in holders
        if holder != writer
        for rows in spans
    )


def ends_of(worker: Worker, backbone: Backbone) -> tuple[tuple[int, ...], dict[int, list[tuple[int, int]]]]:
    """The workers that hold noisy latents, ascending, and the rows (first, end) that each worker predicts, by worker.

    The first worker shows the pictures, so it has latents even if it reads none: its stage may hold the layers of the
    time alone. The others read latents, or the outputs of frozen layers that read them.
    """
    plan, model = worker.plan, worker.model
    placement = worker.sample(backbone.name).schedule.placement
    noisy = {backbone.noisy}
    for layer in model.layers:
        if layer.name in model.frozen_layers and not noisy.isdisjoint(layer.reads):
            noisy.update(layer.writes)
    holders = {0}
    writers: dict[int, list[tuple[int, int]]] = {}
    for index, stage in enumerate(placement.stages):
        block = plan.blocks[stage.weights]
        if not noisy.isdisjoint(model.reads_of(block)):
            holders.add(stage.worker)
        if backbone.prediction in model.writes_of(block):
            num_microbatches = len(placement.pipeline_of(index).microbatches)
            rows = [placement.rows(index, microbatch) for microbatch in range(num_microbatches)]
            writers.setdefault(stage.worker, []).extend((r.start, r.stop) for r in rows)
    return tuple(sorted(holders)), writers
