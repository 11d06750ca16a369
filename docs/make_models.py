"""Writes docs/models.md from diffusers' classes, our registry and the cases of tests/kit/cut_cases.py: `make docs`."""

import inspect
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.models import transformers

from diffusionpipe.errors import ModelError
from diffusionpipe.models.cut.cutting import cut
from diffusionpipe.models.cut.leaves import leaves_of
from diffusionpipe.models.opening.class_table import CLASSES
from diffusionpipe.models.opening.folder import REGISTRY

FILE = Path(__file__).parent / "models.md"
RECIPES = FILE.parents[1] / "examples/recipes"
BY_HAND = {"DiTTransformer2DModel"}
HEAD = """# Models

`make docs` generates this page from the installed diffusers ({version}) and from the tests.

## Pipelines that train

| pipeline | trains | drawn by `sample` and while training | frozen | recipe |
|---|---|---|---|---|
{pipelines}

Wan, LTX-Video and HunyuanVideo train on clips (`data.frames`) or on pictures, each a clip of one frame.

Tests train a tiny model of each transformer pipeline over two ranks, under 1F1B, ZB-V, filled and sharded, in turns
whole and with adapters (`PixArtSigmaPipeline` and `DiTPipeline` load none), and compare with one process; diffusers
opens the results. They draw each pipeline that is drawn on 1, 2 and 3 ranks: in float32 within 1e-5 of diffusers' own
pipeline, in bfloat16 the same bits. Two kinds are compared with our loop in one process, because diffusers has no
pipeline for them: classes of `DDPMPipeline`, and models that read their own estimate. `make families` shows all
layouts whole and with adapters.

## Transformer classes

One adapter cuts a transformer into calls of its own blocks. "Cut" says whether it can: a test compares the output and
every gradient over two stages with those of the whole model, for a tiny model of the class. A class trains if a
pipeline with it is in the table above. A class that is not yet in the test's table is "not tried". Parameters, in
billions, and layers belong to the class's default configuration.

"Planned" is the size of a sample, in pixels and frames, that `diffusionpipe plan --model-class CLASS` plans unless
`--resolution` says otherwise: the class at its default size, without encoders and VAE, with latents and states of texts
as raw inputs. Texts have as many tokens as diffusers' pipeline reads at most, or 512. "Yes" stands for sounds and
embeddings, "no" for classes that cannot be cut, have no default size or read more than a text.

| class | parameters | layers | cut | trains | planned | why not |
|---|---|---|---|---|---|---|
"""


def document() -> str:
    """The whole page."""
    pipelines = "\n".join(_pipelines())
    return HEAD.format(version=diffusers.__version__, pipelines=pipelines) + "\n".join(rows()) + "\n"


def _pipelines() -> Iterator[str]:
    for name, family in sorted(REGISTRY.items()):
        trained = ", ".join(f"`{part}`" for part in family.trainable)
        is_drawn = "yes, from conditioning pictures" if "ControlNet" in name else "yes"
        if "Fill" in name or "Inpaint" in name:
            is_drawn = "yes, from pictures with holes"
        if "ImageToVideo" in name:
            is_drawn = "yes, from the first frame"
        frozen = ", ".join(kind for part, kind in family.components.items() if part not in family.trainable)
        yield f"| `{name}` | {trained} | {is_drawn} | {frozen} | {_recipe(name)} |"


def _recipe(pipeline: str) -> str:
    """The link to the recipe whose head names the pipeline."""
    for file in sorted(RECIPES.glob("*.toml")):
        heads = [line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("# diffusers: ")]
        if pipeline in heads[0].removeprefix("# diffusers: ").split(", "):
            return f"[{file.name}](../examples/recipes/{file.name})"
    raise LookupError(f"no recipe in {RECIPES} names {pipeline} in its head")


def rows() -> Iterator[str]:
    """A row for each transformer class."""
    cases, refused = tables()
    for name in classes():
        billions, layers = size_of(name)
        pipelines = [p for p, family in REGISTRY.items() if name in family.components.values()]
        verdict = (
            "yes" if name in cases or (pipelines and name not in refused) else "no" if name in refused else "not tried"
        )
        how = "by hand" if pipelines and name in BY_HAND else "yes" if pipelines else "no"
        why = reason_of(name, refused[name]) if name in refused else ""
        planned = "no" if name in refused else planned_size(name)
        yield f"| {name} | {billions} | {layers} | {verdict} | {how} | {planned} | {why} |"


def classes() -> list[str]:
    """The transformer classes of the installed diffusers."""
    found = {
        name
        for place in (transformers, diffusers)
        for name in dir(place)
        if "Transformer" in name or name in ("PriorTransformer", "StableAudioDiTModel", "HunyuanDiT2DModel")
        if inspect.isclass(kind := getattr(place, name, None))
        and issubclass(kind, diffusers.ModelMixin)
        and kind.__module__.startswith("diffusers.models.transformers")
    }
    return sorted(found | set(tables()[0]) | set(tables()[1]))


def tables() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The tests' tables of classes that are cut, and that are not."""
    folder = str(Path(__file__).parents[1] / "tests")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    cases = import_module("kit.cut_cases")
    return cases.CASES, cases.REFUSED


def size_of(name: str) -> tuple[str, str]:
    """Parameters in billions and layers of the default configuration; dashes where a class has none."""
    try:
        with torch.device("meta"):
            model = getattr(diffusers, name)()
    except Exception:  # a class without defaults raises whatever its code leads to
        return "-", "-"
    return f"{sum(p.numel() for p in model.parameters()) / 1e9:.2f}", str(len(leaves_of(model)))


def planned_size(name: str) -> str:
    """What a sample is that is planned for the class alone."""
    call = CLASSES.get(name)
    if call is None or not call.pixels:
        return "no" if call is None else "yes"
    size = call.size
    return f"{size.width} x {size.height}" + (f" x {size.frames}" if size.frames > 1 else "")


def reason_of(name: str, case: Any) -> str:
    """Why the class cannot be cut, as the adapter says it."""
    inputs = import_module("kit.cut_cases").inputs_of(case, 2)
    model = getattr(diffusers, name)(**case.config)
    try:
        cut(model, lambda root, **given: root(**given, **case.fixed, return_dict=False)[0], inputs)
    except ModelError as error:
        return str(error).replace("|", "\\|").removeprefix(f"{name} cannot be cut: ")
    raise AssertionError(f"{name} can be cut; move it to the other table")


if __name__ == "__main__":
    FILE.write_text(document(), encoding="utf-8")
