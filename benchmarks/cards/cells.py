"""One cell: a model on a machine, trained in every way that is compared, encoders on the fly."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.cards import profiles
from benchmarks.choices import checked
from benchmarks.rivals.copies import AHEAD, CACHED, HYBRID, NARROW_SUMS, ZERO1, tuned_copies
from benchmarks.rivals.replicated import REPLICATED_SPP, replicated_spp
from benchmarks.rivals.split_baselines import diffusion_pipe, naive_split
from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.costs.forms import Form
from diffusionpipe.planner.choosing.advice import nearest_layout
from diffusionpipe.planner.choosing.best import best_choice
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.rivals.baselines import DDP, ZERO3, Baseline, best_baselines, best_of, data_parallel
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.units import Bytes
from diffusionpipe.workflows.planning.stated_setting import stated_setting

OURS = "DiffusionPipe"
FSDP = ZERO3
NAIVE = "naive split"
PEER = "diffusion-pipe"
PEER_SPLIT = "diffusion-pipe, 2+ stages"
SYSTEMS = (OURS, DDP, FSDP, NAIVE, PEER, PEER_SPLIT, "GPipe", "1F1B + SPP", REPLICATED_SPP)
TUNED = (AHEAD, NARROW_SUMS, ZERO1, HYBRID, CACHED)
"""Data parallelism as people tune it."""
BASES = {"int8 base": Form.INT8, "nf4 base": Form.NF4}
"""Forms in which the trainer stores frozen linear layers under adapters."""
STORED = tuple(f"{system}, {base}" for system in (OURS, DDP, PEER) for base in BASES)
"""Adapters on bases of fewer bytes."""
OTHER_TRAINING = (CACHED, *STORED)
"""Systems that train something else: on fixed pictures and captions, or on other weights. They are no rivals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is trained."""

    profile: str
    is_lora: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where."""

    cluster: str
    device: str
    """The device of the profile; a slower one in the cluster says by how much."""
    lora: int
    """Samples of a step, for an adapter"""
    full: int
    """and for a whole model."""


MODELS = {
    "FLUX.1-dev LoRA": Model(profile="flux.1-dev-lora", is_lora=True),
    "FLUX.1-dev": Model(profile="flux.1-dev"),
    "SDXL": Model(profile="sdxl"),
    "SD3-medium": Model(profile="sd3-medium"),
}
MACHINES = {
    "RTX 4090 + 4080": Machine(cluster="rtx4090-rtx4080", device="rtx4090", lora=4, full=8),
    "2 x RTX 4090": Machine(cluster="rtx4090x2", device="rtx4090", lora=4, full=8),
    "4 x RTX 4090": Machine(cluster="rtx4090x4", device="rtx4090", lora=8, full=16),
    "8 x L40S": Machine(cluster="l40sx8", device="l40s", lora=32, full=64),
    "8 x H100": Machine(cluster="h100x8", device="h100", lora=64, full=128),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """How the trainer keeps a trained parameter and what is beside it."""

    name: str
    optimizer: str
    """The class, as `optimizer.name` takes it."""
    gradients: str | None = None
    """`training.gradients` beside `training.weights` in bfloat16; None: both are float32."""


STATES = (
    State(name="float32, the trainer does this", optimizer="AdamW"),
    State(name="narrow, the trainer does this", optimizer="bitsandbytes.optim.AdamW8bit", gradients="bfloat16"),
)
"""AdamW in float32; where nothing fits, weights and gradients in bfloat16 with AdamW's moments in 8 bits.

The trainer does both: their bytes are those of a plan with these keys, parameter by parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Which cell."""

    model: str
    machine: str

    @property
    def batch(self) -> int:
        """Samples of one step."""
        machine = MACHINES[self.machine]
        return machine.lora if MODELS[self.model].is_lora else machine.full


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One way of training in a cell, at its own best sizes."""

    system: str
    layout: str
    is_recomputed: bool
    """Whether layers are recomputed in the backward."""
    samples_per_second: float
    bubble: float
    """Idle part of all devices' time."""
    held: tuple[Bytes, ...]
    """Peak memory of each device of one pipeline; one figure where all hold the same."""
    overflow: Bytes
    """Beyond the memory of the fullest device; 0 or less: it fits."""
    base: str = ""
    """The base that its adapters are on, where that is not in bfloat16; the name of `BASES`."""

    @property
    def fits(self) -> bool:
        """Whether it can be run."""
        return self.overflow <= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Everything about one case."""

    case: Case
    state: str
    """The name of its `State`."""
    frozen_share: float
    """Encoders' part of all compute, nothing recomputed."""
    entries: tuple[Entry, ...]

    def entry(self, system: str) -> Entry | None:
        """The entry of that name."""
        return next((one for one in self.entries if one.system == system), None)

    def fitting(self, system: str) -> Entry | None:
        """The same if it fits."""
        entry = self.entry(system)
        return entry if entry and entry.fits else None

    @property
    def fits(self) -> bool:
        """Whether anything does."""
        return any(one.fits for one in self.entries)

    @property
    def best_other(self) -> Entry | None:
        """The fastest alternative that trains the same and fits."""
        others = [one for one in self.entries if one.fits and one.system not in {OURS, *OTHER_TRAINING}]
        return max(others, key=lambda one: one.samples_per_second, default=None)

    def over(self, other: Entry | None) -> float | None:
        """How many times as fast ours is on the same base; None where one of them does not fit."""
        ours = self.fitting(_on(OURS, other.base)) if other else None
        return ours.samples_per_second / other.samples_per_second if ours and other and other.fits else None


def _on(system: str, base: str) -> str:
    return f"{system}, {base}" if base else system


def setting_of(case: Case, state: State, *, is_recomputed: bool, form: Form | None = None) -> Setting:
    """Frozen matrices in bfloat16, or linear layers in that form; norms and embeddings in float32."""
    machine = MACHINES[case.machine]
    is_narrow = state.gradients is not None
    return stated_setting(
        profiles.load(MODELS[case.model].profile, machine.device, form, is_narrow=is_narrow),
        load_cluster(machine.cluster),
        case.batch,
        checkpoint=("*",) if is_recomputed else (),
        has_ema=False,
        optimizer=state.optimizer,
        gradients=state.gradients,
    )


def measure(case: Case) -> Cell:
    """Simulate the cell, with narrower states only if nothing fits without."""
    cell = measure_in(case, STATES[0])
    return cell if cell.fits or MODELS[case.model].is_lora else measure_in(case, STATES[1])


def measure_in(case: Case, state: State) -> Cell:
    """Simulate the cell; every system recomputes in the backward or not, whichever is better for it."""
    settings = {again: setting_of(case, state, is_recomputed=again) for again in (False, True)}
    found = [entry for again, setting in settings.items() for entry in _entries(setting, is_recomputed=again)]
    for base, form in BASES.items() if MODELS[case.model].is_lora else ():
        for again in settings:
            setting = setting_of(case, state, is_recomputed=again, form=form)
            found += stored_entries(setting, base, is_recomputed=again)
    plain = Judge(setting=settings[False])
    samples = max(1, case.batch // settings[False].cluster.num_ranks)
    sums = plain.tables.table.sums(samples)
    frozen = plain.tables.encoding(samples)
    return Cell(
        case=case,
        state=state.name,
        frozen_share=frozen / (frozen + sums.forward[-1] + sums.backward[-1]),
        entries=tuple(
            min(mine, key=lambda one: (max(0, one.overflow), -one.samples_per_second))
            for name in (*SYSTEMS, *TUNED, *STORED)
            if (mine := [one for one in found if one.system == name])
        ),
    )


def reason_without(system: str) -> str:
    """Why a system has no row in a cell, where it has none."""
    if system == HYBRID:
        return "one node: it is ZeRO-3"
    return "no frozen base: all of the model is trained" if system in STORED else "the batch cannot be shared so"


def _entries(setting: Setting, *, is_recomputed: bool) -> Iterator[Entry]:
    yield ours_of(setting, is_recomputed=is_recomputed)
    others: tuple[Callable[[Judge], Baseline | None], ...] = (
        replicated_spp,
        naive_split,
        partial(_renamed, diffusion_pipe, PEER),
        partial(_renamed, partial(diffusion_pipe, least=2), PEER_SPLIT),
    )
    found = [*best_baselines(setting), *tuned_copies(setting), *(best_of(system, setting) for system in others)]
    yield from (_entry(one, setting, is_recomputed=is_recomputed) for one in found if one)


def stored_entries(setting: Setting, base: str, *, is_recomputed: bool) -> Iterator[Entry]:
    """Ours, copies and diffusion-pipe with adapters on a stored base; all widen weights as the trainer does."""
    ours = ours_of(setting, is_recomputed=is_recomputed)
    yield replace(ours, system=_on(OURS, base), base=base)
    for system, name in ((_copies, DDP), (diffusion_pipe, PEER)):
        if found := best_of(partial(_renamed, system, _on(name, base)), setting):
            yield replace(_entry(found, setting, is_recomputed=is_recomputed), base=base)


def _entry(one: Baseline, setting: Setting, *, is_recomputed: bool) -> Entry:
    return Entry(
        system=one.name,
        layout=one.sizes,
        is_recomputed=is_recomputed,
        samples_per_second=setting.workload.batch / one.step,
        bubble=max(0.0, 1 - one.busy / one.step),
        held=one.held,
        overflow=one.overflow,
    )


_copies = partial(data_parallel, is_overlapped=True)


def _renamed(system: Callable[[Judge], Baseline | None], name: str, judge: Judge) -> Baseline | None:
    found = system(judge)
    return found and replace(found, name=name)


def ours_of(setting: Setting, *, is_recomputed: bool) -> Entry:
    """The plan of `diffusionpipe plan`; where none fits, the one that misses by least."""
    choice = best_choice(setting)
    if choice is not None:
        layout, proposal = checked(choice).sizes, choice.proposal
    else:
        nearest = nearest_layout(setting)
        assert nearest is not None, "every batch can be cut over the devices of its cell"
        layout, proposal = nearest.layout, nearest.proposal
    return Entry(
        system=OURS,
        layout=layout,
        is_recomputed=is_recomputed,
        samples_per_second=setting.workload.batch / proposal.step,
        bubble=proposal.timeline.bubble,
        held=tuple(use.total for use in proposal.memory),
        overflow=proposal.overflow,
    )
