"""Ranks of a command that examines or measures machines: processes of one job, whose logs go when it ends."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffusionpipe.costs import Cluster
    from diffusionpipe.profiler import Trial
    from diffusionpipe.runtime.job.process_group import Job


def is_rank() -> bool:
    """Whether torchrun, or our launcher, has started this process as a rank of a job."""
    from diffusionpipe.trainer.launching.launch import is_under_torchrun

    return is_under_torchrun(os.environ)


def run_on_ranks(words: Sequence[str], ranks: int, port: int | None) -> int:
    """Runs `diffusionpipe WORDS` as a job of ranks on this machine, and returns its exit status.

    `port`: the TCP port on which they connect; None for any free one.

    Raises:
        PeerError: a rank has failed.
    """
    from diffusionpipe.trainer.launching.launch import launch

    with TemporaryDirectory() as logs:
        command = [sys.executable, "-m", "diffusionpipe", *words]
        return launch(command, ranks=ranks, log_folder=Path(logs), environ=os.environ, port=port)


def measured_cluster(job: "Job", name: str) -> "tuple[tuple[Trial, ...], Cluster]":
    """The trials of the links between a job's ranks, and the cluster that they give, with bandwidths of host memory.

    Every rank of the job calls it.
    """
    from diffusionpipe.profiler import measure_links
    from diffusionpipe.trainer.setup.job_cluster import with_host_bandwidth

    links = measure_links(job, name=name)
    return links.trials, with_host_bandwidth(links.cluster, job)
