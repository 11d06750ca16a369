"""Writes the tables of keys in docs/recipe.md from the sections of the recipe's schema: `make docs`.

A line `<!-- keys of [SECTION] -->` is followed by its table. A row is a field: its annotation gives the values, its
docstring the meaning. `SEE` names the heading that explains a key further.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic.fields import FieldInfo

from diffusionpipe.trainer.recipe import SECTIONS, MemberSection
from diffusionpipe.trainer.recipe.captions_section import CaptionsSection
from diffusionpipe.trainer.recipe.group_section import GroupSection
from diffusionpipe.trainer.recipe.optimizer_section import RestSection
from diffusionpipe.trainer.recipe.section import Auto, Section, of_user, patterns_for_bool, texts_for_text
from diffusionpipe.trainer.recipe.sources_section import ColumnsSection, PatchesSection, SourceSection

FILE = Path(__file__).parent / "recipe.md"
TABLES: dict[str, type[Section]] = {
    **SECTIONS,
    "model.components.NAME": GroupSection,
    "models.NAME": MemberSection,
    "data.sources.NAME": SourceSection,
    "data.columns": ColumnsSection,
    "data.captions": CaptionsSection,
    "data.patches": PatchesSection,
    "optimizer.rest": RestSection,
}
"""The class of each table, by its name in a recipe."""

VALUES = {
    "lora.target_modules": 'list of texts, `"attention"`, `"linear"` or `"all"`',
    "data.resolution": "whole number from 1 to 65,536, or list of sizes",
    "data.sources.NAME.resolution": 'size, list of sizes or `"none"`',
    "lora.formats": '`["diffusers"]` or `["diffusers", "comfy"]`',
    "model.components.NAME.learning_rate_schedule": 'as `learning_rate.schedule`, or `"auto"`',
    "models.NAME.learning_rate_schedule": 'as `learning_rate.schedule`, or `"auto"`',
    "learning_rate.schedule": '`"constant"`, `"linear"`, `"cosine"` or a name of transformers',
    "optimizer.states": '`"device"` or `"host"`',
    "pipeline.plan": '`"auto"`, path or `"none"`',
    "pipeline.cluster": 'path, name or `"none"`',
    "sampling.prompts": "path or list of texts",
    "run.trackers": 'name, list of names or `"none"`',
}
"""Values of keys whose annotation says less than a validator of the section."""
SEE = {
    "model.path": "#models-in-one-file",
    "model.config": "#models-in-one-file",
    "model.train": "#models",
    "model.components": "#modelcomponentsname",
    "model.frozen_dtype": "#stored-weights",
    "model.class_embeddings": "#prototypes",
    "lora.target_modules": "#lora-1",
    "lora.start": "#lora-1",
    "lora.formats": "#files-of-adapters",
    "objective.self_conditioning": "#self-conditioning",
    "data.train": "#data-1",
    "data.sources": "#datasourcesname",
    "data.resolution": "#several-sizes",
    "data.aspects": "#several-sizes",
    "data.batching": "#micro-batches-by-tokens",
    "data.frames": "#clips",
    "data.caption_chunks": "#long-captions",
    "data.clip_skip": "#long-captions",
    "data.masks": "#holes",
    "data.loss_mask": "#masks-of-the-loss",
    "data.allow_growth": "#resuming-with-the-same-data",
    "data.on_error": "#data-1",
    "training.precision": "#defaults",
    "training.weights": "#trained-weights-in-bfloat16",
    "training.deterministic": "#equal-results",
    "training.post_validation": "#clipping-without-waiting",
    "training.on_spike": "#bad-steps",
    "training.noise_scale_every": "#which-batch",
    "training.ema_states": "#trained-weights-in-bfloat16",
    "training.activation_checkpointing": "#defaults",
    "optimizer.name": "#optimizers-of-other-packages",
    "optimizer.in_backward": "#updates-within-the-backward",
    "optimizer.groups": "#groups-by-patterns",
    "learning_rate.schedule": "#schedules-of-transformers",
    "learning_rate.by_staleness": "asynchronous.md#learning-rates-by-staleness",
    "pipeline.plan": "#layouts",
    "pipeline.schedule": "#automatic-layouts",
    "pipeline.orders": "orders.md",
    "pipeline.sharded": "#sharded-copies",
    "pipeline.fill": "#bubble-filling",
    "pipeline.encoders": "#a-cache-of-results",
    "pipeline.offload_frozen": "#encoders-in-host-memory",
    "pipeline.versions": "asynchronous.md",
    "pipeline.use": "#fewer-devices",
    "pipeline.replan": "#a-corrected-prediction",
    "sampling.prompts": "#prompts",
    "sampling.negative_prompt": "#guidance",
    "sampling.guidance": "#guidance",
    "checkpoint.asynchronous": "#asynchronous-checkpoints",
    "checkpoint.adapters": "#files-of-adapters",
    "run.trackers": "#trackers",
    "run.stuck_after": "#a-run-that-is-stuck",
}
"""The heading, or the page, that explains a key further."""
_TABLE = re.compile(r"(<!-- keys of \[([\w.]+)\] -->\n)(?:\|.*\n)*")
_SECTION = re.compile(r"(?<!`)\[([\w.]+)\]")
_AUTO = get_args(Auto)[1].func
_WORDS = {int: "whole number", float: "number", str: "text", Path: "path"}
_ENDLESS = 2**31
"""A bound that is as large as this is not worth a word."""


def document(page: str) -> str:
    """The page with a table after each of its marks, in place of the one that is there."""
    return _TABLE.sub(lambda mark: mark[1] + "".join(f"{row}\n" for row in rows(mark[2], page)), page)


def rows(table: str, page: str) -> Iterator[str]:
    """The lines of a table of keys, by its name in a recipe; the page has the headings that it links."""
    yield "| key | values | default | meaning |"
    yield "|---|---|---|---|"
    hints = get_type_hints(TABLES[table], include_extras=True)
    for key, field in TABLES[table].model_fields.items():
        name = f"{table}.{key}"
        values = VALUES.get(name) or _joined(list(_values(hints[key])))
        default = "`runs/<name of the file>`" if name == "run.folder" else _default(field, hints[key])
        meaning = _SECTION.sub(_with_link, " ".join((field.description or "").split()))
        if name in SEE:
            meaning += f" See {_link(SEE[name], page)}."
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in (f"`{key}`", values, default, meaning)) + " |"


def _values(hint: Any) -> Iterator[str]:
    """The values of an annotation, each in words or as TOML."""
    kind, arguments = get_origin(hint), get_args(hint)
    if kind is Annotated:
        yield from _annotated(*arguments)
    elif kind in (Union, UnionType):
        yield from dict.fromkeys(value for one in arguments if one is not NoneType for value in _values(one))
    elif kind is tuple:
        several = re.sub(r"\b(text|path|number)\b", r"\1s", _joined(list(_values(arguments[0]))))
        yield f"list of {several}" if arguments[-1] is ... else f"pair of {several}"
    elif kind is Literal:
        yield from (f'`"{word}"`' for word in arguments)
    elif kind is dict:
        yield "tables" if arguments[1] in TABLES.values() else "table"
    elif hint is bool:
        yield from ("`true`", "`false`")
    elif isinstance(hint, type) and issubclass(hint, Enum):
        yield from (f'`"{one.value}"`' for one in hint)
    else:
        yield _WORDS.get(hint, "table")


def _annotated(inner: Any, *extras: Any) -> Iterator[str]:
    """The values of an annotation whose extras are bounds, and functions that take further values."""
    functions = {getattr(extra, "func", None) for extra in extras}
    found = ["path"] if of_user in functions else list(_values(inner))
    if patterns_for_bool in functions:
        yield from _values(bool)
    if texts_for_text in functions:
        yield from (re.sub(r"\b(text|path)s\b", r"\1", value.removeprefix("list of ")) for value in found)
    yield from (value + _bounds(extras) for value in found)
    if NoneType in get_args(inner):
        yield '`"auto"`' if _AUTO in functions else '`"none"`'


def _bounds(extras: Collection[Any]) -> str:
    """The range of a number in words, by the bounds that pydantic checks."""
    limits = [limit for extra in extras if isinstance(extra, FieldInfo) for limit in extra.metadata]
    low, above = _bound(limits, "ge", "gt", max)
    high, below = _bound(limits, "le", "lt", min)
    if high is not None:
        return f" {'above' if above else 'from'} {low:,} to {'below ' if below else ''}{high:,}"
    return "" if low is None else f" {'>' if above else '≥'} {low:,}"


def _bound(
    limits: Collection[Any], closed: str, opened: str, narrowest: Callable[..., Any]
) -> tuple[float | None, bool]:
    """The narrowest of the bounds that have one of two attributes, and whether the range ends before it."""
    found = [
        (getattr(limit, name), name == opened) for limit in limits for name in (closed, opened) if hasattr(limit, name)
    ]
    bound: tuple[float | None, bool] = narrowest(
        (one for one in found if abs(one[0]) < _ENDLESS), default=(None, False)
    )
    return bound


def _default(field: FieldInfo, hint: Any) -> str:
    """The default of a key as TOML, or "required"."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    match value:
        case None:
            return list(_values(hint))[-1]
        case Section():
            return "its defaults"
        case bool():
            return f"`{value}`".lower()
        case str() | tuple():
            return f"`{json.dumps(value, ensure_ascii=False)}`"
        case _:
            return f"`{value}`"


def _joined(values: list[str]) -> str:
    """Values with commas between, and "or" before the last."""
    return ", ".join(values[:-1]) + " or " * (len(values) > 1) + values[-1]


def _with_link(section: re.Match[str]) -> str:
    """A section that a docstring names, with a link to its table."""
    return f"[{section[1]}](#{_slug(section[1])})" if section[1] in TABLES else section[0]


def _link(target: str, page: str) -> str:
    """A link to a heading, with its words; or to a page, with its title.

    Raises:
        ValueError: the page has no such heading.
    """
    file, _, anchor = target.partition("#")
    seen: Counter[str] = Counter()
    for heading in re.findall(r"^#+ (.*)$", (FILE.parent / file).read_text() if file else page, flags=re.MULTILINE):
        slug = _slug(heading)
        number, seen[slug] = seen[slug], seen[slug] + 1
        if anchor in ("", f"{slug}-{number}" if number else slug):
            return f"[{heading.strip('[]')}]({target})"
    raise ValueError(f"no heading {target}")


def _slug(heading: str) -> str:
    """The anchor that GitHub makes of a heading; a second one of the same words gets "-1"."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


if __name__ == "__main__":
    FILE.write_text(document(FILE.read_text(encoding="utf-8")), encoding="utf-8")
