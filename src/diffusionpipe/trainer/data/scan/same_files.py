"""Checks that every rank has the files that rank 0 has scanned: it compares the sizes of some before anything long."""

from collections.abc import Iterator
from pathlib import Path

from diffusionpipe.errors import DataError
from diffusionpipe.runtime.job.agreement import agree
from diffusionpipe.trainer.data.scan.dataset import Dataset

_COMPARED = 256
"""The number of files of each kind that are compared, spread evenly over the data."""
_MISSING = -1


def agree_on_files(dataset: Dataset) -> None:
    """Refuses to train if files are missing on a rank or differ in size; compares up to 256 pictures and 256 shards.

    Every rank calls it.

    Raises:
        DataError: on every rank; it names the first such file.
    """
    files = list(_compared(dataset))
    texts = agree(lambda: " ".join(str(_size_of(file)) for file in files))
    for rank, text in enumerate(texts):
        for file, first, own in zip(files, texts[0].split(), text.split(), strict=True):
            if first != own:
                found = f"{file} {_words(int(first))} on rank 0 and {_words(int(own))} on rank {rank}"
                raise DataError(f"{found}; give all machines the same data")


def _compared(dataset: Dataset) -> Iterator[Path]:
    """Yields the files that ranks compare: some of the pictures, and some of the shards and files of tables."""
    whole = [number for number, sample in enumerate(dataset.samples) if not sample.place]
    for number in whole[:: -(-len(whole) // _COMPARED) or 1]:  # no step of 0 where there are no files
        path = dataset.path(number)
        assert isinstance(path, Path), "it has no place in another file"
        yield path
    stored = [Path(file) for part in dataset.parts for file in part.files]
    yield from stored[:: -(-len(stored) // _COMPARED) or 1]


def _size_of(file: Path) -> int:
    """The size of a file in bytes; 0 for a folder, -1 if it is missing."""
    try:
        return file.stat().st_size if file.is_file() else 0 if file.is_dir() else _MISSING
    except OSError:
        return _MISSING


def _words(size: int) -> str:
    return "is missing" if size == _MISSING else f"has {size:,} bytes"
