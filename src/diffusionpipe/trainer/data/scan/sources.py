"""Several folders as one data set: the samples of one folder after the other, each as many times as it is repeated.

    [data.sources.owls]    30 pictures, repeats = 4     samples   0 ... 119    owls/a.png, owls/a.png, ...
    [data.sources.birds]   100 pictures                 samples 120 ... 219    birds/a.png, ...

A sample has the name of its source before its own. An epoch has every sample once. A picture of a source with
four repeats is four samples, each with draws of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from pathlib import Path
from statistics import median_low
from typing import Protocol

from diffusionpipe.trainer.data.decoding.images import Size
from diffusionpipe.trainer.data.scan.dataset import Dataset, Findings, Sample, SourcePart
from diffusionpipe.trainer.data.text.caption_rules import AS_THEY_ARE
from diffusionpipe.trainer.data.text.treatment import Treatment


class SourceKeys(Protocol):
    """The keys of a recipe for one source."""

    @property
    def repeats(self) -> int | None:
        """The number of times that an epoch has each sample of the source; None if it is not stated.

        If it is not stated, it is 1, or for regularisation the number that fits to the other sources.
        """

    @property
    def regularisation(self) -> bool:
        """Whether its pictures show the general kind of subject, so that training on the others does not change it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSource:
    """One source with the samples and findings of its scan, and its keys."""

    name: str
    dataset: Dataset
    findings: Findings
    repeats: int | None
    """The number of times that an epoch has each sample, as its keys state it; None if they do not."""
    regularisation: bool
    """Whether its pictures show the general kind of subject."""


def repeats_of(found: Sequence[FoundSource]) -> dict[str, int]:
    """The number of times that an epoch has each sample of a source, by the source's name.

    Regularisation sources without a stated number get one with which they have together about as many samples as all
    others.
    """
    counts = {one.name: len(one.dataset.samples) for one in found}
    fitted = [one.name for one in found if one.regularisation and one.repeats is None]
    repeats = {one.name: one.repeats or 1 for one in found}
    others = sum(counts[one.name] * repeats[one.name] for one in found if not one.regularisation)
    # Where none is fitted, the number is not used; a large set has each sample once all the same.
    number = max(1, round(others / max(1, sum(counts[name] for name in fitted))))
    return {name: number if name in fitted else own for name, own in repeats.items()}


def joined_of(
    scanned: Mapping[str, tuple[Dataset, Findings]], sources: Mapping[str, SourceKeys]
) -> tuple[Dataset, Findings]:
    """One data set of all sources that were scanned one by one, repeated as their keys say, and the joined findings."""
    return joined(
        [
            FoundSource(
                name=name,
                dataset=dataset,
                findings=findings,
                repeats=sources[name].repeats,
                regularisation=sources[name].regularisation,
            )
            for name, (dataset, findings) in scanned.items()
        ]
    )


def joined(found: Sequence[FoundSource]) -> tuple[Dataset, Findings]:
    """One data set of all sources, in their order, with repeated samples, and the joined findings."""
    repeats, contents = repeats_of(found), blake2b(digest_size=16)
    samples: list[Sample] = []
    sizes: list[Size | None] = []
    files: dict[str, str] = {}
    overlooked: list[str] = []
    for number, one in enumerate(found):
        own = tuple(replace(sample, name=f"{one.name}/{sample.name}", source=number) for sample in one.dataset.samples)
        for sample, size in zip(own, one.findings.sizes, strict=True):
            samples += [sample] * repeats[one.name]
            sizes += [size] * repeats[one.name]
        files |= {f"{one.name}/{name}": digest for name, digest in one.findings.files.items()}
        overlooked += [f"{one.dataset.folder}: {text}" for text in one.findings.overlooked]
        # Null bytes between, so that no other names and contents give the same text.
        contents.update(f"{one.name}\0{one.dataset.contents}\0".encode())
    rates = [one.dataset.rate for one in found if one.dataset.rate is not None]
    dataset = Dataset(
        folder=Path(),
        samples=tuple(samples),
        contents=contents.hexdigest()[:12],
        rate=median_low(rates) if rates else None,
        parts=tuple(
            replace(
                one.dataset.parts[0]
                if one.dataset.parts
                else SourcePart(name="", folder=one.dataset.folder, count=0, repeats=1),
                name=one.name,
                count=len(one.dataset.samples),
                repeats=repeats[one.name],
            )
            for one in found
        ),
    )
    findings = Findings(noun=found[0].findings.noun, sizes=tuple(sizes), files=files, overlooked=tuple(overlooked))
    return dataset, findings


def identity_of_sources(repeats: Mapping[str, int], treatments: Mapping[str, Treatment]) -> dict[str, object]:
    """A text of the facts of each source that must not change in a run, by the source's name.

    The facts are repeats, weight and mask of the loss, sizes and rules of captions.
    """
    return {name: ", ".join(_facts(number, treatments[name])) for name, number in repeats.items()}


def _facts(repeats: int, treatment: Treatment) -> Iterator[str]:
    yield f"{repeats} times"
    if treatment.loss_weight != 1:
        yield f"loss_weight {treatment.loss_weight:g}"
    if treatment.loss_mask is not None:
        yield f"loss_mask {treatment.loss_mask}"
    if treatment.resolution:
        yield f"resolution {' and '.join(map(str, treatment.resolution))}"
    for field in fields(treatment.captions):
        value = getattr(treatment.captions, field.name)
        if value != getattr(AS_THEY_ARE, field.name):
            yield f"captions.{field.name} {value}"
