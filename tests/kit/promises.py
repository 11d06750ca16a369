"""What every feature of a recipe promises, as one matrix: features x promises.

A feature is a change of one base recipe, a promise compares two runs of the same recipe. A new feature is one entry of
`FEATURES` and a place in `TOGETHER`; its promises follow. `together` puts several features into one recipe, as users
do.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kit.crew import Crew
from kit.sized_pictures import save_sized
from kit.tiny_models import NUM_CLASSES
from kit.tiny_runs import (
    ask_to_save_and_quit,
    losses_of,
    recipe_of,
    save_dit,
    save_stable_diffusion,
    tensors_of,
    train,
    train_here,
)
from PIL import Image
from torch import Tensor

from diffusionpipe.trainer.checkpoints.checkpoint import latest
from diffusionpipe.trainer.recipe import Recipe

Sections = Mapping[str, Mapping[str, Any]]
STEPS, STOP = 4, 2

LAYOUTS: Mapping[str, Sections] = {
    "two stages": {"pipeline": {"stages": 2}},
    "two copies": {"pipeline": {"data_parallel": 2, "microbatches": 2}},
    "split and filled": {"pipeline": {"stages": 2, "schedule": "zb-h1", "fill": True}},
    "sharded copies": {"pipeline": {"data_parallel": 2, "microbatches": 2, "sharded": True}},
}


@dataclass(frozen=True)
class Feature:
    """A change of the base recipe.

    `model`: the folder that it needs. `is_coarse`: whether some of it is computed in bfloat16. `not_with`: the
    layouts that cannot have it. `is_whole`: whether the export is a whole pipeline. `again`: the relative difference of
    losses in a resumed run; 0 means the same bits.
    """

    sections: Sections = field(default_factory=dict)
    model: str = "sd"
    is_coarse: bool = False
    not_with: tuple[str, ...] = ()
    is_whole: bool = True
    again: float = 0.0

    @property
    def loose(self) -> float:
        """The relative difference of losses that arithmetic leaves between layouts."""
        return 1e-2 if self.is_coarse else 1e-10


def stored(form: str) -> dict[str, dict[str, Any]]:
    """The keys of frozen weights in a narrow form, which are widened to bfloat16 alone."""
    return {"model": {"frozen_dtype": form}, "training": {"precision": "bfloat16"}}


FEATURES: Mapping[str, Feature] = {
    "nothing": Feature(),
    "classes": Feature(model="dit"),
    "v prediction and min-SNR": Feature({"objective": {"kind": "v_prediction", "snr_gamma": 5.0}}),
    "Huber and offset noise": Feature({"objective": {"loss": "huber", "huber_delta": 0.5, "offset_noise": 0.1}}),
    "SpeeD": Feature({"objective": {"time_sampling": "speed", "speed_pairs": True}}),
    "a range of times": Feature({"objective": {"time_range": [0.2, 0.7]}}),
    "flips and crops": Feature({"data": {"flip": True, "random_crop": True, "caption_dropout": 0.5}}),
    "tags": Feature({"data": {"captions": {"shuffle": True, "tag_dropout": 0.3, "prefix": "c"}}}),
    "several sizes": Feature({"data": {"resolution": ["16x8", "8x16", 8], "same_size": 2}}),
    "cut by tokens": Feature(
        {"data": {"resolution": ["16x8", "8x16", 8], "same_size": "auto", "batching": "tokens"}},
        not_with=("split and filled", "sharded copies"),
    ),
    "patches": Feature({"data": {"resolution": 16, "patches": {"share_whole": 0.5}}}),
    "masks of the loss": Feature({"data": {"loss_mask": "MASKS/{name}.png"}}),
    "sources": Feature({"data": {"sources": {"a": {"path": "PICTURES"}, "b": {"path": "PICTURES", "repeats": 2}}}}),
    "a cache of results": Feature({"pipeline": {"encoders": "cache"}}, again=1e-12),  # other chunks are computed
    "text encoder too": Feature({"model": {"train": ["unet", "text_encoder"]}}),
    "adapters": Feature({"lora": {"rank": 2}, "training": {"ema_decay": None}}, is_whole=False),
    "DoRA": Feature({"lora": {"rank": 2, "dora": True}}, is_whole=False),
    "adapters on nf4": Feature({"lora": {"rank": 2}, **stored("nf4")}, is_coarse=True, is_whole=False),
    "adapters on int8": Feature({"lora": {"rank": 2}, **stored("int8")}, is_coarse=True, is_whole=False),
    "recomputed": Feature({"training": {"activation_checkpointing": True}}),
    "SGD and cosine": Feature(
        {
            "optimizer": {"name": "SGD", "arguments": {"momentum": 0.9}},
            "learning_rate": {"schedule": "cosine", "warmup_steps": 2},
        }
    ),
    "Muon": Feature({"optimizer": {"name": "Muon", "rest": {"name": "AdamW"}}}, is_coarse=True),
    "weights in bfloat16": Feature(
        {"training": {"precision": "bfloat16", "weights": "bfloat16", "clip_norm": None}},
        is_coarse=True,
        not_with=("sharded copies",),
    ),
    "states on the host": Feature({"optimizer": {"states": "host"}, "training": {"ema_states": "host"}}),
    "groups": Feature({"optimizer": {"groups": {"unet.conv_in.*": {"learning_rate": 0.001, "weight_decay": 0.0}}}}),
    "no clipping": Feature({"training": {"clip_norm": None}}),
    "spikes": Feature({"training": {"on_spike": "skip"}}),
    "workers": Feature({"data": {"workers": 1}}),
}
TOGETHER: Mapping[str, tuple[str, ...]] = {
    "two stages": (
        "nothing",
        "flips and crops, a range of times, groups",
        "cut by tokens, SGD and cosine",
        "adapters on nf4, tags, spikes",
    ),
    "two copies": (
        "v prediction and min-SNR, several sizes, no clipping",
        "classes, spikes, workers",
        "adapters, masks of the loss, sources",
    ),
    "split and filled": (
        "Huber and offset noise, text encoder too, recomputed",
        "adapters on int8, flips and crops",
        "DoRA, a cache of results",
        "weights in bfloat16, tags",
    ),
    "sharded copies": (
        "Muon, groups, workers",
        "SpeeD, patches, states on the host",
        "tags, sources, a cache of results",
    ),
}
"""Recipes of several features, each beside the layout that it is tried on; every feature is in one of them."""


class Place:
    """A folder with the models and pictures of the matrix, and the runs that several promises compare with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: dict[str, Path] = {}

    def save(self) -> "Place":
        """Writes models, pictures and masks."""
        save_stable_diffusion(self.folder / "sd")
        save_dit(self.folder / "dit")
        lines = (save_sized(self.folder / "PICTURES") / "metadata.jsonl").read_text().splitlines()
        labelled = [json.dumps(json.loads(line) | {"label": number % NUM_CLASSES}) for number, line in enumerate(lines)]
        (self.folder / "PICTURES" / "metadata.jsonl").write_text("\n".join(labelled) + "\n")
        (self.folder / "MASKS").mkdir()
        random = np.random.default_rng(1)
        for path in sorted((self.folder / "PICTURES").glob("*.png")):
            size = Image.open(path).size[::-1]
            mask = Image.fromarray(random.integers(1, 256, size, dtype=np.uint8))
            mask.save(self.folder / "MASKS" / path.name)
        return self

    def recipe(self, run: str, feature: Feature, layout: Sections | None = None) -> Recipe:
        """The recipe of a feature in a layout, with the run folder `run`, in float64."""
        sections = merged(
            {"training": {"steps": STEPS, "precision": "float64"}, "checkpoint": {"every": None}},
            {"pipeline": {"microbatches": 4, "encode_chunk": 2}, "data": {"validation": str(self.folder / "PICTURES")}},
            {"validation": {"every": STEPS, "timesteps": [0.3], "samples": 4}},
            self._with_paths(feature.sections),
            layout or {},
        )
        data = {**sections.get("data", {})}
        train_on = None if "sources" in data else self.folder / "PICTURES"
        if train_on is None:
            sections["data"] = {**data, "train": None}
        return recipe_of(self.folder / feature.model, self.folder / "PICTURES", self.folder / run, **sections)

    def alone(self, name: str, feature: Feature) -> Path:
        """The run folder of a feature on one rank, trained once."""
        return self._once(f"{name}, alone", lambda run: train_here(self.recipe(run, feature)))

    def over_two(self, crew: Crew, name: str, feature: Feature, layout: str) -> Path:
        """The run folder of a feature on two ranks, trained once."""
        settings = LAYOUTS[layout]
        return self._once(f"{name}, {layout}", lambda run: crew.run(train, self.recipe(run, feature, settings)))

    def stopped(self, crew: Crew, name: str, feature: Feature, layout: str) -> Path:
        """The run folder of a feature on two ranks that was asked to end after `STOP` steps.

        It has what the whole run has measured: fills follow from it, and the order of sums from fills.
        """
        whole, settings = self.over_two(crew, name, feature, layout), LAYOUTS[layout]

        def make(run: str) -> list[Any]:
            (self.folder / run).mkdir()
            for measured in ("profile.json", "cluster.json"):
                if (whole / measured).exists():
                    shutil.copy(whole / measured, self.folder / run)
            return crew.run(train, self.recipe(run, feature, settings), at={STOP: ask_to_save_and_quit})

        return self._once(f"{name}, {layout}, stopped", make)

    def copied(self, run: Path, name: str) -> str:
        """The name of a copy of a run folder, in which that run may be resumed."""
        shutil.copytree(run, self.folder / name)
        return name

    def _once(self, name: str, make: Callable[[str], Any]) -> Path:
        if name not in self._made:
            ended = make(name)
            for one in ended if isinstance(ended, list) else [ended]:
                if isinstance(one, Exception):
                    raise one
            self._made[name] = self.folder / name
        return self._made[name]

    def _with_paths(self, sections: Sections) -> Sections:
        def placed(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: placed(part) for key, part in value.items()}
            if isinstance(value, str) and value.startswith(("PICTURES", "MASKS")):
                return str(self.folder / value)
            return value

        return {name: placed(dict(section)) for name, section in sections.items()}


def together(names: str) -> Feature:
    """Several features, whose names are joined by commas, as one."""
    several = [FEATURES[name] for name in names.split(", ")]
    return Feature(
        merged(*(one.sections for one in several)),
        model=next((one.model for one in several if one.model != Feature.model), Feature.model),
        is_coarse=any(one.is_coarse for one in several),
        not_with=tuple(layout for one in several for layout in one.not_with),
        is_whole=all(one.is_whole for one in several),
        again=max(one.again for one in several),
    )


def merged(*several: Sections) -> dict[str, dict[str, Any]]:
    """The keys of all; of two with one key the later one.

    >>> merged({"data": {"flip": True}}, {"data": {"workers": 1}, "lora": {"rank": 2}})
    {'data': {'flip': True, 'workers': 1}, 'lora': {'rank': 2}}
    """
    found: dict[str, dict[str, Any]] = {}
    for sections in several:
        for name, section in sections.items():
            found[name] = {**found.get(name, {}), **section}
    return found


def differing_losses(run: Path, other: Path, loose: float) -> list[tuple[str, int, float, float]]:
    """What differs by more than `loose` times the second run's value: key, step and both values of each.

    Both runs have the losses of all steps, and a validation after the last.
    """
    found = []
    for key, steps in (("loss", [*range(1, STEPS + 1)]), ("validation_loss", [STEPS])):
        one, two = losses_of(run, key), losses_of(other, key)
        assert sorted(one) == sorted(two) == steps
        found += [(key, step, one[step], two[step]) for step in steps if not within(loose, one[step], two[step])]
    return found


def within(loose: float, one: float, two: float) -> bool:
    """Whether two numbers differ by at most `loose` times the second; nan differs from all."""
    return abs(one - two) <= loose * abs(two)


def differing_tensors(run: Path, other: Path) -> list[str]:
    """Names of tensors of the last checkpoints of two runs that have not the same bits."""
    one, two = tensors_of(latest(run)), tensors_of(latest(other))
    assert one.keys() == two.keys()
    return [name for name in one if not same_bits(one[name], two[name])]


def same_bits(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors have one type and the same values."""
    return one.dtype == two.dtype and torch.equal(one, two)


def exported_weights(folder: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """Parameters of the pipeline in a folder as diffusers opens it, of those components."""
    import diffusers

    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    return {
        f"{name}.{key}": parameter.detach()
        for name in names
        for key, parameter in getattr(pipeline, name).named_parameters()
    }
