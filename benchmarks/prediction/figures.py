"""Predicted beside measured: iterations, steps, kinds of actions, bytes."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.prediction.training import UNRECORDED, Profiles, Report, StepTrace
from diffusionpipe.ir import Op, Plan, Timeline
from diffusionpipe.planner import predicted_timeline
from diffusionpipe.planner.correction.correct import Correction, correct
from diffusionpipe.planner.from_profile import setting_of
from diffusionpipe.planner.pricing.stage_costs import update_time
from diffusionpipe.planner.search.proposal import predict
from diffusionpipe.trainer.course.counted_steps import LATE, Note, representative_steps
from diffusionpipe.trainer.course.first_steps import recorded_of
from diffusionpipe.units import Bytes, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A figure predicted and measured."""

    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured / self.predicted if self.predicted else float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Everything about one plan of one model."""

    iteration: Pair
    """Of the schedule: from the common start to the end of the last rank."""
    before: Seconds
    """The iteration as predicted from a profile of rank 0 alone, with assumed links."""
    step: Pair
    """With agreement, clipping, optimizer and average."""
    corrected: Pair
    """The iteration, predicted from the profile that the first 20 steps have corrected."""
    corrected_step: Pair
    """And the step."""
    unexplained: float
    """By how much the iteration was longer in these than its actions explain."""
    kinds: dict[str, Pair]
    """Time by kind of action, summed over the ranks of the first pipeline."""
    held: tuple[Pair, ...]
    """Bytes of activations and messages at the peak of each rank."""
    quiet: int
    """Steps in which no rank waited for a core for long,"""
    steps: int
    """of so many."""
    recorded: int
    """Steps that were recorded for the correction: 15, and more where other programs took cores."""
    fastest: Seconds
    """The shortest iteration."""
    delay: float
    """Part of a step in which the rank that waited longest had no core, median over all steps."""
    predicted: Timeline
    measured: Timeline
    """The counted iteration of median length."""


def compare(plan: Plan, profiles: Profiles, ranks: Sequence[Report]) -> Found:
    """One plan's predictions beside what its ranks did."""
    traces = [report.traces for report in ranks]
    lengths = [max(rank.iteration for rank in step) for step in zip(*traces, strict=True)]
    shares = [max(rank.delay / rank.step for rank in step) for step in zip(*traces, strict=True)]
    notes = [Note(without_core=share, iteration=length) for share, length in zip(shares, lengths, strict=True)]
    counted = representative_steps(notes).steps or range(len(notes))
    predicted = predicted_timeline(profiles.together, plan)
    measured = sorted(counted, key=lambda index: lengths[index])[len(counted) // 2]
    spans = tuple(span for trace in traces[: plan.mesh.pipeline] for span in trace[measured].spans)
    steps = [max(rank.step for rank in step) for step in zip(*traces, strict=True)]
    update = update_time(plan.train, plan.blocks, profiles.together, plan.mesh)
    iteration, step = median(lengths[index] for index in counted), median(steps[index] for index in counted)
    correction = _correction(plan, profiles, ranks)
    return Found(
        iteration=Pair(predicted=predicted.makespan, measured=iteration),
        before=predicted_timeline(profiles.alone, plan).makespan,
        step=Pair(predicted=predicted.makespan + update, measured=step),
        corrected=Pair(predicted=correction.corrected.iteration, measured=iteration),
        corrected_step=Pair(predicted=correction.corrected.step, measured=step),
        unexplained=correction.unexplained,
        kinds=_kinds(plan, predicted, [[trace[index] for index in counted] for trace in traces]),
        held=_held(plan, profiles, [report.held for report in ranks]),
        quiet=sum(share <= LATE for share in shares),
        recorded=ranks[0].recorded,
        steps=len(shares),
        fastest=min(lengths),
        delay=median(shares),
        predicted=predicted,
        measured=Timeline(num_workers=plan.mesh.pipeline, spans=spans, source="measured"),
    )


def _correction(plan: Plan, profiles: Profiles, ranks: Sequence[Report]) -> Correction:
    """What a run would say after its first 20 steps."""
    orders = [plan.train.orders[plan.mesh.place(rank)[1]] for rank in range(plan.mesh.num_ranks)]
    first = [report.first for report in ranks]
    recorded = recorded_of(plan.mesh, first, orders, (UNRECORDED + 1, UNRECORDED + ranks[0].recorded))
    setting = setting_of(profiles.together, plan.mesh, plan.batch, checkpointed=plan.checkpointed)
    return correct(setting, plan, recorded)


def _kinds(plan: Plan, predicted: Timeline, traces: Sequence[Sequence[StepTrace]]) -> dict[str, Pair]:
    """Sums over all actions of medians over the steps."""
    expected: dict[str, Seconds] = defaultdict(float)
    found: dict[str, Seconds] = defaultdict(float)
    for span in predicted.spans:
        expected[_kind(span.action.op)] += span.end - span.start if span.action.op in _COMPUTE else 0.0
    for steps in traces[: plan.mesh.pipeline]:
        for same in zip(*(step.spans for step in steps), strict=True):
            found[_kind(same[0].action.op)] += median(span.end - span.start for span in same)
    return {kind: Pair(predicted=expected[kind], measured=found[kind]) for kind in _KINDS if kind in found}


_COMPUTE = (Op.F, Op.B, Op.ENCODE)
_KINDS = ("F", "B", "ENCODE", "messages", "REDUCE_GRAD")


def _kind(op: Op) -> str:
    return "messages" if op in (Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B) else str(op)


def _held(plan: Plan, profiles: Profiles, counted: Sequence[Bytes]) -> tuple[Pair, ...]:
    setting = setting_of(profiles.together, plan.mesh, plan.batch, checkpointed=plan.checkpointed)
    uses = predict(setting, plan.train, plan.blocks, plan.mesh).memory
    places = [plan.mesh.place(rank)[1] for rank in range(plan.mesh.num_ranks)]
    return tuple(
        Pair(predicted=uses[worker].activations + uses[worker].messages, measured=num_bytes)
        for worker, num_bytes in zip(places, counted, strict=True)
    )
