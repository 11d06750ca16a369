"""How the samples of a folder travel from the rank that has scanned it to the others: as columns of JSON values."""

import types
import typing
from dataclasses import fields
from pathlib import Path

from diffusionpipe.runtime.exchange import Form
from diffusionpipe.trainer.dataset import Dataset, Sample

_KINDS: dict[str, frozenset[type]] = {
    name: frozenset(typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,))
    for name, hint in typing.get_type_hints(Sample).items()
}
"""The types of a sample's fields by name."""


def _write(dataset: Dataset) -> object:
    columns = {field.name: [getattr(sample, field.name) for sample in dataset.samples] for field in fields(Sample)}
    return {"folder": str(dataset.folder), "columns": columns}


def _read(data: object) -> Dataset:
    """One check a column, not one a value: there may be millions."""
    if not isinstance(data, dict) or not isinstance(data["folder"], str) or not isinstance(data["columns"], dict):
        raise ValueError("a folder and columns are needed")
    columns = data["columns"]
    if columns.keys() != _KINDS.keys() or not all(isinstance(column, list) for column in columns.values()):
        raise ValueError(f"a sample has the columns {', '.join(_KINDS)}")
    for name, column in columns.items():
        if not _KINDS[name].issuperset(map(type, column)):
            raise ValueError(f"column {name} holds values of another type")
    rows = zip(*(columns[name] for name in _KINDS), strict=True)
    samples = tuple(Sample(**dict(zip(_KINDS, row, strict=True))) for row in rows)
    return Dataset(folder=Path(data["folder"]), samples=samples)


def _write_both(both: tuple[Dataset, Dataset | None]) -> object:
    return [None if dataset is None else _write(dataset) for dataset in both]


def _read_both(data: object) -> tuple[Dataset, Dataset | None]:
    if not isinstance(data, list) or len(data) != 2:
        raise ValueError("training and validation data are needed")
    return _read(data[0]), None if data[1] is None else _read(data[1])


DATASETS = Form(_write_both, _read_both)
"""Training and validation data."""
