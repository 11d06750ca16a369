"""The facts about the data of a run, in plain words: rank 0 prints them once, before anything long and before step 1.

pictures    10,000 in data/birds, of 120 x 90 to 4,000 x 3,000 pixels (median 1,024 x 768)
epochs      12.8 (2,000 steps of 64)
enlarged    3 by more than 2 to 512 x 512, the most birds/7.jpg, 120 x 90 pixels, by 5.7
cut away    21 % of the pixels, the most of pano.jpg, 4,000 x 900 pixels, 77 %
captions    of 4 to 262 tokens (median 19); text_encoder reads up to 77
            12 are longer than the 77 tokens that text_encoder reads, the longest of birds/9.jpg, 262 tokens
            2 are empty, e.g. birds/8.jpg
overlooked  31 of @eaDir: names that machines make
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

from diffusionpipe.ir.data_survey import Line, Survey, TrainedSize
from diffusionpipe.ir.size import Clip
from diffusionpipe.ir.words import counted
from diffusionpipe.trainer.data.decoding.images import Size
from diffusionpipe.trainer.data.order import next_epoch, place_of
from diffusionpipe.trainer.data.scan.dataset import Dataset, Findings
from diffusionpipe.trainer.data.sizes.lines import lines_of_sizes
from diffusionpipe.trainer.data.sizes.sizes import Assignment, cut_away, enlargement
from diffusionpipe.trainer.data.text.caption_lengths import (
    MOST,
    CountedCaptions,
    Cut,
    EncoderReading,
    Lengths,
    chunks_in_use,
    counted_captions,
    cut_captions,
)
from diffusionpipe.trainer.data.text.caption_rules import has_stray_braces, plain_text, texts_of
from diffusionpipe.trainer.data.text.treatment import PLAIN, Treatment

ENLARGED = 2.0
"""The factor of enlargement above which a picture counts as enlarged."""
_LONGEST_NAME = 60
"""The largest number of characters of a name or a text that a line shows."""


class Folder(NamedTuple):
    """The samples of training or validation data, and the findings of their scan."""

    dataset: Dataset
    findings: Findings


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleUse:
    """The settings by which a run uses its samples: steps, batch, size, rules of captions, text encoders, prompts."""

    steps: int | None
    """The number of steps of the whole run; None if it is not known."""
    batch: int
    """The number of samples of one step."""
    epochs: float
    """The number of epochs of the whole run."""
    size: Size
    """The width and height to which each picture is brought."""
    from_step: int = 0
    """The number of steps that are done already."""
    treatments: Sequence[Treatment] = (PLAIN,)
    """The rules for captions, weights and sizes of each source of training samples."""
    readings: Sequence[EncoderReading] | None
    """The text encoders that read captions; () if the model reads none; None if no model is known: then words are
    counted."""
    more_chunks: bool = False
    """Whether data.caption_chunks may be larger."""
    prompts: Sequence[str] = ()
    """The texts from which the run draws samples."""
    sizes: Assignment | None = None
    """The sizes at which training pictures are trained; None where all have `size`."""
    same_size: int = 1
    """With `sizes`: the number of samples in a row that have one size."""


class _Captions(NamedTuple):
    """The captions of a folder, each with its longest alternatives."""

    places: list[int]
    """The index of each caption's sample in the dataset."""
    texts: list[str]
    """The captions."""


class _Brought(NamedTuple):
    """A picture as it is brought to the size of training."""

    place: int
    """The index of its sample in the dataset."""
    size: Size
    """The width and height of its file."""
    scale: float
    """The factor by which it is enlarged."""
    cut: float
    """The part of the picture that is cut away, from 0 to 1."""


def kept_survey(train: Folder, held_out: Folder | None, use: SampleUse) -> Survey:
    """The facts about the data that survey.json keeps.

    `held_out`: the validation data; None without any.

    They are the lines that are printed, the lengths of captions in words, and the sizes of training.
    """
    captions = _longest_texts(train.dataset, use.treatments)
    texts = captions.texts if use.readings else []
    return Survey(
        lines=_lines(train, held_out, use, captions),
        further=tuple(_words(train, "captions", texts)) if use.readings is not None else (),  # else they are in `lines`
        sizes=tuple(_trained_sizes(train, use)),
    )


def _trained_sizes(train: Folder, use: SampleUse) -> Iterator[TrainedSize]:
    """Yields each size of training with the number of its samples and how far they are cut and enlarged."""
    if use.sizes is not None:
        for share in use.sizes.shares:
            yield TrainedSize(
                size=_of_size((share.size.width, share.size.height)),
                samples=share.pictures,
                visits=share.visits,
                cut=share.cut,
                enlarged=share.enlarged,
            )
        return
    known = list(_brought(train, use))
    yield TrainedSize(
        size=_of_size(use.size),
        samples=len({sample.name for sample in train.dataset.samples}),
        visits=len(train.dataset.samples),
        cut=sum(one.cut for one in known) / len(known) if known else None,
        enlarged=max(one.scale for one in known) if known else None,
    )


def _brought(train: Folder, use: SampleUse) -> Iterator[_Brought]:
    """Yields each picture whose size is known, as it is brought to the one size of training."""
    wanted = Clip(width=use.size[0], height=use.size[1])
    for place, size in enumerate(train.findings.sizes):
        if size is not None:
            yield _Brought(place, size, enlargement(size, wanted), cut_away(size, wanted))


def survey(train: Folder, held_out: Folder | None, use: SampleUse) -> tuple[Line, ...]:
    """The facts about the data as lines for the screen, each a name and a text; warnings are marked."""
    return _lines(train, held_out, use, _longest_texts(train.dataset, use.treatments))


def _lines(train: Folder, held_out: Folder | None, use: SampleUse, captions: _Captions) -> tuple[Line, ...]:
    """The facts about the data as lines for the screen.

    `captions`: the training captions.
    """
    others = _longest_texts(held_out.dataset, use.treatments) if held_out is not None else None
    lines = [*_counts(train, held_out, use), *(_pixels(train, use) if use.sizes is None else _sizes(train, use))]
    lines += _captions(train, "captions", use, captions)
    if held_out is not None and others is not None:
        lines += _captions(held_out, "validation", use, others)
    lines += [*_braces(train, use), *_unused_chunks([*captions.texts, *(others.texts if others else ())], use)]
    lines += [
        Line(
            name="prompts", text=f"{_are_longer(cut)}, the longest {_quoted(use.prompts[cut.longest])}", is_warning=True
        )
        for cut in cut_captions(use.prompts, use.readings or ())
    ]
    for folder in (train, *([held_out] if held_out is not None else [])):
        where = "" if folder is train else f"{folder.dataset.where}: "
        lines += [Line(name="overlooked", text=where + text) for text in folder.findings.overlooked]
    return tuple(lines)


def _counts(train: Folder, held_out: Folder | None, use: SampleUse) -> Iterator[Line]:
    number, noun = len(train.dataset.samples), train.findings.noun
    parts = train.dataset.parts
    text = f"{sum(part.count for part in parts) or number:,} in {train.dataset.where}"
    sizes = [size for size in train.findings.sizes if size is not None]
    if sizes:
        ranked = sorted(sizes, key=lambda size: size[0] * size[1])
        text += f", of {_of_size(ranked[0])}"
        if ranked[0] != ranked[-1]:
            text += f" to {_of_size(ranked[-1])} (median {_of_size(ranked[len(ranked) // 2])})"
        text += " pixels"
    yield Line(name=noun, text=text)
    for place, part in enumerate(parts):
        if not part.name:  # the only folder, which the first line names
            continue
        own = f"{part.count:,} in {part.folder}" + (f", each {part.repeats:,} times" if part.repeats > 1 else "")
        own += f": {_percent(part.count * part.repeats / number)} of an epoch"
        resolution = use.treatments[place].resolution
        own += f", resolution {' and '.join(map(str, resolution))}" if resolution else ""
        yield Line(name=part.name, text=own)
    if held_out is not None:
        yield Line(name="validation", text=f"{len(held_out.dataset.samples):,} in {held_out.dataset.where}")
    if use.steps is None:
        return
    yield Line(name="epochs", text=f"{use.epochs:,.3g} ({counted(use.steps, 'steps')} of {use.batch:,})")
    for since, count in train.dataset.growth:
        if since >= use.from_step * use.batch:
            yield Line(name="growth", text=_growing(train, since, count, use))
    if use.batch > number:
        text = f"training.batch is {use.batch:,}, larger than the data set of {counted(number, noun)}"
        more = f"each is up to {-(-use.batch // number):,} times in one batch; use a smaller batch, or more {noun}"
        yield Line(name="batch", text=f"{text}: {more}", is_warning=True)


def _growing(train: Folder, since: int, count: int, use: SampleUse) -> str:
    """A text on the epoch and the step in which new samples enter.

    `since`: the position in the order of the data from which on they count. `count`: their number.
    """
    number, growth = len(train.dataset.samples), train.dataset.growth
    start = next_epoch(since, number, growth)
    epoch, step = place_of(start, number, growth).epoch + 1, start // use.batch + 1
    new = counted(count, f"new {train.findings.noun}")
    return f"{new} from epoch {epoch:,} on, in step {step:,}; the running epoch keeps its order"


def _pixels(train: Folder, use: SampleUse) -> Iterator[Line]:
    """Yields lines on the number of enlarged pictures, and on the part of the pixels that is cut away."""
    known = list(_brought(train, use))
    if not known:
        return

    def named(one: _Brought) -> str:
        return f"{_name(train.dataset, one.place)}, {_of_size(one.size)} pixels"

    if many := sum(one.scale > ENLARGED for one in known):
        worst = max(known, key=lambda one: one.scale)
        most = f"the most {named(worst)}, by {worst.scale:.3g}"
        text = f"{many:,} by more than {ENLARGED:g} to {_of_size(use.size)}, {most}"
        yield Line(name="enlarged", text=text, is_warning=True)
    text = f"{_percent(sum(one.cut for one in known) / len(known))} of the pixels"
    worst = max(known, key=lambda one: one.cut)
    if worst.cut >= 0.005:  # rounds to 1 %
        text += f", the most of {named(worst)}: {_percent(worst.cut)}"
    yield Line(name="cut away", text=text)


def _sizes(train: Folder, use: SampleUse) -> Iterator[Line]:
    """Yields lines on the sizes at which pictures are trained, and on pictures whose size does not suit them."""
    assert use.sizes is not None, "it is asked where there are sizes"
    names = [sample.name for sample in train.dataset.samples]
    for name, text, is_warning in lines_of_sizes(use.sizes, names, use.same_size):
        yield Line(name=name, text=text, is_warning=is_warning)


def _captions(folder: Folder, name: str, use: SampleUse, found: _Captions) -> Iterator[Line]:
    """Yields lines on the lengths of captions, on captions that an encoder does not read in full, and on empty ones.

    `name`: the name of the lines, "captions" or "validation".
    """
    places, texts = found
    if use.readings is None:
        yield from _words(folder, name, texts)
        return
    if not use.readings:
        return
    noun = "" if name == "captions" else "captions "
    counted_by = counted_captions(texts, use.readings)
    if not noun:
        yield from (Line(name=name, text=text) for text in _in_tokens(counted_by, len(texts)))
    for cut in (one.cut for one in counted_by if one.cut is not None):
        drawn = f" (of {MOST:,} that were drawn and counted)" if cut.looked_at < len(texts) else ""
        longest = f"the longest of {_name(folder.dataset, places[cut.longest])}, {cut.tokens:,} tokens"
        longest += "; a larger data.caption_chunks reads more" if use.more_chunks else ""
        yield Line(name=name, text=f"{noun}{_are_longer(cut)}{drawn}, {longest}", is_warning=True)
    empty = list(dict.fromkeys(place for place, text in zip(places, texts, strict=True) if not text.strip()))
    if empty:
        text = f"{noun}{counted(len(empty), 'are')} empty, e.g. {_name(folder.dataset, empty[0])}"
        yield Line(name=name, text=text, is_warning=True)
    without = [sample.name for sample in folder.dataset.samples if not sample.captions]
    if without:  # a run refuses them
        text = f"{counted(len(set(without)), f'{folder.findings.noun} have')} none, e.g. {without[0]}"
        yield Line(name=name, text=noun + text, is_warning=True)


def _in_tokens(counted_by: Sequence[CountedCaptions], number: int) -> Iterator[str]:
    """Yields a text on the lengths of `number` captions in tokens; encoders that count and read alike share one."""
    alike: dict[tuple[Lengths, int, int], list[str]] = {}
    for one in counted_by:
        if one.lengths is not None:
            alike.setdefault((one.lengths, one.limit, one.looked_at), []).append(one.encoder)
    for (lengths, limit, looked_at), encoders in alike.items():
        text = f"of {lengths.least:,} to {lengths.most:,} tokens (median {lengths.median:,})"
        text = f"of {lengths.most:,} tokens" if lengths.least == lengths.most else text
        text += f", of {looked_at:,} that were drawn and counted" if looked_at < number else ""
        yield f"{text}; {' and '.join(encoders)} {'reads' if len(encoders) == 1 else 'read'} up to {limit:,}"


def _braces(train: Folder, use: SampleUse) -> Iterator[Line]:
    """Yields a warning if captions have a brace outside of alternatives."""
    found: dict[str, str] = {}
    for sample in train.dataset.samples:
        rules = use.treatments[sample.source].captions
        for text in sample.captions if rules.alternatives and sample.name not in found else ():
            if has_stray_braces(text, rules):
                found[sample.name] = text
    if found:
        first, text = next(iter(found.items()))
        said = f"{counted(len(found), f'{train.findings.noun} have')} braces outside of alternatives, e.g. {first}"
        said += f": {_quoted(text)}; they are read as they are, and {{{{ and }}}} stand for braces"
        yield Line(name="captions", text=said, is_warning=True)


def _words(folder: Folder, name: str, texts: Sequence[str]) -> Iterator[Line]:
    """Yields lines on the lengths of captions in words, on labels, and on pictures without captions.

    `name`: the name of the lines. `texts`: the captions.
    """
    samples = folder.dataset.samples
    unlike = {sample.name: sample for sample in samples}.values()  # each picture once, whatever its repeats
    without = [sample for sample in unlike if not any(text.strip() for text in sample.captions)]
    lengths = sorted(len(text.split()) for text in texts if text.strip())
    if lengths:
        several = sum(len(sample.captions) > 1 for sample in unlike)
        text = f"of {lengths[0]:,} to {lengths[-1]:,} words (median {median_low(lengths):,})"
        text += f", {len({text for text in texts if text.strip()}):,} different"
        text += f"; {counted(several, f'{folder.findings.noun} have')} several" if several else ""
        yield Line(name=name, text=text)
    labels = Counter(sample.label for sample in unlike if sample.label is not None)
    if labels:
        least, most = min(labels.values()), max(labels.values())
        text = f"{counted(len(labels), 'classes')} of {least:,} to {most:,} {folder.findings.noun}"
        yield Line(name="labels", text=text)
    if without and (lengths or not labels):
        text = f"{counted(len(without), f'{folder.findings.noun} have')} none, e.g. {without[0].name}"
        yield Line(name=name, text=text, is_warning=True)


def _longest_texts(dataset: Dataset, treatments: Sequence[Treatment]) -> _Captions:
    """The captions of all samples as training reads them, with the longest of each pair of alternatives."""
    places, texts = list[int](), list[str]()
    for place, sample in enumerate(dataset.samples):
        rules = treatments[sample.source].captions
        for text in texts_of(sample.captions, rules):
            places.append(place)
            # By letters: tokens would have to be counted for each combination.
            texts.append(plain_text(text, rules, lambda parts: max(parts, key=len)))
    return _Captions(places, texts)


def _unused_chunks(texts: Sequence[str], use: SampleUse) -> Iterator[Line]:
    """Yields a warning if captions are read in more chunks than any text fills."""
    asked = max((reading.chunks for reading in use.readings or ()), default=1)
    if asked == 1 or use.readings is None:
        return
    needed = chunks_in_use([*texts, *use.prompts], use.readings)
    if needed < asked:
        text = f"fit into {counted(needed, 'chunks')}; data.caption_chunks = {needed} is faster than {asked}"
        yield Line(name="captions", text=text, is_warning=True)


def _are_longer(cut: Cut) -> str:
    return f"{counted(cut.number, 'are')} longer than the {cut.limit:,} tokens that {cut.encoder} reads"


def _quoted(text: str) -> str:
    return f'"{text[:_LONGEST_NAME]}{"..." if len(text) > _LONGEST_NAME else ""}"'


def _name(dataset: Dataset, place: int) -> str:
    """The name of the sample with this index, shortened to its end if it is long."""
    name = dataset.samples[place].name
    return name if len(name) <= _LONGEST_NAME else f"...{name[-_LONGEST_NAME:]}"


def _of_size(size: Size) -> str:
    return f"{size[0]:,} x {size[1]:,}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def cut_prompts(texts: Sequence[str], readings: Sequence[EncoderReading], *, remedy: str = "") -> list[str]:
    """A sentence for each text encoder that does not read the end of some text.

    `remedy`: advice at the end of each sentence; "" for none.
    """
    return [
        f"{counted(cut.number, 'prompts are')} longer than the {cut.limit:,} tokens that {cut.encoder} reads, so the "
        f"rest has no effect: the longest, {_quoted(texts[cut.longest])}, has {cut.tokens:,}"
        + (f"; {remedy}" if remedy else "")
        for cut in cut_captions(texts, readings)
    ]
