"""A folder of pictures or clips with captions or labels, checked as a whole before anything else starts.

The layout is the same as Hugging Face's `imagefolder` and `videofolder`: files in the folder or in folders below it,
described by metadata.jsonl or metadata.csv files, or by .txt files beside them (see `captions`). Names that start with
a dot are left out.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from pathlib import Path
from statistics import median_low
from typing import Any

from diffusionpipe.errors import DataError
from diffusionpipe.ir.words import counted
from diffusionpipe.trainer.data.content import Content, SampleTable, TableCell, TarMember
from diffusionpipe.trainer.data.decoding.clips import ENDINGS as CLIP_ENDINGS
from diffusionpipe.trainer.data.decoding.clips import FrameSelection, check_decoder, clip_header, is_clip
from diffusionpipe.trainer.data.decoding.images import Header, Size, fingerprint, read_header
from diffusionpipe.trainer.data.order import Growth
from diffusionpipe.trainer.data.scan.captions import LISTS, METADATA, Description
from diffusionpipe.trainer.data.scan.descriptions import (
    FolderDescriptions,
    described_pictures,
    read_known,
    unread_tables,
)
from diffusionpipe.trainer.data.scan.listing import Listing, endings_of, list_files
from diffusionpipe.trainer.data.scan.skipped import FILE as SKIPPED
from diffusionpipe.trainer.data.scan.skipped import Skipping

logger = logging.getLogger(__name__)

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
UNREAD = (".tif", ".tiff", ".avif", ".heic", ".jxl")
"""The endings of pictures of other kinds: an error names such files, as it names clips among pictures, or the reverse.
"""
NUM_EXAMPLES = 10
"""The largest number of pictures that an error names for each problem."""
NUM_SHOWN = 3
"""The largest number of pictures that a warning names."""
PROGRESS_EVERY = 100
"""The number of pictures between two reports of progress."""

_MOST_ENDINGS = 5
_READ = f"{METADATA}, metadata.csv and {LISTS}"
_ON_ERROR = ' (repair or remove them; data.on_error = "skip" leaves out up to data.max_skipped of them)'

Progress = Callable[[int, int], None]


class Condition(StrEnum):
    """The description that every picture must have for a model: a caption, a label, or none."""

    TEXT = "text"
    LABEL = "label"
    NOTHING = "nothing"
    """Nothing is needed; captions and labels are read where they exist, for a report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A picture or clip by name, with its captions, label and conditioning picture, and the place of its bytes."""

    name: str
    """The path below the folder, with "/"."""
    text: str | None = None
    """The first caption; None without any."""
    others: tuple[str, ...] = ()
    """The further captions."""
    label: int | None = None
    """The number of its class; None without any."""
    condition: str | None = None
    """The path of its conditioning picture below the folder; None without any."""
    source: int = 0
    """The index of its source; 0 where the data are one folder."""
    place: tuple[int, ...] = ()
    """The place of a picture that is not a file of its own: (shard, first byte, number of bytes) or (row of a table,).
    """
    size: tuple[int, ...] = ()
    """Width and height of the picture as it is seen; () where all samples are trained at one size."""
    frames: int = 1
    """The largest number of frames that can be taken of a clip; 1 for a picture."""

    @property
    def captions(self) -> tuple[str, ...]:
        """All captions, the first one and then the further ones; () without any."""
        return () if self.text is None else (self.text, *self.others)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePart:
    """One source of a data set: its name, folder, number of samples, and their repeats in an epoch."""

    name: str
    """The name of the source; "" where there is only one."""
    folder: Path
    """The folder of its files."""
    count: int
    """The number of its different samples."""
    repeats: int
    """The number of times that an epoch has each of them."""
    files: tuple[str, ...] = ()
    """The paths of its shards, or of its table's files; () where samples are files of their own."""
    split: str = ""
    """The name of the table's split that is read; "" for other sources."""
    image: str = ""
    """The table's column of pictures; "" for other sources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """All samples of a folder, or of several sources, in their order."""

    folder: Path
    """The folder; it has no meaning where there are several sources."""
    samples: tuple[Sample, ...]
    """The samples, sorted by name; samples that enter later come after the others."""
    contents: str = ""
    """A fingerprint of all picture files, conditioning pictures too; "" where they were not opened."""
    rate: float | None = None
    """The median of the clips' frames per second, by their own rates; None for pictures."""
    growth: Growth = ()
    """The positions from which on the last samples count, and their numbers; () where all count from the start."""
    parts: tuple[SourcePart, ...] = ()
    """The sources, by `Sample.source`; () where there is one folder. Names of samples begin with their source's."""

    def path(self, index: int) -> Content:
        """The path of the file of sample `index`, or the place of its bytes in a tar file or a table."""
        sample = self.samples[index]
        if not sample.place:
            return self._folder_of(index) / self.own_name(index)
        part = self.parts[sample.source]
        if len(sample.place) == 1:
            return TableCell(SampleTable(part.files, part.split, part.image), sample.place[0])
        shard, start, size = sample.place
        return TarMember(Path(part.files[shard]), start, size, self.own_name(index).rpartition(".tar/")[2])

    def condition_path(self, index: int) -> Path:
        """The path of the conditioning picture of sample `index`; its folder where it has none."""
        return self._folder_of(index) / (self.samples[index].condition or "")

    def own_name(self, index: int) -> str:
        """The path of sample `index` below its own folder, with "/", without the name of its source."""
        sample = self.samples[index]
        prefix = f"{self.parts[sample.source].name}/" if self.parts else ""
        # A single table is a part without a name.
        return sample.name.removeprefix(prefix) if len(prefix) > 1 else sample.name

    @property
    def where(self) -> str:
        """The paths of the data's folders with commas between them, for messages."""
        return ", ".join(str(part.folder) for part in self.parts) or str(self.folder)

    def _folder_of(self, index: int) -> Path:
        return self.parts[self.samples[index].source].folder if self.parts else self.folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Further results of a scan: sizes of the samples, digests of the files, sentences on files that are not used."""

    noun: str
    """The kind of the samples in the plural, e.g. "pictures"."""
    sizes: tuple[Size | None, ...]
    """Width and height of each sample as it is seen; None where it is not known."""
    files: dict[str, str]
    """A digest of each picture and its description, by the picture's name; conditioning pictures too."""
    overlooked: tuple[str, ...]
    """Sentences on files that are not used, with their number and the reason, one for each kind of files."""


_NEEDED = {
    Condition.TEXT: f'without a caption; give them a "text" in {METADATA} or a .txt file with the same name',
    Condition.LABEL: f'without a class; give them a "label" in {METADATA}',
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """The kind of files that are read as samples from a folder."""

    noun: str
    """The name of this kind of files in the plural, e.g. "pictures"."""
    endings: tuple[str, ...]
    """The endings of its files."""
    others: tuple[str, ...]
    """The endings of files that are not read, though a user could mean them."""
    header_of: Callable[[Path], Header]
    """A function that reads the header of such a file."""
    remedy: str
    """The advice about files with other endings."""


_PICTURES = _Kind(
    noun="pictures",
    endings=ENDINGS,
    others=(*UNREAD, *CLIP_ENDINGS),
    header_of=read_header,
    remedy="convert them, e.g. to .png; clips are read with data.frames",
)


def _clips(taken: FrameSelection) -> _Kind:
    def header_of(path: Path) -> Header:
        return clip_header(path, taken) if is_clip(path) else read_header(path)

    if taken.beside_pictures:
        return _Kind(
            noun="clips and pictures",
            endings=(*CLIP_ENDINGS, *ENDINGS),
            others=UNREAD,
            header_of=header_of,
            remedy="convert them, e.g. to .png or .mp4",
        )
    return _Kind(
        noun="clips",
        endings=CLIP_ENDINGS,
        others=(*UNREAD, *ENDINGS),
        header_of=header_of,
        remedy="with data.frames clips are read alone; remove it to train on pictures",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanRules:
    """The rules of a scan: the pictures that are left out, and whether problems are errors."""

    apart: Path | None = None
    """A folder whose pictures are left out if it lies in the scanned one, e.g. the folder of validation data."""
    may_skip: bool = False
    """Whether pictures of this folder may be left out if data.on_error says so: True for training data."""
    reports: bool = False
    """Whether problems are named among the overlooked files and their pictures left out; else they are errors."""
    prefix: str = ""
    """A text before the names of pictures that are left out: the name of a source and "/"."""
    skipping: Skipping | None = None
    """The list to which pictures that cannot be read are added, which are then left out; None: they are errors."""


STRICT = ScanRules()


def scan(
    folder: Path | str,
    need: Condition | str,
    *,
    taken: FrameSelection | None = None,
    check_headers: bool = True,
    progress: Progress | None = None,
    rules: ScanRules = STRICT,
) -> Dataset:
    """The samples of a folder; every picture is opened and its header checked.

    It is the first result of `examine`, which has the same arguments.

    Raises:
        DataError: there are no pictures, or pictures, captions or metadata cannot be used.
    """
    return examine(folder, need, taken=taken, check_headers=check_headers, progress=progress, rules=rules)[0]


def examine(
    folder: Path | str,
    need: Condition | str,
    *,
    taken: FrameSelection | None = None,
    check_headers: bool = True,
    progress: Progress | None = None,
    rules: ScanRules = STRICT,
) -> tuple[Dataset, Findings]:
    """The samples of a folder, and further findings; every picture is opened and its header checked.

    Without `check_headers` none is opened. `need`: the description that each sample must have. `taken`: the frames that
    are taken of each clip; None for a folder of pictures. `progress` is called with the number of files checked and the
    number of all files.

    Raises:
        DataError: there are no pictures, or pictures, captions or metadata cannot be used; every kind of problem is
            listed, each with its first examples.
        ConfigError: clips are read, and PyAV is missing.
    """
    folder, need = Path(folder), Condition(need)
    kind = _PICTURES if taken is None else _clips(taken)
    listing = _listed(folder, kind, rules)
    known = read_known(folder, listing)
    descriptions = known.descriptions
    steered = {name: about.condition for name, about in descriptions.items() if about.condition is not None}
    conditions = set(steered.values())
    # One that steers and is steered itself is a sample: a model may be given the picture itself, or the one before it.
    pictures = [name for name in listing.read if name in steered or name not in conditions]
    # Pictures that steer may lie in validation's folder.
    found = {*listing.read, *conditions.intersection(listing.apart)}
    headers = (
        headers_of(folder, {name: folder / name for name in sorted(found)}, progress, kind.header_of)
        if check_headers
        else Headers(problems={}, sizes={}, rates={}, frames={}, digests={}, contents="")
    )
    described, sidecar_problems = described_pictures(folder, pictures, known, need_text=need is not Condition.LABEL)
    absent = f"that do not exist (or have another ending than {' '.join(kind.endings)})"
    unreadable = headers.problems
    if rules.reports:
        pictures = [name for name in pictures if name not in unreadable and steered.get(name) not in unreadable]
    if rules.skipping is not None and unreadable:
        rules.skipping.leave_out({rules.prefix + name: why for name, why in unreadable.items()})
        pictures = [name for name in pictures if name not in unreadable and steered.get(name) not in unreadable]
        logger.warning('data=%s left_out=%d reason="they cannot be read" list=%s', folder, len(unreadable), SKIPPED)
        unreadable = {}
    missing = sorted({*descriptions, *known.lists, *conditions}.difference(found, listing.apart))
    missing[:NUM_EXAMPLES] = map(known.names.explain, missing[:NUM_EXAMPLES])  # of a million only those that are shown
    problems = {
        "lines of metadata that cannot be used": known.problems,
        f"{kind.noun} named in metadata {absent}": missing,
        "captions that cannot be read": sidecar_problems,
        f"{kind.noun} {_NEEDED.get(need, '')}{unread_tables(listing)}": [  # `need` is the name of the field too
            name for name in pictures if need in _NEEDED and getattr(described[name], need) is None
        ],
        f"{kind.noun} that cannot be {'read' if taken is None else 'used'}{_ON_ERROR if rules.may_skip else ''}": [
            f"{name}: {reason}" for name, reason in unreadable.items()
        ],
    }
    reported = [f"{counted(len(names), what)}, e.g. {names[0]}" for what, names in problems.items() if names]
    if not rules.reports:
        raise_all(folder, problems)
    if not pictures:
        raise DataError(f"{folder}: none of its {kind.noun} can be read; repair them")
    rates = [headers.rates[name] for name in pictures if name in headers.rates]
    dataset = Dataset(
        folder=folder,
        samples=tuple(_sample(name, described[name], headers.frames.get(name, 1)) for name in pictures),
        contents=headers.contents,
        rate=median_low(rates) if rates else None,
    )
    left_out = (
        reported
        if rules.reports
        else [f"{counted(len(headers.problems), kind.noun)} that cannot be read ({SKIPPED} lists them)"]
    )
    findings = Findings(
        noun=kind.noun,
        sizes=tuple(headers.sizes.get(name) for name in pictures),
        files={name: digest_of(digest, described.get(name)) for name, digest in headers.digests.items()},
        overlooked=(
            *(left_out if headers.problems or rules.reports else ()),
            *_overlooked(listing, known, kind, rules),
        ),
    )
    return dataset, findings


def _listed(folder: Path, kind: _Kind, rules: ScanRules) -> Listing:
    """The names of the folder's files by their use.

    Raises:
        DataError: there is no such folder, or it has no files of this kind.
        ConfigError: clips are read, and PyAV is missing.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; give a folder of {kind.noun} with {METADATA} or .txt files")
    if kind is not _PICTURES:
        check_decoder()
    listing = list_files(folder, kind.endings, kind.others, rules.apart)
    unread, apart = listing.unread, len(listing.apart)
    if not listing.read:
        others = f"; {counted(len(unread), 'files end in')} {endings_of(unread)}, not read" if unread else ""
        others += f"; {counted(apart, kind.noun + ' are used apart')}, in {rules.apart}" if apart else ""
        why = f" ({kind.remedy})" if unread else ""
        raise DataError(
            f"{folder}: holds no {kind.noun}; expected files ending in {', '.join(kind.endings)}{others}{why}"
        )
    return listing


def digest_of(contents: bytes, about: Description | None) -> str:
    """A digest, 16 hexadecimal digits, of a picture's file and its description.

    `contents`: the fingerprint of the file. `about`: the description; None without any.
    """
    # Only where there are others, so that digests of pictures with one caption stay as in older runs.
    more = () if about is None or not about.others else (about.others,)
    said = "" if about is None else repr((about.text, about.label, about.condition, *more))
    return blake2b(contents + said.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


def _overlooked(listing: Listing, known: FolderDescriptions, kind: _Kind, rules: ScanRules) -> Iterator[str]:
    """Yields a sentence on each kind of files that are not used, with the number of files and the reason."""
    if listing.unread:
        yield f"{counted(len(listing.unread), 'files end in')} {endings_of(listing.unread)}: {kind.remedy}"
    if listing.apart:
        yield f"{counted(len(listing.apart), f'{kind.noun} are')} in {rules.apart}, which is used apart"
    if listing.tables:
        files = counted(len(listing.tables), "files could")
        yield f"{files} hold captions, e.g. {listing.tables[0]}: only {_READ} are read"
    if lone := known.lone_sidecars:
        yield f"{counted(len(lone), f'captions have no {kind.noun}')} of the same name, e.g. {lone[0]}"
    if listing.dead:
        yield f"{counted(len(listing.dead), 'links point')} nowhere, e.g. {listing.dead[0]}"
    if listing.overlooked:
        yield f"{', '.join(listing.overlooked)}: names that machines make"
    if listing.unknown:
        files = counted(len(listing.unknown), "files end in")
        yield f"{files} {_shortened(endings_of(listing.unknown))}: of no use here"


def _shortened(endings: str) -> str:
    """The first five of a text of endings, and "and others" if there are more."""
    words = endings.split(" .")
    return endings if len(words) <= _MOST_ENDINGS else f"{' .'.join(words[:_MOST_ENDINGS])} and others"


def _sample(name: str, about: Description, frames: int) -> Sample:
    return Sample(
        name=name,
        text=about.text,
        others=about.others,
        label=about.label,
        condition=about.condition,
        frames=frames,
    )


@dataclass(frozen=True, slots=True)
class Headers:
    """The facts that were read from the headers of all pictures, by the pictures' names."""

    problems: dict[str, str]
    """The reason why a picture cannot be used, by name, for such pictures alone."""
    sizes: dict[str, Size]
    """Width and height as a picture is seen, by name."""
    rates: dict[str, float]
    """The frames per second of each clip, by name."""
    frames: dict[str, int]
    """The largest number of frames that can be taken of each picture or clip, by name."""
    digests: dict[str, bytes]
    """The fingerprint of each picture that can be used, by name."""
    contents: str
    """A fingerprint of all pictures together."""


def headers_of(
    folder: Path,
    pictures: Mapping[str, Content],
    progress: Progress | None,
    header_of: Callable[[Any], Header] = read_header,
) -> Headers:
    """The facts in the headers of all pictures or clips, each of which is opened, and their problems.

    `pictures`: the place of each by name. `header_of`: the function that reads a header.

    It warns of pictures that are taken as sRGB though they state other colours. `progress` is called with (number done,
    number of all).
    """
    problems: dict[str, str] = {}
    sizes: dict[str, Size] = {}
    rates: dict[str, float] = {}
    frames: dict[str, int] = {}
    digests: dict[str, bytes] = {}
    colours, contents = [], blake2b(digest_size=16)

    def check(name: str) -> tuple[Header, bytes]:
        header = header_of(pictures[name])
        try:
            return header, b"" if header.problem else fingerprint(pictures[name])
        except OSError as error:
            return Header(problem=f"{error.strerror}"), b""
        except ValueError as error:
            return Header(problem=str(error)), b""

    # Threads wait for the disk, so more of them than cores.
    with ThreadPoolExecutor(min(32, 4 * (os.cpu_count() or 1))) as threads:
        checked = threads.map(check, pictures)
        for number, (name, (header, digest)) in enumerate(zip(pictures, checked, strict=True), start=1):
            # In the order of names, whichever thread is first.
            contents.update(name.encode("utf-8", "surrogateescape") + b"\0" + digest)
            if header.problem is not None:
                problems[name] = header.problem
            else:
                digests[name] = digest
            if header.size is not None:
                sizes[name] = header.size
            if header.rate is not None:
                rates[name] = header.rate
            frames[name] = header.frames
            if header.colours is not None:
                colours.append(f"{name}: {header.colours}")
            if progress is not None and number % PROGRESS_EVERY == 0:
                progress(number, len(pictures))
    if colours:
        logger.warning('data=%s taken_as_srgb=%d examples="%s"', folder, len(colours), "; ".join(colours[:NUM_SHOWN]))
    return Headers(problems, sizes, rates, frames, digests, contents.hexdigest()[:12])


def raise_all(folder: Path, problems: dict[str, Sequence[str]]) -> None:
    """Raises one error with examples of each kind of problem; returns if there are no problems.

    `problems`: examples by the kind of problem in words.

    Raises:
        DataError: at least one kind of problem has examples; ten of each are shown.
    """
    lines = []
    for kind, examples in problems.items():
        if examples:
            lines.append(f"  {counted(len(examples), kind)}:")
            lines.extend(f"    {example}" for example in examples[:NUM_EXAMPLES])
            if len(examples) > NUM_EXAMPLES:
                lines.append(f"    and {len(examples) - NUM_EXAMPLES} more")
    if lines:
        raise DataError(f"{folder}: cannot be trained on\n" + "\n".join(lines))
