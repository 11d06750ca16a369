"""The cluster of a job for planning: named by the recipe, kept from an earlier start of the run, or measured now."""

import logging
from dataclasses import replace
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from diffusionpipe.costs import AllReduce, Cluster, Device, Link
from diffusionpipe.costs.cluster import of_ranks
from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.costs.files import has_device, write_cluster
from diffusionpipe.errors import ConfigError
from diffusionpipe.profiler import measure_links
from diffusionpipe.profiler.links import usable_memory
from diffusionpipe.profiler.measured import device_name
from diffusionpipe.runtime.comm.exchange import form_of, gather_numbers, optional
from diffusionpipe.runtime.job.agreement import from_first
from diffusionpipe.runtime.job.process_group import Job
from diffusionpipe.trainer.recipe import Recipe
from diffusionpipe.trainer.reporting.screen import Screen
from diffusionpipe.trainer.setup.job_profile import PROFILE
from diffusionpipe.units import Bytes

logger = logging.getLogger(__name__)

CLUSTER = "cluster.json"
HOST_COPY: Bytes = 2**26
"""The number of bytes that a rank copies from host memory at a time to measure the bandwidth."""


def agree_on_cluster(recipe: Recipe, job: Job, screen: Screen) -> Cluster | None:
    """The cluster of the devices and links of exactly this job's ranks; every rank calls it and all get the same.

    The recipe names it, or it is read from the run's folder, or measured. It is then kept in this folder, so that a
    resumed run on the same number of ranks has the same plan. None: the run began with the links of its profile alone,
    and continues with them.

    Raises:
        ConfigError: on every rank, if the recipe names a cluster that cannot be this one.
    """
    if from_first(lambda: _has_only_a_profile(recipe), form_of(bool)):
        return None
    known = from_first(lambda: _known(recipe, job), optional(form_of(Cluster)))
    if known is None:
        started = perf_counter()
        with screen.work("measuring links", is_timed=True) as work:
            is_alone = job.membership.world_size == 1  # there are no links to measure
            links = _alone(job) if is_alone else measure_links(job, name="this job", progress=work.show).cluster
            known = with_host_bandwidth(links, job)
        logger.info(
            "measured links cluster=%s measure_links_s=%.1f", recipe.run.folder / CLUSTER, perf_counter() - started
        )
    if job.membership.rank == 0:
        write_cluster(known, recipe.run.folder / CLUSTER)
    return known


def with_host_bandwidth(cluster: Cluster, job: Job, *, repeats: int = 7) -> Cluster:
    """The cluster with the measured bandwidth at which its devices copy from host memory, all at the same time.

    Every rank calls it and all get the same. The slowest rank's time counts, as a median over `repeats` copies. The
    memory is page-locked, and on the CPU it is copied within host memory.
    """
    host = torch.zeros(HOST_COPY, dtype=torch.uint8, pin_memory=job.device.type == "cuda")
    there = torch.empty_like(host, device=job.device)
    times = []
    for _ in range(1 + repeats):  # the first one warms up
        dist.barrier()
        started = perf_counter()
        there.copy_(host)  # ends when the copy has ended
        times.append(perf_counter() - started)
    ranks = [rank.tolist() for rank in gather_numbers(torch.tensor(times[1:], dtype=torch.float64))]
    # All copy at once, and the slowest counts.
    bandwidth = HOST_COPY / median(max(round_) for round_ in zip(*ranks, strict=True))
    return replace(cluster, devices=tuple(replace(d, host_bandwidth=bandwidth) for d in cluster.devices))


def _has_only_a_profile(recipe: Recipe) -> bool:
    """Whether a run with stated sizes has begun with a profile and no cluster in its folder, as in former versions."""
    folder, pipeline = recipe.run.folder, recipe.pipeline
    is_named = pipeline.is_searched or pipeline.cluster is not None
    return not is_named and (folder / PROFILE).exists() and not (folder / CLUSTER).exists()


def _known(recipe: Recipe, job: Job) -> Cluster | None:
    """The job's cluster by the recipe, or from the run's folder; None if it must be measured.

    Raises:
        ConfigError: the recipe names a cluster that cannot be this job's.
    """
    name, kept, num_ranks = recipe.pipeline.cluster, recipe.run.folder / CLUSTER, job.membership.world_size
    device = device_name(job.device)
    if name is None:
        if not kept.exists():
            return None
        cluster = load_cluster(str(kept))
        return cluster if cluster.num_ranks == num_ranks and has_device(cluster, device, job.device.type) else None
    cluster, used = load_cluster(name), sorted(recipe.pipeline.use) or range(num_ranks)
    if cluster.num_ranks <= used[-1]:
        own = f"uses rank {used[-1]}" if recipe.pipeline.use else f"has {num_ranks} ranks"
        raise ConfigError(
            f"pipeline.cluster: {name} has {cluster.num_ranks} devices, but this run {own}; start "
            f"{cluster.num_ranks} or fewer, or name a larger cluster, e.g. {name}:2 for two such nodes"
        )
    if not has_device(cluster, device, job.device.type):
        raise ConfigError(
            f"pipeline.cluster: {name} has {', '.join(sorted({d.name for d in cluster.devices}))}, but this run is "
            f'on {device}; measure its cluster with "diffusionpipe cluster --ranks N --out FILE", or remove the key'
        )
    return of_ranks(cluster, used)


def _alone(job: Job) -> Cluster:
    """A cluster of the only rank's device, with invented links, which are never used."""
    link, reduce = Link(1e-4, 1e9), AllReduce(latency=1e-4, bandwidth=1e9)
    return Cluster(
        name="this job",
        devices=(Device(name=device_name(job.device), memory=usable_memory(job)),),
        nodes=(0,),
        intra=link,
        inter=link,
        intra_reduce=reduce,
        inter_reduce=reduce,
    )
