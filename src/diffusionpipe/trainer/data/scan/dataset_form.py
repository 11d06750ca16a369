"""The form in which samples travel from the rank that has scanned them to the others: columns of JSON values."""

from pathlib import Path

from diffusionpipe.runtime.comm.exchange import JsonForm, rows_of
from diffusionpipe.trainer.data.scan.dataset import Dataset, Sample, SourcePart

_SAMPLES = rows_of(Sample)


def _write(dataset: Dataset) -> object:
    growth = [list(pair) for pair in dataset.growth]
    parts = [
        [part.name, str(part.folder), part.count, part.repeats, list(part.files), part.split, part.image]
        for part in dataset.parts
    ]
    return [str(dataset.folder), dataset.contents, dataset.rate, growth, parts, _SAMPLES.write(dataset.samples)]


def _read(data: object) -> Dataset:
    if not isinstance(data, list) or len(data) != 6 or not all(isinstance(text, str) for text in data[:2]):
        raise ValueError("a folder, a fingerprint, a rate, a growth, sources and columns are needed")
    if not isinstance(data[2], float | None):
        raise ValueError("a rate is a number")
    growth = data[3]
    if not isinstance(growth, list) or not all(_is_pair(pair) for pair in growth):
        raise ValueError("a growth is pairs of whole numbers")
    if not isinstance(data[4], list):
        raise ValueError("sources are a list")
    return Dataset(
        folder=Path(data[0]),
        contents=data[1],
        rate=data[2],
        growth=tuple((since, count) for since, count in growth),
        parts=tuple(_part(part) for part in data[4]),
        samples=_SAMPLES.read(data[5]),
    )


def _part(found: object) -> SourcePart:
    kinds = [str, str, int, int, list, str, str]
    if not isinstance(found, list) or [type(value) for value in found] != kinds:
        raise ValueError("sources are names, folders, whole numbers and files")
    name, folder, count, repeats, files, split, image = found
    if not all(isinstance(file, str) for file in files):
        raise ValueError("sources have files by their names")
    return SourcePart(
        name=name,
        folder=Path(folder),
        count=count,
        repeats=repeats,
        files=tuple(files),
        split=split,
        image=image,
    )


def _is_pair(found: object) -> bool:
    return isinstance(found, list) and len(found) == 2 and all(type(number) is int for number in found)


def _write_both(both: tuple[Dataset, Dataset | None]) -> object:
    return [None if dataset is None else _write(dataset) for dataset in both]


def _read_both(data: object) -> tuple[Dataset, Dataset | None]:
    if not isinstance(data, list) or len(data) != 2:
        raise ValueError("training and validation data are needed")
    return _read(data[0]), None if data[1] is None else _read(data[1])


DATASETS = JsonForm(_write_both, _read_both)
"""The form in which training data and validation data travel between ranks; the latter may be None."""
