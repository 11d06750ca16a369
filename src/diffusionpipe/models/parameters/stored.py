"""The files of a component's folder that hold its weights, and their contents.

Files are looked for in diffusers' order: a plain file before a variant, safetensors before .bin.

    model.safetensors                             plain
    model.safetensors.index.json                  plain, in shards
    pytorch_model.bin                             plain, .bin
    model.fp16.safetensors                        the variant fp16
    model.safetensors.index.fp16.json             the variant fp16, in shards

A single safetensors file with any other name is read too, and a component of a whole model in one file, where
`single_file.json` names it. Nothing in a .bin file is executed: only tensors are read.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from diffusionpipe.errors import ModelError
from diffusionpipe.files.input_file import problem_of_file, read_json
from diffusionpipe.models.parameters.narrow_files import WidenedFile, narrow_matrices, refuse_unknown_storage
from diffusionpipe.models.parameters.single_file.reading import POINTER, file_behind, opened_part

SAFETENSORS, BIN = "safetensors", "bin"
_STEMS = {
    SAFETENSORS: ("diffusion_pytorch_model", "model"),
    BIN: ("diffusion_pytorch_model", "pytorch_model"),
}
_NAME = re.compile(
    r"(?P<stem>diffusion_pytorch_model|pytorch_model|model)"
    r"(\.(?P<variant>[^.]+))?"
    r"\.(?P<ending>safetensors|bin)"
    r"(?P<index>\.index(\.(?P<later>[^.]+))?\.json)?"
)
_SHARD = re.compile(r".*-\d{5}-of-\d{5}(\..*)?")
_LISTED = 6
"""The most names that an error message lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """The files that hold the weights of one component: one file, or shards with their index."""

    files: tuple[Path, ...]
    """The path of the one file, or of each shard."""
    index: Path | None
    """The JSON file that names the shard of each tensor; None for one file."""
    variant: str | None
    """The variant in the files' names, e.g. "fp16"; None for plain files."""
    stem: str
    """The start of the files' names, e.g. "model"."""

    @property
    def source(self) -> Path:
        """The path that messages name: the index of shards, the file itself, or the whole model's single file."""
        first = self.files[0]
        return self.index or (file_behind(first) if first.name == POINTER else first)

    def plain_name(self, file: Path) -> str:
        """The name of one of the files, or of the index, with the variant left out.

        >>> stored = StoredWeights(files=(Path("model.fp16.bin"),), index=None, variant="fp16", stem="model")
        >>> stored.plain_name(stored.files[0])
        'model.bin'
        """
        return file.name if self.variant is None else file.name.replace(f".{self.variant}", "", 1)


class Tensors(Protocol):
    """An open file of tensors, which are read one by one."""

    def names(self) -> list[str]:
        """The names of the file's tensors."""
        ...

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of the tensor with this name; its values are not read."""
        ...

    def get(self, key: str) -> Tensor:
        """A copy of the tensor with this name, in host memory."""
        ...

    def metadata(self) -> dict[str, str]:
        """Key -> text in the file's header; {} if it has none."""
        ...


def stored_weights(folder: Path, variant: str | None = None) -> StoredWeights | None:
    """The files that hold a component's weights; None if the folder holds none.

    Files of the `variant` go first; if there are none, it is ignored. Then plain files go before files of another
    variant, if there is only one.

    Raises:
        ModelError: several variants without a plain file; an index or a file that cannot be read.
    """
    if (folder / POINTER).is_file():
        return StoredWeights(files=(folder / POINTER,), index=None, variant=None, stem=POINTER)
    # Of sets with the same key the last one stays, which is the first to read.
    found = dict(_complete(folder))
    variants = sorted({name for name, _ in found if name is not None})
    wanted: list[str | None] = [variant] if variant in variants else []
    wanted += [None, *variants] if len(variants) == 1 else [None]
    for name in wanted:
        for ending in (SAFETENSORS, BIN):
            if (name, ending) in found:
                return _checked(found[name, ending]())
    if variants:
        raise ModelError(
            f"{folder} has weights in the variants {' and '.join(variants)}, and no plain file; choose one by "
            f'model.variant, e.g. "{variants[0]}"'
        )
    others = [path for path in sorted(folder.glob("*.safetensors")) if not _SHARD.fullmatch(path.name)]
    if len(others) == 1:
        return _checked(StoredWeights(files=(others[0],), index=None, variant=None, stem=others[0].stem))
    return None


def missing_weights(folder: Path, why: str) -> str:
    """The message for a folder without weights: the files that it has, and then `why` weights are needed."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    listed = ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
    there = f"it has {listed}" if names else "it is empty" if folder.is_dir() else "there is no such folder"
    return f"{folder} has no weights ({there}), {why}"


@contextmanager
def opened(file: Path) -> Iterator[Tensors]:
    """Within the block, the tensors of a file, read one by one; matrices stored narrow with scales are wide.

    Raises:
        ModelError: the file is damaged, cut short, holds anything but tensors, or stores matrices in an unknown way.
    """
    from safetensors import SafetensorError, safe_open

    try:
        if file.name == POINTER:
            with opened_part(file) as part:
                yield _as_wide(part, file)
        elif file.suffix == ".bin":
            yield _as_wide(_Bin(_read_bin(file)), file)
        else:
            with safe_open(file, framework="pt") as tensors:
                yield _as_wide(_Safetensors(tensors), file)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}; get the model again") from error


def _as_wide(tensors: Tensors, file: Path) -> Tensors:
    """The open file, which returns matrices that are stored narrow as wide ones.

    Raises ModelError for a file that stores matrices in an unknown way.
    """
    names = tensors.names()
    refuse_unknown_storage(names, file)
    return WidenedFile(tensors, file) if narrow_matrices(set(names)) else tensors


class _Safetensors:
    def __init__(self, file: Any) -> None:
        self._file = file

    def names(self) -> list[str]:
        return list(self._file.keys())

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(key).get_shape())

    def get(self, key: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(key)
        return tensor

    def metadata(self) -> dict[str, str]:
        return self._file.metadata() or {}


class _Bin:
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._tensors[key].shape)

    def get(self, key: str) -> Tensor:
        return self._tensors[key].detach().clone()  # else it would be a part of the file, which may change

    def metadata(self) -> dict[str, str]:
        return {}


def _read_bin(file: Path) -> dict[str, Tensor]:
    """Name -> tensor of a file that torch.save wrote; values stay in the file until they are copied.

    Raises ModelError if it is damaged, or holds anything but tensors.
    """
    try:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            content = torch.load(file, map_location="cpu", weights_only=True)  # a file of before torch 1.6
    except Exception as error:  # the reader of pickles raises whatever damaged bytes lead to
        said = str(error).strip().splitlines() or [type(error).__name__]
        if "weights_only" in str(error) or "Unsupported" in said[0]:
            raise ModelError(
                f"{file} cannot be read: it holds more than tensors, and nothing else is loaded from it; get the model "
                "as safetensors"
            ) from error
        raise ModelError(f"{file} cannot be read: {said[0]}; get the model again") from error
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ModelError(f"{file} cannot be read: it does not hold tensors by name; get the model as safetensors")
    return {str(key): value for key, value in content.items()}


def _complete(folder: Path) -> Iterator[tuple[tuple[str | None, str], Callable[[], StoredWeights]]]:
    """((variant, ending), function that returns the files) of each set of weights with names of known libraries.

    The libraries are diffusers and transformers. The set to prefer comes last: with diffusers' names, and among these
    the shards of an index.
    """
    if not folder.is_dir():
        return
    names = []
    for path in sorted(folder.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match and match["stem"] in _STEMS[match["ending"]] and not _SHARD.fullmatch(match["variant"] or ""):
            names.append((path, match))
    names.sort(key=lambda pair: (pair[1]["stem"] != "diffusion_pytorch_model", pair[1]["index"] is None), reverse=True)
    for path, match in names:
        variant = match["variant"] or match["later"]
        yield (variant, match["ending"]), _files_of(path, match, variant)


def _files_of(path: Path, match: re.Match[str], variant: str | None) -> Callable[[], StoredWeights]:
    # Only the chosen set is read: the index of another one may be damaged.
    def read() -> StoredWeights:
        files = tuple(path.with_name(shard) for shard in _shards(path)) if match["index"] else (path,)
        return StoredWeights(
            files=files, index=path if match["index"] else None, variant=variant, stem=str(match["stem"])
        )

    return read


def _checked(stored: StoredWeights) -> StoredWeights:
    """The given files. Raises ModelError for a link that points nowhere, an empty file, a FIFO or a device."""
    for file in stored.files:
        problem = problem_of_file(file)
        if problem is None and not file.exists():
            problem = "it is missing"
        if problem is None and file.stat().st_size == 0:
            problem = "it is empty"
        if problem:
            raise ModelError(f"{file} cannot be read: {problem}; get the model again")
    return stored


def _shards(index: Path) -> list[str]:
    """The sorted names of the shards in an index. Raises ModelError if they are not files beside it."""
    try:
        content = read_json(index)
    except (OSError, ValueError) as error:
        raise ModelError(f"{index} cannot be read: {error}") from error
    table = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(table, dict) or not table:
        raise ModelError(f"{index} is not an index of shards: it has no weight_map; get the model again")
    for name, shard in table.items():
        # An index comes from elsewhere and must not lead to files in other folders.
        if not isinstance(shard, str) or shard != Path(shard).name or shard in ("", ".."):
            raise ModelError(f"{index}: the shard of {name} is {shard!r}; it must be the name of a file beside it")
    shards = sorted(set(table.values()))
    if missing := [shard for shard in shards if not (index.parent / shard).exists()]:
        raise ModelError(
            f"{index}: {missing[0] or repr(missing[0])} cannot be read: it is missing; get the model again"
        )
    return shards
