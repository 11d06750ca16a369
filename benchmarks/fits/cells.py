"""One cell: a model at its published size, adapters on a base of one width or all of it, on a number of cards."""

import os
import time
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod

from benchmarks.choices import checked
from diffusionpipe.costs import Cluster, Profile
from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.costs.devices import device_rates
from diffusionpipe.costs.forms import Form
from diffusionpipe.holding import Workload, plain_states
from diffusionpipe.holding.memory import workspace_of
from diffusionpipe.planner.choosing.advice import nearest_layout
from diffusionpipe.planner.choosing.best import best_choice
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.naming import SHARDED
from diffusionpipe.planner.search.proposal import Proposal
from diffusionpipe.units import Bytes, Seconds
from diffusionpipe.workflows.planning.profile_cache import cache_folder, kept_profile
from diffusionpipe.workflows.planning.stated_model import StatedModel, profile_name, profiles_of_devices

RANK = 16
NUMBERS = (1, 2, 4, 8)
"""Of cards; one card for adapters alone."""
WIDTHS: tuple[Form | None, ...] = (None, Form.INT8, Form.NF4)
"""Of the frozen base; None: bfloat16."""
CAREFUL = 0.7
"""Adapters are expected to fit where the stored weights take at most this part of all cards' memory."""

_H3 = "MiniMaxH3Transformer3DModel"
MODELS = {
    "FLUX.2-dev, 1024 px": StatedModel(name="flux.2-dev"),
    "Qwen-Image, 1024 px": StatedModel(name="qwen-image"),
    "Krea 2, 1024 px": StatedModel(name="krea-2"),
    "Wan 2.1 14B, 81 frames, 480p": StatedModel(name="wan-2.1-14b", clip=(832, 480, 81)),
    "Wan 2.1 14B, 81 frames, 720p": StatedModel(name="wan-2.1-14b", clip=(1280, 720, 81)),
    "MiniMax H3, 124 frames, 480p": StatedModel(name=_H3, is_class=True, clip=(832, 480, 124)),
    "MiniMax H3, 124 frames, 768p": StatedModel(name=_H3, is_class=True, clip=(1344, 768, 124)),
}
CARDS = {"RTX 4090, 24 GB": "rtx4090x4", "L40S, 48 GB": "l40sx8", "H100, 80 GB": "h100x8"}
"""The cluster whose devices and links are taken."""
DEVICES = {"RTX 4090, 24 GB": "rtx4090", "L40S, 48 GB": "l40s", "H100, 80 GB": "h100"}


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """How wide what is kept of a trained parameter is."""

    name: str
    parameter: int
    gradient: int
    optimizer: int


WIDE = State(name="float32", parameter=4, gradient=4, optimizer=8)
NARROW = State(name="narrow", parameter=2, gradient=2, optimizer=2)
"""Bfloat16 weights and gradients, with Adam's moments in 8 bits; tried where whole training does not fit otherwise.

About as `training.weights` and `training.gradients` in bfloat16 with an 8-bit AdamW, which has 2.03 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Which cell."""

    model: str
    has_adapters: bool
    cards: str
    number: int
    form: Form | None = None
    """Of frozen linear layers; None: bfloat16."""

    @property
    def trained(self) -> str:
        """The trained part and its base in words."""
        return f"adapters on {self.form or 'bfloat16'}" if self.has_adapters else "whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The best layout of a case; where none fits, the one that misses by least."""

    case: Case
    state: str
    batch: int
    """Samples of a step."""
    layout: str
    stored: float
    """The denoiser's weights, frozen ones as they are stored and trained ones as they are kept, as a part of all cards'
    memory."""
    step: Seconds
    fullest: Bytes
    """Memory of the fullest card."""
    overflow: Bytes
    """Beyond the memory of that card; 0 or less: it fits."""
    items: dict[str, Bytes]
    """Memory of the fullest card by item."""
    host: Bytes
    """Memory of the machine that the encoders take there."""
    planning: Seconds
    """CPU seconds of the search; profiles are not counted."""

    @property
    def fits(self) -> bool:
        """Whether it can be run."""
        return self.overflow <= 0

    @property
    def marked(self) -> str:
        """The state in words, and whether the trainer has it: in this layout, and for this model."""
        if MODELS[self.case.model].is_class:
            return f"{self.state}, the trainer lacks the model"
        if self.state == NARROW.name and self.layout.startswith(SHARDED):
            return f"{self.state}, the trainer lacks it in shards"
        return f"{self.state}, the trainer does this"


def cases() -> list[Case]:
    """All cells, models first."""
    kinds = [(True, form) for form in WIDTHS] + [(False, None)]
    return [
        Case(model=model, has_adapters=has_adapters, form=form, cards=cards, number=number)
        for model in MODELS
        for has_adapters, form in kinds
        for cards in CARDS
        for number in NUMBERS
        if has_adapters or number > 1
    ]


def profile_of(model: str, cards: str, *, has_adapters: bool, form: Form | None) -> Profile:
    """The computed profile, frozen linear layers in that form; a minute where it is not kept."""
    return _profiles(model, has_adapters, form)[cards]


@cache
def _profiles(model: str, has_adapters: bool, form: Form | None) -> dict[str, Profile]:
    """The profiles of all cards, whose work is counted once."""
    stated = replace(MODELS[model], lora_rank=RANK if has_adapters else None, has_narrow_store=True, form=form)
    folder, devices = cache_folder(os.environ), list(DEVICES.values())
    counted = cache(partial(profiles_of_devices, stated, devices))

    def one(index: int) -> Profile:
        name = profile_name(stated, device_rates(devices[index]))
        return kept_profile(name, lambda: counted()[index], folder)[0]

    return {cards: one(index) for index, cards in enumerate(DEVICES)}


def cluster_of(cards: str, number: int) -> Cluster:
    """So many of these cards in one machine."""
    known = load_cluster(CARDS[cards])
    return replace(known, name=f"{number} x {cards}", devices=known.devices[:1] * number, nodes=(0,) * number)


def measure(case: Case) -> Cell:
    """Plan the cell, all layers recomputed: with a sample for each card, else with one sample a step."""
    _setting(case, WIDE, 1)  # its profile is made
    started = time.process_time()
    found = _planned(case)
    return replace(found, planning=time.process_time() - started)


def _planned(case: Case) -> Cell:
    for state in (WIDE,) if case.has_adapters else (WIDE, NARROW):
        for batch in dict.fromkeys((case.number, 1)):
            if found := _fitting(case, state, batch):
                return found
    nearest = nearest_layout(_setting(case, state, batch))
    assert nearest is not None, "one sample can always be given to one pipeline"
    return _cell(case, state, nearest.layout, nearest.proposal, nearest.setting)


def _fitting(case: Case, state: State, batch: int) -> Cell | None:
    """The planner's choice; None where nothing fits."""
    choice = best_choice(_setting(case, state, batch))
    return None if choice is None else _cell(case, state, checked(choice).sizes, choice.proposal, choice.setting)


def _setting(case: Case, state: State, batch: int) -> Setting:
    return Setting(
        profile=profile_of(case.model, case.cards, has_adapters=case.has_adapters, form=case.form),
        cluster=cluster_of(case.cards, case.number),
        workload=Workload(
            batch=batch,
            states=plain_states(parameter=state.parameter, gradient=state.gradient, optimizer=state.optimizer),
            checkpointed=("*",),
        ),
    )


def _cell(case: Case, state: State, layout: str, proposal: Proposal, setting: Setting) -> Cell:
    fullest = max(proposal.memory, key=lambda use: use.total)
    return Cell(
        case=case,
        state=state.name,
        batch=setting.workload.batch,
        layout=layout,
        stored=_stored(setting, state) / sum(device.memory for device in setting.cluster.devices),
        step=proposal.step,
        fullest=fullest.total,
        overflow=proposal.overflow,
        items={name: size for name, size in fullest.items().items() if size},
        host=setting.ledger.resting(setting.graph.frozen_layers).host,
        planning=0.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What no pipeline of a case goes below on its fullest card, with one sample a step and all layers recomputed."""

    case: Case
    weights: Bytes
    """Stored, an equal part of all."""
    inputs: Bytes
    """Of the layers, kept for their recomputation; an equal part of all."""
    layer: Bytes
    """A block while it is recomputed and goes backward: the kind of which there are most."""
    room: Bytes
    """Of a card."""

    @property
    def total(self) -> Bytes:
        """All three."""
        return self.weights + self.inputs + self.layer


def bound_of(case: Case) -> Bound:
    """From the profile alone, whose bytes are the same for all cards; encoders, optimizer and messages come on top."""
    setting = _setting(replace(case, cards=next(iter(CARDS))), WIDE, 1)
    graph, profile = setting.graph, setting.profile
    own = set(graph.backbone_layers)
    written = {name for layer in graph.layers if layer.name in own for name in layer.writes}
    read = {name for layer in graph.layers if layer.name in own for name in layer.reads}
    needs = Counter(workspace_of(name, 1, profile, setting.workload, own) for name in own)
    return Bound(
        case=case,
        weights=_stored(setting, WIDE) // case.number,
        inputs=sum(graph.tensor(name).num_bytes for name in written & read) // case.number,
        layer=needs.most_common(1)[0][0],
        room=cluster_of(case.cards, case.number).devices[0].memory,
    )


def _stored(setting: Setting, state: State) -> Bytes:
    """All weights of the denoiser."""
    graph = setting.profile.graph
    trained = set(graph.backbone_layers)
    names = {name for layer in graph.layers if layer.name in trained for name in layer.parameters}
    return sum(
        prod(spec.shape) * state.parameter if spec.is_trainable else spec.num_bytes
        for spec in graph.parameters
        if spec.name in names
    )
