"""Names changes that help if no layout fits in memory, each with the memory that it would take.

Every figure belongs to the nearest layout: of all layouts the one whose fullest device misses its memory by least. So a
change that fits here may have faster layouts, and `diffusionpipe plan` finds them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from diffusionpipe.costs import LayerProfile, LayerSpec, ParameterSpec
from diffusionpipe.costs.cluster import repeated
from diffusionpipe.costs.graph import ATTENTION
from diffusionpipe.holding import Item
from diffusionpipe.holding.memory import MemoryUse
from diffusionpipe.ir import Sharded
from diffusionpipe.planner.choosing.rows import parts_of, sizes_in, unit_of
from diffusionpipe.planner.pricing.given import NOTHING
from diffusionpipe.planner.pricing.owning import settings_with_owners
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.storing import WORTH, encoder_bytes, knows_copies, leanest_place
from diffusionpipe.planner.rivals.baselines import best_baselines
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.naming import name_of
from diffusionpipe.planner.search.nearest import least_estimated_overflow, least_overflow
from diffusionpipe.planner.search.proposal import Proposal
from diffusionpipe.planner.search.sharded import leanest_sharded
from diffusionpipe.units import Bytes

RECOMPUTE = "recompute all layers in the backward (training.activation_checkpointing = true, or --checkpoint '*')"
RANK = 16
LORA = f'LoRA ([lora] rank = {RANK}, model.frozen_dtype = "bfloat16" in a recipe)'
WORTH_SAYING = 0.95
"""A change that does not make the model fit must take less than this part of the memory to be named."""
MOST_DEVICES = 64
"""The largest number of devices that is proposed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """A layout that is nearest to fitting in memory, or fits, with its setting and its simulation."""

    setting: Setting
    candidate: Candidate
    proposal: Proposal

    @property
    def layout(self) -> str:
        """The name and the sizes of the layout in words, e.g. "1f1b with 2 stages, 4 micro-batches"."""
        return f"{name_of(self.candidate)} with {sizes_in(self.setting, self.candidate)}"

    @property
    def worker(self) -> int:
        """The number of the worker that holds most in memory."""
        return max(range(len(self.proposal.memory)), key=lambda worker: self.proposal.memory[worker].total)

    @property
    def use(self) -> MemoryUse:
        """The memory of the worker that holds most, item by item."""
        return self.proposal.memory[self.worker]

    @property
    def fits(self) -> bool:
        """Whether every device has room for the layout."""
        return self.proposal.overflow <= 0


def nothing_fits(setting: Setting) -> str:
    """The text of the error if no layout of a setting fits in memory, in several lines.

    It names the nearest layout, the missing memory, the use of the fullest device, and the changes that help.
    """
    nearest = nearest_layout(setting)
    if nearest is None:
        return "No layout can divide this batch."
    worker, use = nearest.worker, nearest.use
    device = setting.cluster.devices[nearest.proposal.mesh.rank(0, worker)]
    name, unit = unit_of(use.total)
    parts = ", ".join(f"{part} {size:.2f}" for part, size in parts_of(use, unit).items())
    lines = [
        (
            f"No layout fits in memory: the nearest, {nearest.layout}, needs {nearest.proposal.overflow / unit:.1f} "
            f"{name} more than worker {worker} has."
        ),
        (
            f"Worker {worker} would hold {use.total / unit:.2f} {name}: {parts}. "
            f"Its device, {device.name}, has {device.memory / unit:.2f} {name} for training."
        ),
    ]
    helps, others = [], []
    for words, changed in _changes(setting):
        found = nearest_layout(changed)
        if found is None:
            continue
        line = f"- {words}: {found.use.total / unit:.1f} {name}, {found.layout}"
        if found.fits:
            helps.append(line)
        elif found.use.total < WORTH_SAYING * use.total:
            others.append(line)
    helps.append(f"- devices with {use.total / unit:.1f} {name} for training: the nearest layout, as above")
    fitting = [one for one in best_baselines(setting) if one.overflow <= 0]
    if fitting:
        best = min(fitting, key=lambda one: one.step)
        helps.append(f"- {best.name} with {best.sizes}, which DiffusionPipe does not run")
    others += _without_figures(setting)
    lines += [f"These changes would fit (with the {name} on the fullest device):", *helps]
    if others:
        lines += ["These help, but not enough alone:", *others]
    return "\n".join(lines)


def nearest_layout(setting: Setting) -> Nearest | None:
    """The layout that lacks the least memory, or the first that fits; None if no layout can divide the batch.

    Whole and sharded copies are looked at, and heavy encoders are kept in host memory.
    """
    setting = leanest_place(setting)
    if setting.given.sharded is Sharded.OPTIMIZER:
        setting = next(settings_with_owners(setting), setting)
    best: Nearest | None = None
    # Whole copies and pipelines first, then copies in parts.
    for search in [leanest_sharded] if setting.given.sharded is Sharded.ALL else [least_overflow, leanest_sharded]:
        found = search(setting)
        if found and (best is None or found[1].overflow < best.proposal.overflow):
            best = Nearest(setting=setting, candidate=found[0], proposal=found[1])
        if best and best.fits:
            break
    return best


def _changes(setting: Setting) -> Iterator[tuple[str, Setting]]:
    """(words for a change, the setting after it) of each change that may make a layout fit, the usual ones first."""
    again, adapted = recomputed(setting), with_adapters(setting)
    if again:
        yield RECOMPUTE, again
    if adapted:
        yield LORA, adapted
        if again:
            yield f"{LORA} and recompute all layers", recomputed(adapted) or adapted
    if setting.workload.width(Item.OPTIMIZER):
        yield (
            "an optimizer without state, e.g. Adafactor (optimizer.name, or --optimizer)",
            replace(setting, workload=setting.workload.without(Item.OPTIMIZER)),
        )
    if setting.given != NOTHING:
        yield "no fixed sizes: let the search choose them", replace(setting, given=NOTHING)
        return
    if setting.workload.batch > setting.cluster.num_ranks:
        batch = setting.cluster.num_ranks
        yield f"a batch of {batch}", replace(setting, workload=replace(setting.workload, batch=batch))
    # The fewest devices alone, or together with recomputation, where that helps at all.
    for start in (setting, again):
        larger = _larger(start) if start else None
        if larger:
            words = f"{larger.cluster.num_ranks} such devices instead of {setting.cluster.num_ranks}"
            yield words + (", and recompute all layers" if start is again else ""), larger
            return


def _without_figures(setting: Setting) -> list[str]:
    """A line of text for each change that may help but whose memory cannot be computed from this profile."""
    found: list[str] = []
    names = [p.name for p in setting.graph.parameters if p.is_trainable]
    if with_adapters(setting) is None and not any(".lora_A." in name for name in names):
        found.append(
            f"- LoRA ([lora] rank = {RANK} in a recipe): only small matrices have gradients and optimizer state; "
            "plan such a recipe to see its memory"
        )
    frozen, smallest = encoder_bytes(setting), min(device.memory for device in setting.cluster.devices)
    if not knows_copies(setting) and WORTH * frozen > smallest:
        name, unit = unit_of(frozen)
        found.append(
            f"- encoders in host memory, which are {frozen / unit:.1f} {name} on each device: give every device of the "
            'cluster file a "host_bandwidth" in bytes per second (`diffusionpipe cluster` measures it)'
        )
    return found


def recomputed(setting: Setting) -> Setting | None:
    """The setting with all layers recomputed in the backward; None if they are recomputed already."""
    if setting.workload.checkpointed == ("*",):
        return None
    return replace(setting, workload=replace(setting.workload, checkpointed=("*",)))


def _larger(setting: Setting) -> Setting | None:
    """The setting on twice the devices, or four times, and so on: the least number on which a layout fits by estimate.

    None if more devices would be needed than `MOST_DEVICES` or than the batch has samples.
    """
    cluster, times = setting.cluster, 2
    while times * cluster.num_ranks <= min(MOST_DEVICES, setting.workload.batch):
        larger = replace(setting, cluster=repeated(cluster, times))
        best = least_estimated_overflow(leanest_place(larger))
        if best and best.fits:
            return larger
        times *= 2
    return None


def with_adapters(setting: Setting, rank: int = RANK) -> Setting | None:
    """The setting with adapters of `rank` on the projections of attention, all other weights frozen, in bfloat16.

    Activations are taken as they are; adapters keep less, so the memory is an upper bound. None for a model whose
    trained part has no such projections, or is adapters already.
    """
    profile = setting.profile
    targets = {p.name: p for p in profile.graph.parameters if p.is_trainable and _is_target(p)}
    if not targets:
        return None
    # All other weights are frozen then, and narrow.
    known = [replace(p, is_trainable=False, dtype="bfloat16") for p in profile.graph.parameters]
    added = {name: _adapters(parameter, rank) for name, parameter in targets.items()}
    graph = replace(
        profile.graph,
        parameters=(*known, *(one for pair in added.values() for one in pair)),
        layers=tuple(_adapted(layer, added) for layer in profile.graph.layers),
    )
    copies = {layer.name: _copies(layer, added) for layer in profile.graph.layers}
    layers = tuple(_with_copies(layer, copies[layer.name]) for layer in profile.layers)
    return replace(
        setting,
        profile=replace(profile, graph=graph, layers=layers),
        workload=setting.workload.narrow(2),
    )


def _is_target(parameter: ParameterSpec) -> bool:
    ends = tuple(f".{target}.weight" for target in ATTENTION)
    return len(parameter.shape) == 2 and parameter.name.endswith(ends)


def _adapters(parameter: ParameterSpec, rank: int) -> tuple[ParameterSpec, ParameterSpec]:
    stem, (outputs, inputs) = parameter.name.removesuffix(".weight"), parameter.shape
    return (
        replace(parameter, name=f"{stem}.lora_A.weight", shape=(rank, inputs)),
        replace(parameter, name=f"{stem}.lora_B.weight", shape=(outputs, rank)),
    )


_Added = dict[str, tuple[ParameterSpec, ParameterSpec]]


def _adapted(layer: LayerSpec, added: _Added) -> LayerSpec:
    own = tuple(one.name for name in layer.parameters if name in added for one in added[name])
    return replace(layer, parameters=(*layer.parameters, *own))


def _copies(layer: LayerSpec, added: _Added) -> Bytes:
    """The bytes of the copies of a layer's adapters in two bytes for each weight."""
    return sum(2 * prod(one.shape) for name in layer.parameters if name in added for one in added[name])


def _with_copies(layer: LayerProfile, num_bytes: Bytes) -> LayerProfile:
    return replace(layer, copies=num_bytes) if layer.copies else layer
