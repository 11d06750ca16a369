"""Whole trainings of tiny models of every family over two ranks, compared with one process; diffusers opens what results.

A run in one process and a tiny model are made once for all layouts of a family, and a model is traced once in a process.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from crew import Crew
from tiny_described import PIPELINES as DESCRIBED
from tiny_described import RESOLUTIONS, save_described
from tiny_models import randomise_parameters
from tiny_pipelines import flux, sd3
from tiny_runs import losses_of, recipe_of, save_dit, save_pictures, train, train_here

from diffusionpipe.trainer.recipe import Recipe

LAYOUTS: Mapping[str, Mapping[str, object]] = {
    "1F1B": {},
    "ZB-V": {"schedule": "zb-v", "microbatches": 4},
    "filled": {"fill": True},
    "sharded": {"stages": 1, "data_parallel": 2, "sharded": True},
}
WITHOUT_ADAPTERS = {"PixArtSigmaPipeline", "DiTPipeline"}
"""diffusers' pipelines of these load none."""


def _saved(build: Callable[[], Any]) -> Callable[[Path], Path]:
    def save(folder: Path) -> Path:
        pipeline = build()
        for seed, part in enumerate(pipeline.components.values()):
            if isinstance(part, torch.nn.Module):
                randomise_parameters(part, seed)
        pipeline.save_pretrained(folder)
        return folder

    return save


SAVED: Mapping[str, Callable[[Path], Path]] = {
    "FluxPipeline": _saved(flux),
    "StableDiffusion3Pipeline": _saved(sd3),
    "DiTPipeline": save_dit,
    **{kind: lambda folder, kind=kind: save_described(kind, folder) for kind in DESCRIBED},
}
"""Functions that write a tiny model of each pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training."""

    kind: str
    """The class of the pipeline."""
    layout: str
    is_adapted: bool
    """Whether adapters alone are trained."""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.kind}-{self.layout}-{'adapters' if self.is_adapted else 'whole'}"


CASES = tuple(
    Case(kind=kind, layout=layout, is_adapted=is_adapted)
    for kind in SAVED
    for layout in LAYOUTS
    for is_adapted in (False, True)
    if not (is_adapted and kind in WITHOUT_ADAPTERS)
)
"""All."""


def size_of(kind: str) -> int:
    """Side of the pictures, in pixels."""
    return RESOLUTIONS.get(kind, 16)


@dataclass(slots=True)
class Families:
    """What several trainings need, made when it is first asked for. Mutable: keeps all of it."""

    place: Path
    models: dict[str, Path] = field(default_factory=dict)
    learned: dict[tuple[str, bool], dict[int, float]] = field(default_factory=dict)

    def model(self, kind: str) -> Path:
        """The folder of a tiny model."""
        if kind not in self.models:
            self.models[kind] = SAVED[kind](self.place / "models" / kind)
        return self.models[kind]

    @property
    def pictures(self) -> Path:
        """The folder of the pictures that all learn."""
        folder = self.place / "pictures"
        return folder if folder.is_dir() else save_pictures(folder, 8)

    def recipe(self, kind: str, folder: Path, *, is_adapted: bool = False, **sections: Any) -> Recipe:
        """Two steps in the layout of the sections."""
        data = {"caption_dropout": 0.3, "resolution": size_of(kind)}
        adapters = {"lora": {"rank": 2}} if is_adapted else {}
        sections = {"training": {"steps": 2}, **adapters, **sections}
        return recipe_of(self.model(kind), self.pictures, folder, data=data, **sections)

    def in_one_process(self, kind: str, *, is_adapted: bool) -> dict[int, float]:
        """The losses of the run in this process."""
        key = kind, is_adapted
        if key not in self.learned:
            folder = self.place / "in-one" / f"{kind}-{is_adapted}"
            assert train_here(self.recipe(kind, folder, is_adapted=is_adapted)) == 2
            self.learned[key] = losses_of(folder)
        return self.learned[key]


def check(families: Families, crew: Crew, case: Case, folder: Path) -> None:
    """Two ranks learn what one process learns, and diffusers opens it.

    Raises:
        AssertionError: they do not.
    """
    recipe = families.recipe(case.kind, folder, is_adapted=case.is_adapted, pipeline=LAYOUTS[case.layout])
    assert crew.run(train, recipe) == [2, 2]
    over_two, in_one = losses_of(folder), families.in_one_process(case.kind, is_adapted=case.is_adapted)
    assert over_two.keys() == in_one.keys() == {1, 2}
    assert over_two[1] == pytest.approx(in_one[1], rel=1e-5)
    assert over_two[2] == pytest.approx(in_one[2], rel=1e-3)  # AdamW's first step makes much of small gradients
    assert in_one[1] != in_one[2]
    opened = getattr(diffusers, case.kind).from_pretrained
    before = opened(families.model(case.kind))
    if case.is_adapted:
        exported = next(folder.rglob("*lora*.safetensors")).parent
        before.load_lora_weights(exported)
        assert before.get_active_adapters()
        return
    after = opened(next(folder.rglob("model_index.json")).parent)
    assert is_different(after.transformer, before.transformer)
    for name, part in before.components.items():
        if isinstance(part, torch.nn.Module) and name != "transformer":
            assert not is_different(getattr(after, name), part), name
    if case.kind == "QwenImagePipeline":  # nobody reads the captions' tokens of the last block
        blocks = list(zip(after.transformer.transformer_blocks, before.transformer.transformer_blocks, strict=True))
        assert not is_different(blocks[-1][0].txt_mlp, blocks[-1][1].txt_mlp)
        assert is_different(blocks[0][0].txt_mlp, blocks[0][1].txt_mlp)


def is_different(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Whether any weight is."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return any(not torch.equal(a, b) for a, b in pairs)
