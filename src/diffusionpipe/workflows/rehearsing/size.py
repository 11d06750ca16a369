"""The time and memory that a rehearsal takes of this machine, known before it starts."""

from dataclasses import dataclass

from diffusionpipe.costs import Costs, Link, ModelGraph
from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Mesh, Schedule
from diffusionpipe.runtime.engine.routing import extents_of
from diffusionpipe.runtime.rehearsals.rehearsal import VirtualRun
from diffusionpipe.units import Bytes, Seconds
from diffusionpipe.workflows.rehearsing.rehearsal import fitting_bytes_scale, predict_run, virtual_run

GIB = 2**30
COMMAND_BYTES: Bytes = 600 * 2**20
"""Bytes of the command's process and of the process that forks the ranks together, both with torch."""
RANK_BYTES: Bytes = 80 * 2**20
"""Bytes that a rank does not share with the process from which it is forked."""
MOST = 0.5
"""The part of the free memory that tensors may take where their scale is chosen for the user."""
FASTEST = Link(2e-5, 4e9)
"""The link for which the size of tensors is chosen at first: messages between processes are hardly faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The time and memory that a rehearsal takes, with its iterations and the scale of its tensors."""

    num_ranks: int
    iterations: int
    """The number of measured iterations; another one comes before them."""
    iteration: Seconds
    """The predicted length of one iteration."""
    bytes_scale: float
    """The largest factor from the plan's bytes of tensors to the rehearsal's."""
    tensors: Bytes
    """Bytes of the tensors of all ranks at their peaks."""

    @property
    def seconds(self) -> Seconds:
        """The seconds of all iterations together, with the unmeasured one."""
        return (self.iterations + 1) * self.iteration

    @property
    def memory(self) -> Bytes:
        """The bytes of all processes together, with the tensors that they hold."""
        return COMMAND_BYTES + self.num_ranks * RANK_BYTES + self.tensors

    def __str__(self) -> str:
        """A clause with the iterations, ranks, seconds and memory of the rehearsal."""
        ranks = "1 rank" if self.num_ranks == 1 else f"{self.num_ranks} ranks"
        return (
            f"rehearsing {self.iterations + 1} iterations of {self.iteration:.3g} s on {ranks}: about "
            f"{self.seconds:.0f} s and {self.memory / GIB:.1f} GiB of memory"
        )


def size_of(
    schedule: Schedule,
    costs: Costs,
    graph: ModelGraph,
    mesh: Mesh,
    *,
    iterations: int,
    scale: float,
    bytes_scale: float | None,
    free: Bytes | None,
) -> Size:
    """The time and memory of a rehearsal. Without a `bytes_scale` tensors are as large as copying and `free` allow.

    `scale`: the factor from the plan's times to the waits. `free`: bytes of free memory; None: nothing is refused.

    Raises:
        ConfigError: the machine has too little free memory; says what fits.
    """

    def run(bytes_scale: float) -> VirtualRun:
        return virtual_run(schedule, costs, graph, mesh, scale=scale, bytes_scale=bytes_scale, link=FASTEST)

    # Next to no bytes, so that the waits alone make up the length.
    iteration = predict_run(run(1e-9)).makespan
    wanted = bytes_scale
    if wanted is None:
        wanted = fitting_bytes_scale(schedule, costs, FASTEST, iteration, data_parallel=mesh.data_parallel)
    tensors = tensor_bytes(run(wanted))
    processes = COMMAND_BYTES + mesh.num_ranks * RANK_BYTES
    if free is not None:
        _check_processes(processes, free, mesh)
        room = MOST * (free - processes)
        if tensors > room and bytes_scale is None:
            # Tensors shrink in proportion, so one correction is enough.
            wanted *= room / tensors
            tensors = tensor_bytes(run(wanted))
        if tensors > free - processes:
            raise ConfigError(
                f"--bytes-scale {wanted:.3g} makes tensors of {tensors / GIB:.1f} GiB on {mesh.num_ranks} ranks, and "
                f"{(free - processes) / GIB:.1f} GiB are free beside the processes; use --bytes-scale "
                f"{wanted * room / tensors:.1g} or less, or leave it out"
            )
    return Size(
        num_ranks=mesh.num_ranks, iterations=iterations, iteration=iteration, bytes_scale=wanted, tensors=tensors
    )


def _check_processes(processes: Bytes, free: Bytes, mesh: Mesh) -> None:
    if processes <= free:
        return
    fitting = int((free - COMMAND_BYTES) // RANK_BYTES) // mesh.pipeline * mesh.pipeline
    advice = f"use --ranks {fitting}" if fitting > 0 else "end other programs"
    raise ConfigError(
        f"{mesh.num_ranks} ranks need {processes / GIB:.1f} GiB of memory, and {free / GIB:.1f} GiB are free; {advice}"
    )


def tensor_bytes(run: VirtualRun) -> Bytes:
    """The bytes of all ranks' tensors at their peaks: activations, gradients on their way, rows of the batch."""
    schedule, timeline = run.schedule, predict_run(run)
    stores = 1 + any(pipeline.is_ahead for pipeline in schedule.placement.pipelines)
    total = 0
    for worker in range(schedule.num_workers):
        stages = zip(schedule.placement.stages, run.costs.stages, strict=True)
        gradients = 2 * max((cost.activation for stage, cost in stages if stage.worker == worker), default=0)
        rows = extents_of(schedule, worker, run.inputs)
        stored = stores * sum(len(kept) * run.tensors[name].num_bytes for name, kept in rows.items())
        total += timeline.peak_memory(worker) + gradients + stored
    return total * run.mesh.data_parallel
