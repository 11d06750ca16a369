"""Scans a place that holds samples: a folder, shards or a table."""

from pathlib import Path

from diffusionpipe.errors import DataError
from diffusionpipe.trainer.data.decoding.clips import FrameSelection
from diffusionpipe.trainer.data.places import PlaceKind, kind_of_place, problem_of_place
from diffusionpipe.trainer.data.scan.columns import USUAL_COLUMNS, Columns
from diffusionpipe.trainer.data.scan.dataset import STRICT, Condition, Dataset, Findings, Progress, ScanRules, examine
from diffusionpipe.trainer.data.scan.stored_samples import examine_shards, examine_table


def examine_place(
    place: Path,
    need: Condition,
    *,
    columns: Columns = USUAL_COLUMNS,
    taken: FrameSelection | None = None,
    progress: Progress | None = None,
    rules: ScanRules = STRICT,
) -> tuple[Dataset, Findings]:
    """The samples of a folder, of shards or of a table, and further findings of the scan.

    `columns`: the columns of a table that are read.

    `need`: the description that each sample must have. `taken`: the frames that are taken of each clip; None for
    pictures.

    Raises:
        ConfigError: there is no such place, or pictures, captions, metadata or tables cannot be used; all is listed.
    """
    kind = kind_of_place(place)
    if kind is PlaceKind.FOLDER:
        return examine(place, need, taken=taken, progress=progress, rules=rules)
    if taken is not None:
        raise DataError(f"{place}: clips are read from folders; unpack them, or remove data.frames")
    if problem := problem_of_place(place):
        raise DataError(f"{place}: {problem}; name a file, a folder, or files with * or {{000..012}}")
    if kind is PlaceKind.SHARDS:
        return examine_shards(place, need, progress=progress, rules=rules)
    return examine_table(place, need, columns=columns, progress=progress, rules=rules)
