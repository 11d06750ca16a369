"""Checks that a data set has the descriptions that a model reads: each function returns sentences, [] if it has."""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from diffusionpipe.ir.words import counted
from diffusionpipe.trainer.data.scan.captions import METADATA
from diffusionpipe.trainer.data.scan.dataset import Dataset
from diffusionpipe.trainer.data.text.caption_rules import AS_THEY_ARE, CaptionRules


def problems_of_captions(dataset: Dataset) -> list[str]:
    """A sentence on pictures without a caption, for a model that reads labels and captions; [] if all have one."""
    without = [sample.name for sample in dataset.samples if sample.text is None]
    if not without:
        return []
    examples = f"{counted(len(without), 'pictures have no caption')}, e.g. {without[0]}"
    return [f"{dataset.where}: {examples}; the models need labels and captions"]


def problems_of_rules(rules: Iterable[CaptionRules]) -> list[str]:
    """A sentence that the rules of captions have no effect, for a model that reads none; [] if all are the default."""
    return (
        []
        if all(one == AS_THEY_ARE for one in rules)
        else ["data.captions: the model reads no captions; remove the section"]
    )


def problems_of_encoders(rules: Iterable[CaptionRules], known: AbstractSet[str]) -> list[str]:
    """A sentence for each text encoder in the rules that is not in `known`, the model's encoders; [] if all are."""
    return [
        f"data.captions.dropout: the model has no text encoder {name!r}; use {' or '.join(sorted(known))}"
        for name in dict.fromkeys(name for one in rules for name, _ in one.encoder_dropout)
        if name not in known
    ]


def problems_of_conditions(dataset: Dataset) -> list[str]:
    """A sentence on samples without a conditioning picture, for a model that reads them; [] if all have one."""
    without = [sample.name for sample in dataset.samples if sample.condition is None]
    if not without:
        return []
    problem = (
        f'{dataset.where}: {counted(len(without), "pictures have no")} "conditioning_image" in {METADATA}, '
        f"e.g. {without[0]}; the model needs one for each picture"
    )
    return [problem]


def problems_of_labels(dataset: Dataset, null_label: int | None) -> list[str]:
    """A sentence on samples without a label below `null_label`, which is the number of classes; [] if all have one."""
    if null_label is None:
        return ["the model reads labels, but its null label is not given"]
    bad = [sample for sample in dataset.samples if sample.label is None or sample.label >= null_label]
    if not bad:
        return []
    problem = (
        f"{dataset.where}: {counted(len(bad), 'pictures have no label')} below {null_label}, the model's number of "
        f"classes, e.g. {bad[0].name} has {bad[0].label}"
    )
    return [problem]
