"""`diffusionpipe schedule instance`: a profiled model on a cluster as a question for `schedule search`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def instance(
    profile: Annotated[Path, typer.Option(metavar="FILE", help="The file that `diffusionpipe profile` wrote.")],
    cluster: Annotated[str, typer.Option(metavar="NAME", help="A cluster file or a known cluster, e.g. l40sx8.")],
    batch: Annotated[int, typer.Option(min=1, max=1_000_000, help="Samples of one iteration of the pipeline.")],
    microbatches: Annotated[int, typer.Option(metavar="M", min=1, help="Micro-batches of one iteration.")],
    out: Annotated[Path, typer.Option(help="Write the instance file.")],
    placement: Annotated[str, typer.Option(help="linear, v or loop; any tries all three.")] = "any",
    seconds: Annotated[float, typer.Option(metavar="t", min=0, max=1e9, help="Seconds that the search may take.")] = 10,
) -> None:
    """Write an instance for `schedule search`: a profiled model, split by time over all devices of a cluster.

    Times are in units of 0.1 microseconds, memory is in bytes. The optimizer is AdamW.
    """
    from diffusionpipe.cli.verbs.outputs import check_outputs
    from diffusionpipe.costs.clusters import load_cluster
    from diffusionpipe.costs.files import check_device, check_kept, read_profile
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.holding import Workload, plain_states
    from diffusionpipe.holding.workload import state_of_optimizer
    from diffusionpipe.ordering.instance import Placing
    from diffusionpipe.ordering.instance_file import write_instance
    from diffusionpipe.planner.pricing.setting import Setting
    from diffusionpipe.planner.search.placed import instance_of

    if placement not in list(Placing):
        raise ConfigError(f"--placement is {placement!r}; use {', '.join(Placing)}")
    check_outputs(out)
    loaded, machines = read_profile(profile), load_cluster(cluster)
    check_device(loaded, machines, source=str(profile))
    check_kept(loaded, source=str(profile))
    width = 8 if loaded.precision == "float64" else 4
    workload = Workload(
        batch=batch,
        states=plain_states(parameter=width, gradient=width, optimizer=width * state_of_optimizer("AdamW")),
    )
    setting = Setting(profile=loaded, cluster=machines, workload=workload)
    question = instance_of(setting, microbatches=microbatches, placing=Placing(placement), seconds=seconds)
    write_instance(question, out)
    typer.echo(f"wrote {out}; next: diffusionpipe schedule search {out}", err=True)
