"""Finds the fewest changes with which a layout fits, if none does, each way with the command that asks for it.

Changes that cost no machine come first: frozen weights in bfloat16, all layers recomputed, frozen weights in one byte
or four bits, a smaller batch. Where they do not fit together, more cards of the same kind, adapters in place of the
whole model, or smaller pictures are added. A way is offered only if a layout of it is found that fits.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

from diffusionpipe.costs.cluster import Cluster, with_memory
from diffusionpipe.costs.forms import Form, stored_bytes
from diffusionpipe.holding.memory import Trait
from diffusionpipe.planner.choosing.advice import RANK, Nearest, nearest_layout, recomputed, with_adapters
from diffusionpipe.planner.choosing.batches import with_batch
from diffusionpipe.planner.choosing.fewer import least_of
from diffusionpipe.planner.pricing.setting import Setting

Apply = Callable[[Setting], Setting | None]
"""Setting -> the setting after a change; None if the change is made already or cannot be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of the training or the cluster that may help, with its words, option, key and effect."""

    words: str
    """The change in words."""
    option: tuple[str, str]
    """The option of `plan` and its value."""
    key: str
    """The key of a recipe and its value; "" where the option holds for recipes too."""
    apply: Apply
    """The function that makes the change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CombinedWay:
    """Changes that fit together in memory, and the layout that fits with them."""

    changes: tuple[Change, ...]
    nearest: Nearest


def ways_out(
    setting: Setting,
    *,
    larger: Iterable[Cluster] = (),
    batch: bool = True,
    layers: bool = True,
    smaller: Sequence[Change] = (),
) -> list[CombinedWay]:
    """The ways to change a setting for which nothing fits so that a layout fits, at most five; [] if none helps.

    If changes that cost no machine are enough, only one way of these is returned.

    Args:
        setting: the training as it was asked for.
        larger: machines with more cards of the same kind, smallest first.
        batch: whether a smaller batch may be offered: False if the caller left the batch open.
        layers: whether other storage and adapters may be offered: False if a file of a profile fixes the layers.
        smaller: changes to smaller pictures, largest first. Their profiles may have to be counted first, so they are
            tried last, and only if all memory that does not grow with the pictures fits.
    """
    cheap = [change for change in (_storage(setting) if layers else None, _recomputation(setting)) if change]
    # The fewest changes first.
    for count in range(1, len(cheap) + 1):
        for chosen in combinations(cheap, count):
            if way := _way(setting, chosen):
                return [way]
    again = [change for change in (_recomputation(setting),) if change]
    found = [
        _first(setting, again, _forms(setting) if layers else ()),
        _first(setting, cheap, _batches(setting) if batch else ()),
        _first(setting, cheap, [_cards(cluster, setting) for cluster in larger]),
        _first(setting, cheap, [_adapters()] if layers else ()),
    ]
    ways = [way for way in found if way is not None]
    # Where the only way needs more cards, smaller pictures are one that costs no machine.
    if (not ways or (len(ways) == 1 and ways[0].changes[-1].option[0] == "--cluster")) and _may_shrink(setting, cheap):
        way = _first(setting, cheap, smaller)
        ways += [way] if way is not None else []
    return ways


def _may_shrink(setting: Setting, cheap: Sequence[Change]) -> bool:
    """Whether smaller samples may help: all memory that does not grow with their size fits in the nearest layout.

    The cheap changes are made first.
    """
    for change in cheap:
        setting = change.apply(setting) or setting
    nearest = nearest_layout(setting) if least_of(setting) < float("inf") else None
    if nearest is None:
        return False
    return nearest.proposal.overflow < nearest.use.having(Trait.GROWING)


def _first(setting: Setting, cheap: Sequence[Change], others: Iterable[Change]) -> CombinedWay | None:
    """The way with the first of the `others` that fits beside the cheap changes, with as few of these as possible.

    None if no other change fits even with all cheap ones.
    """
    for other in others:
        way = _way(setting, (*cheap, other))
        if way is None:
            continue
        # Some of the cheap changes may not be needed beside this one.
        for count in range(len(cheap)):
            for chosen in combinations(cheap, count):
                if fewer := _way(setting, (*chosen, other)):
                    return fewer
        return way
    return None


def _way(setting: Setting, changes: Sequence[Change]) -> CombinedWay | None:
    """The way with all these changes; None if one of them cannot be made, or if no layout fits then."""
    changed: Setting | None = setting
    for change in changes:
        changed = change.apply(changed) if changed is not None else None
    if changed is None:
        return None
    for one in _of_batches(changed):
        nearest = nearest_layout(one) if least_of(one) < float("inf") else None
        if nearest is not None and nearest.fits:
            return CombinedWay(changes=tuple(changes), nearest=nearest)
    return None


def _of_batches(setting: Setting) -> Iterator[Setting]:
    """The setting itself and, if its batch has fewer samples than there are devices, one with a sample for each."""
    yield setting
    if setting.workload.batch < setting.cluster.num_ranks:
        yield with_batch(setting, setting.cluster.num_ranks)


def _storage(setting: Setting) -> Change | None:
    if setting.profile.precision != "bfloat16" or stored_narrow(setting) is None:
        return None
    return Change(
        words="store frozen weights in bfloat16",
        option=("--frozen-dtype", "bfloat16"),
        key="model.frozen_dtype=bfloat16",
        apply=stored_narrow,
    )


def stored_narrow(setting: Setting) -> Setting | None:
    """The setting with frozen float32 matrices stored in bfloat16; None if there are none.

    Embeddings stay in float32; they are recognized by their names.
    """
    graph = setting.graph
    wide = [
        parameter
        for parameter in graph.parameters
        if not parameter.is_trainable and parameter.dtype == "float32" and len(parameter.shape) > 1
        if not _is_table(parameter.name)
    ]
    # Weights that the workload stores narrowly already gain nothing.
    names = {parameter.name for parameter in wide if setting.ledger.frozen[parameter.name] == parameter.num_bytes}
    if not names:
        return None
    parameters = tuple(replace(one, dtype="bfloat16") if one.name in names else one for one in graph.parameters)
    return replace(setting, profile=replace(setting.profile, graph=replace(graph, parameters=parameters)))


def _forms(setting: Setting) -> Iterator[Change]:
    """The changes that store frozen linear layers in one byte a number, then in four bits, as far as they help."""
    for form in (Form.INT8, Form.NF4) if setting.profile.precision == "bfloat16" else ():
        if stored_in(form, setting) is not None:
            yield Change(
                words=f"store frozen weights in {form}",
                option=("--frozen-dtype", form.value),
                key=f"model.frozen_dtype={form}",
                apply=partial(stored_in, form),
            )


def stored_in(form: Form, setting: Setting) -> Setting | None:
    """The setting with the weights of frozen linear layers stored in this form; None if no weight gets smaller.

    The VAE's weights stay as they are. Linear layers are recognized by their number type: after `stored_narrow` their
    weights are in bfloat16, and embeddings in float32. Times of layers stay the same; the command that the way offers
    counts the widening.
    """
    setting = stored_narrow(setting) or setting
    graph, frozen = setting.graph, setting.ledger.frozen
    smaller = {}
    for one in graph.parameters:
        if one.is_trainable or one.dtype != "bfloat16" or len(one.shape) != 2:
            continue
        size = stored_bytes(form, *one.shape)
        if size < frozen[one.name] == one.num_bytes and not one.name.startswith("vae."):
            smaller[one.name] = replace(one, shape=(size,), dtype=form.value)
    if not smaller:
        return None
    parameters = tuple(smaller.get(one.name, one) for one in graph.parameters)
    return replace(setting, profile=replace(setting.profile, graph=replace(graph, parameters=parameters)))


def _is_table(name: str) -> bool:
    # Names of embeddings in diffusers and transformers; T5 calls its table "shared".
    return "embed" in name or name.endswith("shared.weight")


def _recomputation(setting: Setting) -> Change | None:
    if recomputed(setting) is None:
        return None
    return Change(
        words="recompute all layers",
        option=("--checkpoint", "*"),
        key="training.activation_checkpointing=true",
        apply=recomputed,
    )


def _batches(setting: Setting) -> Iterator[Change]:
    batch = setting.workload.batch
    while batch > 1:
        batch = -(-batch // 2)
        yield Change(
            words=f"a batch of {batch}",
            option=("--batch", str(batch)),
            key=f"training.batch={batch}",
            apply=partial(with_batch, batch=batch),
        )


def _cards(cluster: Cluster, setting: Setting) -> Change:
    cluster = with_memory(cluster, max(device.memory for device in setting.cluster.devices))
    return Change(
        words=f"{cluster.num_ranks} such devices ({cluster.name})",
        option=("--cluster", cluster.name),
        key="",
        apply=partial(replace, cluster=cluster),
    )


def _adapters() -> Change:
    return Change(
        words=f"adapters of rank {RANK} in place of the whole model",
        option=("--lora-rank", str(RANK)),
        key=f"lora.rank={RANK}",
        apply=with_adapters,
    )
