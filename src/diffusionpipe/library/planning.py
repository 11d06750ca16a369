"""`dp.plan`: the fastest layout that fits in memory, or the layout of given orders and replicas."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import lcm
from pathlib import Path

from diffusionpipe.costs import Cluster, Profile
from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.costs.files import check_device, read_profile
from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Phase, Plan, Schedule, Sharded
from diffusionpipe.library.notebook import TextTable, shown_plan, table
from diffusionpipe.library.schedules import check_sizes
from diffusionpipe.library.schedules import schedule as schedule_of
from diffusionpipe.library.timelines import Timeline
from diffusionpipe.planner.assembly.build import build_plan
from diffusionpipe.planner.assembly.layout import Layout
from diffusionpipe.planner.choosing.asking import gib_of
from diffusionpipe.planner.choosing.choice import choose
from diffusionpipe.planner.choosing.rows import Row, unit_of
from diffusionpipe.planner.from_profile import cut_and_filled
from diffusionpipe.planner.pricing.arrangement import Arrangement
from diffusionpipe.planner.pricing.given import Given
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.branch_order import in_branch_order
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.naming import name_of_plan, sizes_of_plan
from diffusionpipe.planner.search.proposal import Proposal, pricing_of, propose
from diffusionpipe.schedules import REGISTRY, generator_of
from diffusionpipe.schedules.building.branches import GRAPHPIPE
from diffusionpipe.schedules.files.order_file import is_order_file, untrainable
from diffusionpipe.schedules.traits import is_chain
from diffusionpipe.units import Seconds
from diffusionpipe.workflows.planning.stated_setting import stated_setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The plan that `dp.plan` found, with its predicted step, timeline, and the layouts that were compared."""

    plan: Plan
    """The plan, for `dp.run`."""
    step: Seconds
    """Predicted time of one iteration and the update after it."""
    why: str
    """The reason for this plan, in words."""
    timeline: Timeline = field(repr=False)
    """The predicted timeline of one iteration."""
    rows: tuple[Row, ...] = field(repr=False)
    """The candidates that were looked at, fastest first; those that do not fit in memory last."""

    def _repr_html_(self) -> str:
        return shown_plan(self.plan, self.timeline.spans, self.rows, self.why)

    def table(self) -> TextTable:
        """A table of the compared layouts, fastest first: step in ms, idle share, memory of the fullest device."""
        cells = [("layout", "step ms", "idle", "peak")]
        for row in self.rows:
            _, unit = unit_of(row.memory)
            peak = f"{row.memory / unit:.2f} {'GiB' if unit == 2**30 else 'MiB'}{'' if row.fits else ', too much'}"
            cells.append((f"{row.name}, {row.sizes}", f"{row.step * 1e3:.3f}", f"{row.bubble:.1%}", peak))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        text = "\n".join(
            "  ".join([name.ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(rest, widths[1:], strict=True))])
            for name, *rest in cells
        )
        return table(text, cells)


def plan(
    profile: Profile | str | os.PathLike[str],
    *,
    cluster: str | os.PathLike[str] | Cluster,
    batch: int,
    optimizer: str = "AdamW",
    schedule: str | Schedule | None = None,
    stages: int | None = None,
    microbatches: int | None = None,
    replicas: Sequence[int] | None = None,
    data_parallel: int | None = None,
    sharded: bool | str | None = None,
    fill: bool = False,
) -> Choice:
    """The fastest plan for all devices of a cluster, with the sizes that are given and the best ones for the others.

    Without `replicas`, and with the name of a family as `schedule` or none, the planner searches all sizes that are
    not given. Orders of your own, and replicas, fix the layout; only the micro-batches and the cuts between layers are
    still looked for. Orders of your own are cut by work.

    Args:
        profile: from `dp.profile`, or the path of a file that `diffusionpipe profile` wrote.
        cluster: the name of a shipped cluster, with ":N" for N nodes, or the path of a cluster file.
        batch: samples of one step, over all devices.
        optimizer: its name in torch.optim; its state takes memory.
        schedule: a family's name, "graphpipe" for stages on branches that run at the same time, a file of orders, or
            the result of `dp.schedule`; None: the planner chooses among all.
        stages: the number of stages into which the model is cut.
        microbatches: the number of micro-batches of one iteration of one pipeline.
        replicas: the number of devices of each stage, which share each micro-batch's samples.
        data_parallel: the number of copies of the whole pipeline.
        sharded: whether these copies hold parameters, gradients and optimizer state in parts; "optimizer": the
            state alone.
        fill: whether frozen layers of the next batch may run in the bubbles of this one, as the trainer runs them;
            `dp.run` sees one batch at a time and would compute them twice.

    Raises:
        ConfigError: sizes that do not fit each other, the cluster or the model; nothing fits in memory.
    """
    if not isinstance(profile, Profile | str | os.PathLike):
        raise ConfigError(
            f"dp.plan takes a profile or the path of one, not a {type(profile).__name__}; make one with dp.profile"
        )
    machines = cluster if isinstance(cluster, Cluster) else load_cluster(os.fspath(cluster))
    known = profile if isinstance(profile, Profile) else read_profile(Path(profile))
    if batch is None:
        raise ConfigError("batch=None: give the number of samples of one step, over all devices")
    check_sizes(batch=batch, stages=stages, microbatches=microbatches, data_parallel=data_parallel)
    if replicas is not None and (isinstance(replicas, str) or not isinstance(replicas, Sequence)):
        raise ConfigError(f"replicas={replicas!r}: give the number of devices of each stage, e.g. (1, 2)")
    check_sizes(**{f"replicas[{stage}]": count for stage, count in enumerate(replicas or ()) if count != 0})
    if not isinstance(fill, bool):
        raise ConfigError(f"fill={fill!r}: give True or False")
    parts = _parts_of(sharded)
    check_device(known, machines, source="the profile" if isinstance(profile, Profile) else str(profile))
    setting = stated_setting(known, machines, batch, checkpoint=(), has_ema=False, optimizer=optimizer)
    if isinstance(schedule, str) and is_order_file(schedule):
        schedule = schedule_of(schedule, ranks=stages, microbatches=microbatches)
    is_offered = isinstance(schedule, str) and schedule not in {*REGISTRY, GRAPHPIPE} and generator_of(schedule)
    if isinstance(schedule, str) and is_offered and stages and microbatches:
        schedule = schedule_of(schedule, ranks=stages, microbatches=microbatches)
    if isinstance(schedule, Schedule) or replicas is not None:
        layout = _layout(
            setting, schedule, stages, microbatches, replicas, data_parallel, sharded=parts or Sharded.NONE
        )
        return _given(setting, layout, microbatches, fill=fill)
    if schedule is not None:
        # Without stages every device of a copy is a stage.
        _check_layers(known, schedule, stages or machines.num_ranks // (data_parallel or 1), microbatches)
    given = Given(
        stages=stages, microbatches=microbatches, schedule=schedule, data_parallel=data_parallel, sharded=parts
    )
    return _searched(replace(setting, given=given), fill=fill)


def _parts_of(sharded: bool | str | None) -> Sharded | None:
    """The argument `sharded` of `plan` as a `Sharded`; None, which leaves it to the planner, stays None.

    Raises:
        ConfigError: it is another text than "none", "optimizer" or "all".
    """
    if isinstance(sharded, str) and sharded not in set(Sharded):
        raise ConfigError(f'sharded={sharded!r}; give True, False, "optimizer", or None for the planner to choose')
    if sharded is None or isinstance(sharded, str):
        return None if sharded is None else Sharded(sharded)
    return Sharded.ALL if sharded else Sharded.NONE


def _check_layers(profile: Profile, name: str, stages: int, microbatches: int | None) -> None:
    """Check that the schedule family `name` does not cut the model into more stages than it has trained layers.

    Raises:
        ConfigError: it does.
    """
    try:
        made = generator_of(name)(stages, microbatches or 2 * stages)
    except ConfigError:
        return  # the planner says why it cannot do these sizes
    blocks, layers = len({stage.weights for stage in made.placement.stages}), len(profile.graph.backbone_layers)
    if blocks > layers:
        raise ConfigError(
            f"the schedule {name!r} cuts the model into {blocks} stages on {stages} ranks, but the model has "
            f"{layers} trained layers; use fewer ranks for a pipeline, or another schedule"
        )


def _searched(setting: Setting, *, fill: bool) -> Choice:
    found = choose(setting, fill=None if fill else False)
    shown = found.comparison()
    made = found.plan()
    rows = (*shown.simulated, *shown.estimated, *shown.others)
    return Choice(
        plan=made,
        step=found.step,
        why="\n".join([shown.verdict, *(remark.text for remark in shown.remarks)]),
        timeline=_timeline(found.proposal),
        rows=tuple(sorted(rows, key=lambda row: (not row.fits, row.step))),
    )


def _layout(
    setting: Setting,
    schedule: str | Schedule | None,
    stages: int | None,
    microbatches: int | None,
    replicas: Sequence[int] | None,
    data_parallel: int | None,
    *,
    sharded: Sharded,
) -> Layout:
    """The layout of these sizes on all devices of the cluster; with one micro-batch if their number is not given.

    Raises:
        ConfigError: the sizes do not fit each other, the schedule or the cluster.
    """
    orders = schedule if isinstance(schedule, Schedule) else None
    problems = []
    if orders is not None:
        own = (("stages", stages, orders.num_workers), ("microbatches", microbatches, orders.num_microbatches()))
        problems += [
            f"{name}={size}, but the schedule {orders.name!r} is for {has}; leave it out, or make another schedule"
            for name, size, has in own
            if size not in (None, has)
        ]
        problems += [f"the schedule {orders.name!r}: {problem}" for problem in untrainable(orders)]
        stages, microbatches = orders.num_workers, orders.num_microbatches()
    stages = stages or (len(replicas) if replicas is not None else 1)
    counts = tuple(replicas) if replicas is not None else (1,) * stages
    if len(counts) != stages or min(counts, default=0) < 1:
        problems.append(f"replicas={counts} for {stages} stages; give a number of at least 1 for each stage")
    if problems:
        raise ConfigError("\n".join(problems))
    workers, ranks = sum(counts), setting.cluster.num_ranks
    copies = data_parallel or max(1, ranks // workers)
    if copies * workers != ranks:
        raise ConfigError(
            f"the layout needs {workers} ranks for a pipeline, but the cluster {setting.cluster.name} has {ranks}: "
            "give a cluster of a multiple of this, other replicas, or data_parallel"
        )
    return Layout(
        batch=setting.workload.batch,
        stages=stages,
        microbatches=microbatches or 1,
        schedule=orders.name if orders is not None else str(schedule or "1f1b"),
        orders=orders,
        replicas=counts if max(counts) > 1 else (),
        data_parallel=copies,
        sharded=sharded,
        buckets=0 if sharded is Sharded.ALL else 1,
    )


def _given(setting: Setting, layout: Layout, microbatches: int | None, *, fill: bool) -> Choice:
    """The plan of a given layout, with the best number of micro-batches if neither argument nor orders fix it.

    Raises:
        ConfigError: no number of micro-batches can be planned, or nothing fits in memory.
    """
    if layout.schedule == GRAPHPIPE:
        setting = in_branch_order(setting)
    sizes = [layout.microbatches]
    if microbatches is None and layout.orders is None:
        share = layout.batch // layout.data_parallel
        unit = lcm(*layout.replicas)
        # Micro-batches are equal, and the replicas of every stage share each of them equally.
        sizes = [n for n in range(1, share + 1) if share % n == 0 and share // n % unit == 0] or [1]
    made = []
    problems: dict[str, None] = {}
    judge = Judge(setting=setting)
    for count in sizes:
        try:
            made.append(_best_cut(judge, replace(layout, microbatches=count), fill=fill))
        except ConfigError as error:
            problems[str(error)] = None
    if not made:
        raise ConfigError(next(iter(problems)))
    # Layouts that fit come first, even slow ones.
    made.sort(key=lambda one: (one[2].overflow > 0, one[2].step))
    best, proposal, row = made[0]
    if row.overflow > 0:
        raise ConfigError(
            f"the layout needs {gib_of(row.overflow)} GiB more than a device has; use a smaller batch, more stages, "
            "or larger devices"
        )
    looked = f", the fastest of {len(made)} numbers of micro-batches" if len(made) > 1 else ""
    return Choice(
        plan=best,
        step=proposal.step,
        why=f"The layout is given: {row.name}, {row.sizes}{looked}. Devices idle {row.bubble:.1%} of the time.",
        timeline=_timeline(proposal),
        rows=tuple(one for _, _, one in made),
    )


def _best_cut(judge: Judge, layout: Layout, *, fill: bool) -> tuple[Plan, Proposal, Row]:
    """(plan, full simulation, row of the table) of the layout with the fastest cut, by work or for its replicas.

    The second kind is looked for where each worker has one stage. Cuts that do not fit in memory come last.

    Raises:
        ConfigError: the layout cannot be planned, however it is cut.
    """
    setting, counts = judge.setting, layout.replicas or (1,) * layout.stages
    layout, filler = cut_and_filled(setting, layout)
    ways = {layout.splits: layout}
    if layout.orders is None and layout.schedule != GRAPHPIPE and is_chain(layout.schedule) and not judge.has_ties:
        arrangement = Arrangement(data_parallel=layout.data_parallel, units=sum(counts))
        names = setting.graph.backbone_layers
        for cut in judge.questions.cuts(arrangement, layout.microbatches, counts):
            splits = tuple(names[start] for start in cut.starts[1:])
            ways.setdefault(splits, replace(layout, splits=splits))
    # Where frozen layers lie does not depend on the cuts, so one filler serves all.
    filler = filler if fill else None
    simulated = [(way, propose(setting, way, filler)) for way in ways.values()]
    layout, proposal = min(simulated, key=lambda pair: (max(pair[1].overflow, 0), pair[1].step))
    made = build_plan(setting.graph, layout, pricing=pricing_of(setting), filler=filler)
    use = max(proposal.memory, key=lambda memory: memory.total)
    row = Row(
        name=name_of_plan(made),
        sizes=sizes_of_plan(made),
        num_stages=layout.stages,
        step=proposal.step,
        update=proposal.update,
        samples_per_second=layout.batch / proposal.step,
        bubble=proposal.timeline.bubble,
        exposed=proposal.exposed,
        memory=use.total,
        use=use,
        overflow=proposal.overflow,
    )
    return made, proposal, row


def _timeline(proposal: Proposal) -> Timeline:
    """The predicted timeline of a proposal's training step, with the update if the profile has its time."""
    spans, start = proposal.timeline, proposal.iteration
    if proposal.update:
        workers = range(spans.num_workers)
        phases = (Phase(worker=w, name="update", start=start, end=start + proposal.update) for w in workers)
        spans = replace(spans, update=tuple(phases))
    return Timeline(proposal.train, spans)
