"""Saves of a run: a folder for each step, from which any layout can continue.

    saved/
      step-00000003/
        rank-0.safetensors    the parameters that rank 0 counts, and its optimizer's state for them, by name
        rank-1.safetensors
        save.json             the step, the optimizer, and how many ranks wrote; written last

A save is written beside the older ones and gets its name when it is complete, so one that was cut off is never read.
The last `KEPT` are kept.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from diffusionpipe.errors import CheckpointError
from diffusionpipe.files.output_file import sync, write_durably

FORMAT, VERSION = "diffusionpipe-save", 1
KEPT = 2
INDEX = "save.json"
_PREFIX = "step-"

OptimizerState: TypeAlias = dict[str, Any]
"""The state that torch.optim keeps for a parameter: tensors and numbers by key."""


@dataclass(frozen=True, slots=True)
class RankTensors:
    """The parameters and the optimizer's states that one rank writes into a save."""

    parameters: Mapping[str, Tensor]
    """Name -> parameter."""
    states: Mapping[str, OptimizerState]
    """Name of a parameter -> the optimizer's state for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """The contents of a save's `save.json`: its step, number of ranks and optimizer."""

    step: int
    """The number of steps that were done."""
    num_ranks: int
    """The number of ranks, each of which wrote a file."""
    optimizer: str
    """The name of the optimizer's class; "" for none."""


def folder_of(folder: Path, step: int) -> Path:
    """The path of the folder with the save of a step, below the folder of all saves."""
    return folder / f"{_PREFIX}{step:08d}"


def unfinished(folder: Path, step: int) -> Path:
    """The path of the folder in which the save of a step is written, before it gets its final name."""
    return folder / f".{_PREFIX}{step:08d}"


def begin(folder: Path, step: int) -> None:
    """Make the folder into which ranks write the save of a step, and remove unfinished ones; one rank calls it.

    Raises:
        CheckpointError: the folder cannot be made.
    """
    place = unfinished(folder, step)
    try:
        for left in folder.glob(f".{_PREFIX}*"):
            shutil.rmtree(left)
        place.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(
            f"{place}: cannot be made ({error.strerror}); give a folder that can be written"
        ) from None


def finish(folder: Path, index: Index) -> None:
    """Finish the save of a step: write its `save.json`, and rename its hidden folder. Older saves are deleted.

    `KEPT` saves remain. One rank calls it.
    """
    place, named = unfinished(folder, index.step), folder_of(folder, index.step)
    data = {
        "format": FORMAT,
        "version": VERSION,
        "step": index.step,
        "ranks": index.num_ranks,
        "optimizer": index.optimizer,
    }
    write_durably(place / INDEX, (json.dumps(data, indent=1) + "\n").encode())
    if named.exists():
        # A folder cannot be renamed onto one that has contents.
        named.rename(folder / f".{_PREFIX}old-{index.step:08d}")
    place.rename(named)
    sync(folder)
    # Only now: the new save is on the disk under its name.
    for old in sorted(saves(folder))[:-KEPT]:
        shutil.rmtree(saves(folder)[old])
    for left in folder.glob(f".{_PREFIX}*"):
        shutil.rmtree(left)


def saves(folder: Path) -> dict[int, Path]:
    """Step -> path of each complete save in the folder, in no order; {} if there is no such folder."""
    found = {}
    for place in folder.glob(f"{_PREFIX}*") if folder.is_dir() else ():
        number = place.name.removeprefix(_PREFIX)
        if number.isdecimal() and (place / INDEX).is_file():
            found[int(number)] = place
    return found


def read_index(place: Path) -> Index:
    """The step, number of ranks and optimizer that the folder of a save states.

    Raises:
        CheckpointError: `save.json` is damaged, or has another version.
    """
    path = place / INDEX
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if (data["format"], data["version"]) != (FORMAT, VERSION):
            raise CheckpointError(
                f"{path}: this DiffusionPipe reads {FORMAT} version {VERSION}; use the one that wrote it"
            )
        return Index(step=int(data["step"]), num_ranks=int(data["ranks"]), optimizer=str(data["optimizer"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error}); remove this folder, and the run resumes from the save before it"
        ) from None


def _file(place: Path, rank: int) -> Path:
    return place / f"rank-{rank}.safetensors"


def write_part(place: Path, rank: int, part: RankTensors) -> None:
    """Write the parameters and states of one rank into the folder of a save.

    Raises:
        CheckpointError: the file cannot be written, or the optimizer keeps a value that no file can hold.
    """
    tensors = {f"weights/{name}": tensor.contiguous() for name, tensor in part.parameters.items()}
    numbers: dict[str, dict[str, object]] = {}
    for name, state in part.states.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"state/{name}/{key}"] = value.detach().cpu().contiguous()
            elif isinstance(value, int | float | str | None):
                numbers.setdefault(name, {})[key] = value
            else:
                raise CheckpointError(
                    f"the optimizer keeps a {type(value).__name__} ({key}) for {name}, which a save cannot hold; "
                    "use another optimizer"
                )
    path = _file(place, rank)
    try:
        save_file(tensors, path, metadata={"numbers": json.dumps(numbers)})
        sync(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be written ({error}); make room, or give another folder") from None


def read_save(place: Path, wanted: Mapping[str, Tensor]) -> RankTensors:
    """The wanted parameters and their optimizer states, from the files of all ranks in the folder of a save.

    `wanted`: parameters of the expected shapes, by name.

    Raises:
        CheckpointError: a file is damaged, or the save belongs to another model.
    """
    parameters: dict[str, Tensor] = {}
    states: dict[str, OptimizerState] = {}
    for rank in range(read_index(place).num_ranks):
        path = _file(place, rank)
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118  # a file of safetensors is no mapping
                    kind, _, rest = key.partition("/")
                    name, _, entry = rest.rpartition("/") if kind == "state" else (rest, "", "")
                    if name not in wanted:
                        continue
                    if kind == "state":
                        states.setdefault(name, {})[entry] = file.get_tensor(key)
                    else:
                        parameters[name] = file.get_tensor(key)
                for name, own in json.loads((file.metadata() or {}).get("numbers", "{}")).items():
                    if name in wanted:
                        states.setdefault(name, {}).update(own)
        except (OSError, SafetensorError, ValueError) as error:
            raise CheckpointError(
                f"{path}: cannot be read ({error}); remove this folder, and the run resumes from the save before it"
            ) from None
    for name, tensor in wanted.items():
        if name not in parameters or parameters[name].shape != tensor.shape:
            has = f"has the shape {tuple(parameters[name].shape)} in it" if name in parameters else "is not in it"
            raise CheckpointError(
                f"{place}: this save belongs to a different model: {name}, {tuple(tensor.shape)}, {has}; give a "
                "different folder"
            )
    return RankTensors(parameters, states)
