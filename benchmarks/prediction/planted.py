"""Planted errors: a profile with one layer twice as slow as it is, or a link ten times as fast, and what follows.

Ranks are processes whose stages wait for the true times (virtual stages), so that what is true is known:

    planted profile ──> plan A ──> 20 iterations with the true times ──> corrected profile ──> plan B ──> both in turn
                                   100 more, which that predicts  <──────────────┘

Messages are real and cross this machine's link, which is measured first. Gradient sums are waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from diffusionpipe.costs import (
    AllReduce,
    Cluster,
    Device,
    LayerProfile,
    LayerSpec,
    Link,
    ModelGraph,
    ParameterSpec,
    Profile,
    TensorSpec,
)
from diffusionpipe.holding import Workload
from diffusionpipe.ir import Plan, Span, Timeline
from diffusionpipe.ir.recorded import Recorded
from diffusionpipe.planner import Given, Setting, choose
from diffusionpipe.planner.choosing.suggestion import suggest
from diffusionpipe.planner.correction.computing import Factors, scaled
from diffusionpipe.planner.correction.correct import correct
from diffusionpipe.planner.pricing.stage_costs import costs_of
from diffusionpipe.runtime.job.local_ranks import LocalRanks
from diffusionpipe.runtime.job.process_group import Job
from diffusionpipe.runtime.machine.heap import disable_malloc_trim
from diffusionpipe.runtime.rehearsals.rehearsal import VirtualRun
from diffusionpipe.units import Bytes, Seconds
from diffusionpipe.workflows.rehearsing.rehearsal import Rehearsed, measured_link, rehearse_runs

FORWARD: Sequence[Seconds] = (0.003, 0.001, 0.0015, 0.002, 0.002)
"""Of one sample through each layer; each gradient takes as long. Two stages are balanced behind the third layer."""
FROZEN: Seconds = 0.001
BATCH = 16
SIZES = (1, 2, 4, 8, 16)
PARAMETERS = 20_000_000
"""Of each layer."""
SMALL: Bytes = 4096
"""Of a sample between two layers, where messages are to take no time."""
TWICE = Factors(forward=2.0, input_grad=2.0, weight_grad=2.0)
CROSSING: Seconds = 0.006
"""What a sample takes on the true link, where the link is planted: more than its compute on a rank."""
UNRECORDED, RECORDED, LATER = 5, 15, 100
FIRST = slice(UNRECORDED, UNRECORDED + RECORDED)
"""The iterations that correct the profile."""
TURNS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A planted error. All times are iterations."""

    name: str
    present: str
    """The layout that the planted profile leads to,"""
    predicted: Seconds
    """what that predicts of it,"""
    corrected: Seconds
    """what the corrected profile predicts,"""
    measured: Seconds
    """and what it takes in the iterations behind those that corrected the profile."""
    suggested: str | None
    """The layout that the corrected profile leads to; None where it is hardly faster,"""
    suggested_step: Seconds
    """what is predicted of it,"""
    in_turn: tuple[Seconds, Seconds]
    """What both take, one iteration of each in turn."""

    @property
    def gain(self) -> float:
        """By how much the suggested layout is measured to be faster."""
        present, suggested = self.in_turn
        return present / suggested - 1.0


def planted_cases(ranks: LocalRanks, names: Sequence[str] = ("layer", "link")) -> list[Case]:
    """Both errors, or one, on two ranks."""
    ranks.run(keep)
    link = measured_link(ranks)
    return [_case(ranks, name, *_settings(name, link)) for name in names]


def planned_run(link: Link) -> tuple[Setting, Plan, VirtualRun]:
    """A right profile, the plan that it leads to, and its run."""
    true, _ = _settings("layer", link)
    plan = choose(true).plan()
    return true, plan, _run(true, plan)


def keep(job: Job) -> None:
    """Let a rank keep its freed memory, so that large tensors of virtual stages take little time beside their waits."""
    disable_malloc_trim()


def _settings(name: str, link: Link) -> tuple[Setting, Setting]:
    """What is true, and what the planner is told."""
    if name == "layer":
        true = _setting(_profile(SMALL), link, bus=1e9, given=Given(schedule="1f1b", data_parallel=1))
        return true, replace(true, profile=scaled(true.profile, {"layer0": TWICE}))
    true = _setting(_profile(round(link.bandwidth * CROSSING)), link, bus=2.4e9, given=Given(schedule="1f1b"))
    fast = replace(link, bandwidth=10 * link.bandwidth)
    return true, replace(true, cluster=replace(true.cluster, intra=fast, inter=fast))


def _setting(profile: Profile, link: Link, *, bus: float, given: Given) -> Setting:
    reduce = AllReduce(latency=1e-4, bandwidth=bus)
    cluster = Cluster(
        name="virtual",
        devices=(Device(name=profile.device, memory=2**40),) * 2,
        nodes=(0, 0),
        intra=link,
        inter=link,
        intra_reduce=reduce,
        inter_reduce=reduce,
    )
    return Setting(profile=profile, cluster=cluster, workload=Workload(batch=BATCH), given=given)


def _profile(num_bytes: Bytes) -> Profile:
    """A chain of layers with so many bytes of a sample between them."""
    names = ["raw", "x0", *(f"x{number + 1}" for number in range(len(FORWARD) - 1)), "loss"]
    tensors = [
        TensorSpec(name=name, shape=() if name == "loss" else (num_bytes // 4,), needs_gradient=number > 1)
        for number, name in enumerate(names)
    ]
    layers, parameters, profiles = [], [], []
    for number, seconds in enumerate((FROZEN, *FORWARD)):
        name = f"layer{number - 1}" if number else "encode"
        weight = f"{name}.weight"
        reads, writes = (names[number],), (names[number + 1],)
        layers.append(
            LayerSpec(
                name=name, component="unet" if number else "vae", reads=reads, writes=writes, parameters=(weight,)
            )
        )
        parameters.append(ParameterSpec(name=weight, shape=(PARAMETERS if number else 1,), is_trainable=number > 0))
        times = tuple(seconds * size for size in SIZES)
        none, bytes_kept = (0.0,) * len(SIZES), tuple(num_bytes * size for size in SIZES)
        profiles.append(
            LayerProfile(
                name=name,
                forward=times,
                input_grad=times if number > 1 else none,
                weight_grad=times if number else none,
                activation=bytes_kept if number else (0,) * len(SIZES),
                workspace=(0,) * len(SIZES),
                kept=bytes_kept if number else (),
            )
        )
    graph = ModelGraph(layers=tuple(layers), tensors=tuple(tensors), parameters=tuple(parameters), inputs=(names[0],))
    return Profile(
        graph=graph,
        batch_sizes=SIZES,
        layers=tuple(profiles),
        device="virtual",
        device_type="cpu",
        precision="float32",
        source="measured",
    )


def _case(ranks: LocalRanks, name: str, true: Setting, planted: Setting) -> Case:
    choice = choose(planted)
    present = choice.plan()
    alone = rehearse_runs(ranks, {"present": _run(true, present)}, ["present"] * (UNRECORDED + RECORDED + LATER))
    found = correct(planted, present, recorded_of(alone["present"], range(FIRST.start, FIRST.stop)))
    suggestion = suggest(found.setting, found.corrected.step, fill=None)
    runs = {"present": _run(true, present)}
    if suggestion is not None:
        runs["suggested"] = _run(true, suggestion.plan)
    rehearsed = rehearse_runs(ranks, runs, list(runs) * TURNS)
    in_turn = {key: median(one.seconds) for key, one in rehearsed.items()}
    return Case(
        name=name,
        present=_named(choice.sizes, present),
        predicted=found.predicted.iteration,
        corrected=found.corrected.iteration,
        measured=median(alone["present"].seconds[FIRST.stop :]),
        suggested=_named(suggestion.sizes, suggestion.plan) if suggestion is not None else None,
        suggested_step=suggestion.step if suggestion is not None else found.corrected.step,
        in_turn=(in_turn["present"], in_turn.get("suggested", in_turn["present"])),
    )


def _named(sizes: str, plan: Plan) -> str:
    """A layout with the first layers of its stages."""
    return f"{sizes}; cut before {', '.join(block[0] for block in plan.blocks[1:-1]) or 'no layer'}"


def _run(setting: Setting, plan: Plan) -> VirtualRun:
    graph = setting.graph
    return VirtualRun(
        schedule=plan.train,
        costs=costs_of(plan.train, plan.blocks, plan.mesh, setting),
        tensors={spec.name: spec for spec in graph.tensors},
        mesh=plan.mesh,
        inputs=graph.inputs,
        backbones=graph.backbones,
    )


def recorded_of(rehearsed: Rehearsed, steps: Sequence[int]) -> Recorded:
    """These iterations, counted from 0, as a run would record them; virtual stages have no layers to record."""
    measured = [rehearsed.measured[step] for step in steps]
    actions: list[list[Span]] = [list(same) for same in zip(*(one.spans for one in measured), strict=True)]
    spans = [
        Span(
            worker=same[0].worker,
            action=same[0].action,
            start=median(span.start for span in same),
            end=median(span.start for span in same) + median(span.end - span.start for span in same),
        )
        for same in actions
    ]
    num_ranks = rehearsed.mesh.num_ranks
    own, last = spans[:-num_ranks], spans[-num_ranks:]  # behind the actions is the end of each rank's iteration
    iteration = median(rehearsed.seconds[step] for step in steps)
    return Recorded(
        steps=(steps[0] + 1, steps[-1] + 1),
        timeline=Timeline(num_workers=num_ranks, spans=tuple(own), source="measured"),
        ends=tuple(span.end for span in last),
        iteration=iteration,
        step=iteration,
    )
