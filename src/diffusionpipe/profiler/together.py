"""One profile, measured by all ranks of a job at the same time, as they will train.

Ranks that compute at once share a machine's caches, its memory and its clock rate. So a rank that measures while the
others wait finds layers faster than they will be.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean

import torch
import torch.distributed as dist

from diffusionpipe.costs import Cluster, HostTimes, LayerProfile, ModelGraph, Profile
from diffusionpipe.models.graphs.graph import LayerGraph
from diffusionpipe.profiler.links import measure_links
from diffusionpipe.profiler.measured import Report, profile_model, silent
from diffusionpipe.profiler.passes import Agree
from diffusionpipe.profiler.update import MakeUpdate, time_update
from diffusionpipe.runtime.comm.exchange import broadcast, form_of, gather
from diffusionpipe.runtime.job.process_group import Job
from diffusionpipe.units import Seconds


def profile_job(
    job: Job,
    graph: LayerGraph,
    model: ModelGraph,
    *,
    batch_sizes: Sequence[int],
    precision: str = "float32",
    repeats: int = 3,
    time_budget: Seconds = 120.0,
    make_update: MakeUpdate | None = None,
    links: Cluster | None = None,
    progress: Report = silent,
) -> Profile:
    """Measure a job's layers, links and update on all its ranks at once; returns the same profile on all.

    Every rank calls it. `make_update`: makes a function that updates the parameters of a rank as a step does; None: the
    update is not measured. `links`: the measured cluster of this job; None: its links are measured. `progress`: called
    after each layer. The other arguments are as in `profile_model`.

    Raises:
        ConfigError: on every rank, there is no batch size, or the smallest does not fit into a device's memory.
    """
    profile = profile_together(
        lambda agree: profile_model(
            graph,
            model,
            batch_sizes=batch_sizes,
            device=job.device,
            precision=precision,
            repeats=repeats,
            time_budget=time_budget,
            progress=progress,
            agree=agree,
        )
    )
    if make_update is not None:
        profile = replace(profile, update=time_update(model, make_update, job.device, agree=_largest))
    if job.membership.world_size > 1:
        links = links or measure_links(job, name="this job").cluster
        profile = replace(profile, link=links.intra, reduce=links.intra_reduce)
    return profile


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """The fields of a rank's profile that differ between ranks."""

    batch_sizes: tuple[int, ...]
    layers: tuple[LayerProfile, ...]
    waking: tuple[tuple[Seconds, Seconds], ...]


def profile_together(measure: Callable[[Agree], Profile]) -> Profile:
    """The mean of the profiles that the ranks measure at the same time, the same on all; every rank calls it.

    `measure` calls `profile_model` with the same arguments on all ranks, and with the `agree` that it gets, which keeps
    the ranks in step.
    """
    mine = measure(_largest)
    measured = _Measured(batch_sizes=mine.batch_sizes, layers=mine.layers, waking=mine.waking)
    everyone = gather(measured, form_of(_Measured))
    profile = broadcast(mine, form_of(Profile))  # its other parts, which are large, travel once
    return combined(
        [replace(profile, batch_sizes=one.batch_sizes, layers=one.layers, waking=one.waking) for one in everyone]
    )


def _largest(value: float) -> float:
    """The largest of the values with which all ranks call it."""
    largest = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def combined(profiles: Sequence[Profile]) -> Profile:
    """One profile with the mean times of several profiles of the same model at the same batch sizes."""
    assert len({profile.batch_sizes for profile in profiles}) == 1
    layers = [_combined_layer(same) for same in zip(*(profile.layers for profile in profiles), strict=True)]
    waking = [
        (same[0][0], mean(extra for _, extra in same)) for same in zip(*(one.waking for one in profiles), strict=False)
    ]
    return replace(profiles[0], layers=tuple(layers), waking=tuple(waking))


def _combined_layer(layers: Sequence[LayerProfile]) -> LayerProfile:
    return replace(
        layers[0],
        forward=_means([layer.forward for layer in layers]),
        input_grad=_means([layer.input_grad for layer in layers]),
        weight_grad=_means([layer.weight_grad for layer in layers]),
        forward_only=_means([layer.forward_only for layer in layers]),
        forward_spread=_means([layer.forward_spread for layer in layers]),
        backward_spread=_means([layer.backward_spread for layer in layers]),
        cast=mean(layer.cast for layer in layers),
        host=HostTimes(
            forward=mean(layer.host.forward for layer in layers),
            input_grad=mean(layer.host.input_grad for layer in layers),
            weight_grad=mean(layer.host.weight_grad for layer in layers),
        ),
    )


def _means(columns: Sequence[Sequence[Seconds]]) -> tuple[Seconds, ...]:
    return tuple(mean(same) for same in zip(*columns, strict=True))
