"""Tiny models of every family: trained over two ranks as in one process, opened by diffusers, drawn on 1 to 3 ranks.

All ranks of a family are forked from one process that has traced its models: tracing takes longer than training.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import pytest
import torch
from kit.busy_drawing import busy_share
from kit.crew import Crew, crew_of, nest
from kit.cuts import traced_once
from kit.descriptions import described
from kit.drawn_families import Asked, Drawn, asked_of, by_diffusers, drawn_by, guidances_of, size_of, trace
from kit.tiny_clips import save_clips
from kit.tiny_described import CLIPS, save_described
from kit.tiny_described import PIPELINES as DESCRIBED
from kit.tiny_models import randomise_parameters, randomise_pipeline, tiny_transformer
from kit.tiny_pipelines import flux, sd3
from kit.tiny_runs import losses_of, recipe_of, save_dit, save_pictures, train
from numpy.typing import NDArray
from PIL import Image, ImageSequence

from diffusionpipe.cli.verbs.drawing_work import drawing_work
from diffusionpipe.costs import LayerProfile, Profile
from diffusionpipe.models.opening.folder import REGISTRY
from diffusionpipe.runtime.job.process_group import Job
from diffusionpipe.trainer.course.kept_samples import sample_folder
from diffusionpipe.trainer.inference.drawing import still
from diffusionpipe.trainer.model import members
from diffusionpipe.trainer.recipe import Recipe
from diffusionpipe.trainer.setup.job_profile import Measurement
from diffusionpipe.units import Seconds
from diffusionpipe.workflows.drawing.redraw import redraw

LAYOUTS: Mapping[str, Mapping[str, object]] = {
    "1F1B": {},
    "ZB-V": {"schedule": "zb-v", "microbatches": 4},
    "filled": {"fill": True},
    "sharded": {"stages": 1, "data_parallel": 2, "sharded": True},
}
WITHOUT_ADAPTERS = {"PixArtSigmaPipeline", "DiTPipeline"}
"""diffusers' pipelines of these load none."""
TARGETS = {"QwenImagePipeline": ["to_q", "to_out.0", "to_add_out", "txt_mlp.net.2"]}
"""Layers with adapters, where they are not those of attention; nobody reads the last two of the last block."""
SAMPLING = {"every": 2, "prompts": ["ab", "c"], "negative_prompt": "d", "steps": 3}
STEPS = 2


def saved(build: Callable[[], Any]) -> Callable[[Path], Path]:
    def save(folder: Path) -> Path:
        pipeline = build()
        randomise_pipeline(pipeline)
        pipeline.save_pretrained(folder)
        return folder

    return save


def save_dit_of_imagenet(folder: Path) -> Path:
    """A DiT with the 1000 classes that diffusers' pipeline takes for granted."""
    save_dit(folder)
    transformer = tiny_transformer(num_embeds_ada_norm=1000, out_channels=4)
    randomise_parameters(transformer, 1)
    transformer.save_pretrained(folder / "transformer")
    return folder


SAVED: Mapping[str, Callable[[Path], Path]] = {
    "FluxPipeline": saved(flux),
    "StableDiffusion3Pipeline": saved(sd3),
    "DiTPipeline": save_dit_of_imagenet,
    **{kind: lambda folder, kind=kind: save_described(kind, folder) for kind in DESCRIBED},
}
"""Functions that write a tiny model of each pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training over two ranks."""

    kind: str
    """The class of the pipeline."""
    layout: str
    is_adapted: bool = False
    """Whether adapters alone are trained."""
    is_drawn: bool = False
    """Whether pictures are drawn at the end."""

    @property
    def name(self) -> str:
        """For people, and of its folder."""
        return f"{self.kind}-{self.layout}-{'adapters' if self.is_adapted else 'whole'}"


def all_of(kind: str) -> tuple[Case, ...]:
    """Every layout, whole and with adapters."""
    ways = (False,) if kind in WITHOUT_ADAPTERS else (False, True)
    return tuple(Case(kind=kind, layout=layout, is_adapted=way) for layout in LAYOUTS for way in ways)


def some_of(kind: str) -> tuple[Case, ...]:
    """Every layout once, in turns whole and with adapters; every layout draws for some family."""
    number = list(SAVED).index(kind)
    has_adapters = kind not in WITHOUT_ADAPTERS
    found = [
        Case(kind=kind, layout=layout, is_adapted=has_adapters and (number + j) % 2 == 1)
        for j, layout in enumerate(LAYOUTS)
    ]
    whole = [case for case in found if not case.is_adapted]
    drawn = whole[number // 2 % len(whole)].layout if kind in DESCRIBED else ""
    return tuple(
        Case(kind=kind, layout=one.layout, is_adapted=one.is_adapted, is_drawn=one.layout == drawn) for one in found
    )


@dataclass(frozen=True, slots=True)
class Place:
    """Where the models, the pictures and the runs of a family are."""

    folder: Path
    kind: str

    @property
    def model(self) -> Path:
        """A tiny model."""
        return self.folder / "model"

    def prepare(self) -> None:
        """Write what the trainings read."""
        SAVED[self.kind](self.model)
        clip = CLIPS.get(self.kind)
        if clip is None:
            save_pictures(self.folder / "pictures", 8)
        else:
            save_clips(self.folder / "pictures", 8, frames=clip.frames + 3, width=clip.width, height=clip.height)

    def run(self, case: Case) -> Path:
        """The folder of a training over two ranks."""
        return self.folder / case.name

    def alone(self, *, is_adapted: bool) -> Path:
        """The folder of the training in one process."""
        return self.folder / f"alone-{is_adapted}"

    def recipe(self, folder: Path, *, is_adapted: bool = False, **sections: Any) -> Recipe:
        """A short training."""
        data: dict[str, object] = {"caption_dropout": 0.3, "resolution": size_of(self.kind)}
        if clip := CLIPS.get(self.kind):
            data |= {"resolution": clip.width, "height": clip.height, "frames": clip.frames}
        adapters = {"lora": {"rank": 2, "target_modules": TARGETS.get(self.kind, [])}} if is_adapted else {}
        sections = {"training": {"steps": STEPS}, **adapters, **sections}
        return recipe_of(self.model, self.folder / "pictures", folder, data=data, **sections)

    def recipe_of(self, case: Case) -> Recipe:
        """The recipe of a training over two ranks."""
        is_distilled = REGISTRY[self.kind].embedded_guidance is not None  # a negative prompt needs a scale of its own
        drawn = {"sampling": SAMPLING | ({"true_cfg_scale": 1.5} if is_distilled else {})} if case.is_drawn else {}
        pipeline = LAYOUTS[case.layout]
        return self.recipe(self.run(case), is_adapted=case.is_adapted, pipeline=pipeline, **drawn)


class EqualCosts:
    """A `ProfileCache` in place of measuring: a step of any layer takes a millisecond a sample."""

    def find(self, measurement: Measurement) -> Profile:
        """The profile."""
        model, sizes = measurement.model, measurement.batch_sizes
        trained = set(model.backbone_layers)
        kept = {tensor.name: tensor.num_bytes for tensor in model.tensors}
        layers = []
        for layer in model.layers:
            times = tuple(1e-3 * size for size in sizes)
            gradients = times if layer.name in trained else (0.0,) * len(sizes)
            written = sum(kept[name] for name in layer.writes) if layer.name in trained else 0
            layers.append(
                LayerProfile(
                    name=layer.name,
                    forward=times,
                    input_grad=gradients,
                    weight_grad=gradients,
                    activation=tuple(written * size for size in sizes),
                    workspace=(0,) * len(sizes),
                    kept=tuple(written * size for size in sizes) if layer.name in trained else (),
                )
            )
        return Profile(
            graph=model,
            batch_sizes=sizes,
            layers=tuple(layers),
            device="equal",
            device_type="cpu",
            precision=measurement.precision,
            source="measured",
        )

    def keep(self, measurement: Measurement, profile: Profile) -> None:
        """Nothing is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a family."""

    trained: Mapping[Case, Seconds | Exception]
    """How long each case took, or why it failed."""
    drawn: Sequence[Drawn] | Exception
    """Pictures of the model itself, with and without guidance."""
    busy: float | Exception | None
    """The part of the time in which two ranks compute while they draw 8 pictures; None where nobody asked."""


def run_all(place: Place, cases: Sequence[Case], *, is_timed: bool = False) -> Outcome:
    """Trains the cases, each way also in one process, and draws on 1, 2 and 3 ranks.

    `is_timed`: the share of busy time is measured too.
    """
    place.prepare()
    return nest(_run_all, place, cases, is_timed)


def _run_all(place: Place, cases: Sequence[Case], is_timed: bool) -> Outcome:
    torch.set_num_threads(1)
    asked = [asked_of(place.model, size_of(place.kind), guidance) for guidance in guidances_of(place.kind)]
    ways = sorted({case.is_adapted for case in cases})
    with _traced():
        for way in ways:
            members.build_model(place.recipe(place.alone(is_adapted=way), is_adapted=way), "cpu")
    trace(asked)
    with (
        crew_of(1, is_forked=True) as alone,
        crew_of(2, is_forked=True) as crew,
        crew_of(3, is_forked=True) as three,
    ):
        for way in ways:
            _check(alone.run(train, place.recipe(place.alone(is_adapted=way), is_adapted=way)))
        trained = {case: _trained(place, case, alone, crew) for case in cases}
        drawn = _drawn(asked, (alone, crew, three))
        busy = _busy(crew, asked[-1]) if is_timed else None
        return Outcome(trained=trained, drawn=drawn, busy=busy)


def _trained(place: Place, case: Case, alone: Crew, crew: Crew) -> Seconds | Exception:
    started = perf_counter()
    try:
        _check(crew.run(train, place.recipe_of(case), profiles=EqualCosts()))
        if case.is_drawn:
            _check(alone.run(_draw_again, place.run(case)))
    except Exception as error:
        return error
    return perf_counter() - started


def _drawn(asked: Sequence[Asked], crews: Sequence[Crew]) -> Sequence[Drawn] | Exception:
    try:
        return [drawn_by(each, crews, by_diffusers, is_narrow=each is asked[0]) for each in asked]
    except Exception as error:
        return error


def _busy(crew: Crew, asked: Asked) -> float | Exception:
    try:
        return busy_share(crew, asked)
    except Exception as error:
        return error


@contextmanager
def _traced() -> Iterator[None]:
    with traced_once(), mock.patch.object(members, "describe", described):
        yield


def _check(results: Sequence[Any]) -> None:
    for result in results:
        if isinstance(result, Exception):
            raise result
        assert result == STEPS


def _draw_again(_: Job, run: Path) -> int:
    with traced_once():
        kept = sample_folder(run, STEPS) / "000-ab.png"
        redraw(run, kept, run / "again.png", torch.device("cpu"), drawing_work)
    return STEPS


def check(place: Place, case: Case) -> None:
    """Two ranks have learnt what one process has, diffusers opens it, and a picture was drawn as `sample` draws it.

    Raises:
        AssertionError: that is not so.
    """
    run = place.run(case)
    over_two, in_one = losses_of(run), losses_of(place.alone(is_adapted=case.is_adapted))
    assert over_two.keys() == in_one.keys() == {1, 2}
    assert over_two[1] == pytest.approx(in_one[1], rel=1e-5)
    assert over_two[2] == pytest.approx(in_one[2], rel=1e-3)  # AdamW's first step makes much of small gradients
    assert in_one[1] != in_one[2]
    opened = getattr(diffusers, case.kind).from_pretrained
    before = opened(place.model)
    if case.is_adapted:
        before.load_lora_weights(next(run.rglob("*lora*.safetensors")).parent)
        assert before.get_active_adapters()
        if case.kind == "QwenImagePipeline":  # nobody reads the captions' tokens of the last block
            names = {name.partition(".lora_A.")[0] for name, _ in before.transformer.named_parameters()}
            found = {name for name in names if name.endswith(("txt_mlp.net.2", "to_add_out", "to_q"))}
            ends = {0: ("to_q", "to_add_out"), 1: ("to_q", "to_add_out"), 2: ("to_q",)}
            attention = {f"transformer_blocks.{i}.attn.{end}" for i, own in ends.items() for end in own}
            assert found == attention | {f"transformer_blocks.{i}.txt_mlp.net.2" for i in (0, 1)}
        return
    after = opened(next(run.rglob("model_index.json")).parent)
    assert is_different(after.transformer, before.transformer)
    frozen = {name for name, part in before.components.items() if isinstance(part, torch.nn.Module)} - {"transformer"}
    assert not [name for name in frozen if is_different(getattr(after, name), getattr(before, name))]
    if case.kind == "QwenImagePipeline":  # nobody reads the captions' tokens of the last block
        blocks = list(zip(after.transformer.transformer_blocks, before.transformer.transformer_blocks, strict=True))
        assert not is_different(blocks[-1][0].txt_mlp, blocks[-1][1].txt_mlp)
        assert is_different(blocks[0][0].txt_mlp, blocks[0][1].txt_mlp)
    if case.is_drawn:
        drawn, again = np.load(sample_folder(run, STEPS).with_suffix(".npy")), frames_of(run / "again.png")
        if clip := CLIPS.get(case.kind):
            assert again.shape == (clip.frames, clip.height, clip.width, 3)
            assert np.array_equal(still(again), drawn[0])
        else:
            assert drawn.shape == (2, size_of(case.kind), size_of(case.kind), 3)
            assert np.array_equal(again[0], drawn[0])


def frames_of(path: Path) -> NDArray[np.uint8]:
    """All pictures of a file, (F, H, W, 3)."""
    with Image.open(path) as image:
        return np.stack([np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)])


def is_different(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Whether any weight is."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return any(not torch.equal(a, b) for a, b in pairs)
