"""One cell: a model at its published size, adapters or all of it, on a number of cards."""

import os
from dataclasses import dataclass, replace
from functools import cache
from math import prod

from diffusionpipe.cli.profile_cache import cache_folder
from diffusionpipe.cli.stated_model import StatedModel, computed_profile
from diffusionpipe.costs import Cluster, Profile, Workload
from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.planner.advice import nearest_layout
from diffusionpipe.planner.choice import choose
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.units import Bytes, Seconds

RANK = 16
NUMBERS = (2, 4, 8)
"""Of cards."""
CAREFUL = 0.7
"""Adapters are expected to fit where the stored weights take at most this part of all cards' memory."""

MODELS = {
    "FLUX.2-dev, 1024 px": StatedModel(name="flux.2-dev"),
    "Qwen-Image, 1024 px": StatedModel(name="qwen-image"),
    "Krea 2, 1024 px": StatedModel(name="krea-2"),
    "Wan 2.1 14B, 81 frames, 480p": StatedModel(name="wan-2.1-14b", clip=(832, 480, 81)),
    "Wan 2.1 14B, 81 frames, 720p": StatedModel(name="wan-2.1-14b", clip=(1280, 720, 81)),
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
"""bfloat16 weights and gradients, with Adam's moments in 8 bits; tried where whole training does not fit otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Which cell."""

    model: str
    has_adapters: bool
    cards: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The best layout of a case; where none fits, the one that misses by least."""

    case: Case
    state: str
    layout: str
    stored: float
    """The denoiser's weights, frozen ones as they are stored and trained ones as they are kept, as a part of all cards'
    memory."""
    step: Seconds
    fullest: Bytes
    """Memory of the fullest card."""
    overflow: Bytes
    """Beyond the memory of that card; 0 or less: it fits."""

    @property
    def fits(self) -> bool:
        """Whether it can be run."""
        return self.overflow <= 0


def cases() -> list[Case]:
    """All cells, models first."""
    return [
        Case(model=model, has_adapters=has_adapters, cards=cards, number=number)
        for model in MODELS
        for has_adapters in (True, False)
        for cards in CARDS
        for number in NUMBERS
    ]


@cache
def profile_of(model: str, cards: str, *, has_adapters: bool) -> Profile:
    """The computed profile, frozen matrices in bfloat16; a minute where it is not kept."""
    stated = replace(MODELS[model], lora_rank=RANK if has_adapters else None, has_narrow_store=True)
    return computed_profile(stated, DEVICES[cards], cache_folder(os.environ))[0]


def cluster_of(cards: str, number: int) -> Cluster:
    """So many of these cards in one machine."""
    known = load_cluster(CARDS[cards])
    return replace(known, name=f"{number} x {cards}", devices=known.devices[:1] * number, nodes=(0,) * number)


def measure(case: Case) -> Cell:
    """Plan the cell: a sample of each step for each card, all layers recomputed in the backward."""
    found = measure_in(case, WIDE)
    return found if found.fits or case.has_adapters else measure_in(case, NARROW)


def measure_in(case: Case, state: State) -> Cell:
    """The cell with this state."""
    setting = Setting(
        profile=profile_of(case.model, case.cards, has_adapters=case.has_adapters),
        cluster=cluster_of(case.cards, case.number),
        workload=Workload(
            batch=case.number,
            parameter_bytes=state.parameter,
            gradient_bytes=state.gradient,
            optimizer_bytes=state.optimizer,
            checkpointed=("*",),
        ),
    )
    nearest = nearest_layout(setting)
    assert nearest is not None, "a sample for each card can always be divided"
    layout, proposal = nearest.layout, nearest.proposal
    if nearest.fits:  # it is the first that fits, not the fastest
        choice = choose(setting)
        layout, proposal = choice.sizes, choice.proposal
    fullest = max(use.total for use in proposal.memory)
    return Cell(
        case=case,
        state=state.name,
        layout=layout,
        stored=_stored(setting, state) / sum(device.memory for device in setting.cluster.devices),
        step=proposal.step,
        fullest=fullest,
        overflow=proposal.overflow,
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
