"""Reads the tensors of checkpoints that were written before 28 November 2026, by torch.distributed.checkpoint.

    .metadata       a pickle: for each tensor its shape, its type, and file, offset and length of its value
    __0_0.distcp    values one after the other, each as torch.save writes a tensor

The pickle is read without torch's classes: an object of it is a `_Part` here, with what the pickle puts into it. So a
stranger's checkpoint runs no code, and it does not matter how the classes are called in later versions of torch.
"""

import io
import pickle
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import torch
from torch import Tensor

from diffusionpipe.errors import CheckpointError
from diffusionpipe.trainer.checkpoints.tensor_plans import StoredTensor

METADATA = ".metadata"
_CLASSES = frozenset(
    {
        "torch.serialization._get_layout",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        *(
            f"torch.distributed.checkpoint.metadata.{name}"
            for name in (
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
    }
)


class _Part:
    """An object of the pickled table, in place of an object of one of torch's classes."""

    state: Any = None
    """The values of the object's fields, by name or in their order."""

    def __init__(self, *_: object) -> None:
        """Takes and ignores the arguments of the class that it replaces."""

    def __setstate__(self, state: object) -> None:
        """Keeps the state that pickle has read for the object."""
        self.state = state


class _TableUnpickler(pickle.Unpickler):
    """Reads the pickled table with a few classes alone: a stranger's pickle must not run code."""

    def find_class(self, module: str, name: str) -> object:
        """The class that the pickle names, or a class that replaces it here.

        Raises:
            UnpicklingError: a table of tensors may not contain this class.
        """
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath"):
            return PurePath
        if f"{module}.{name}" in _CLASSES:
            return _Part
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's metadata")


def read_distcp_table(folder: Path) -> tuple[StoredTensor, ...]:
    """The name, place, type and shape of each tensor in the folder, from its table.

    Raises:
        CheckpointError: the table is missing, cannot be read, or does not describe tensors in the folder's files.
    """
    try:
        with (folder / METADATA).open("rb") as file:
            metadata = _TableUnpickler(file).load()
    except FileNotFoundError as error:
        raise CheckpointError(f"{METADATA} of {folder.name} is missing") from error
    except Exception as error:  # a damaged pickle raises nearly anything
        raise CheckpointError(f"{METADATA} of {folder.name} cannot be read: {error}") from error
    try:
        kinds, places = metadata.state["state_dict_metadata"], metadata.state["storage_data"]
        return tuple(_stored(index.state["fqn"], kinds, place) for index, place in places.items())
    except ValueError as error:
        raise CheckpointError(f"{METADATA} of {folder.name} cannot be used: {error}") from error
    except Exception as error:  # so does a pickle of other things
        raise CheckpointError(f"{METADATA} of {folder.name} cannot be used: it is incomplete") from error


def read_distcp_tensor(file: BinaryIO, stored: StoredTensor, tensor: Tensor) -> None:
    """Fills `tensor` with the value that `stored` describes; `file` is at the value's first byte.

    Raises:
        ValueError: another value is there.
    """
    value = torch.load(io.BytesIO(file.read(stored.length)), map_location="cpu", weights_only=True)
    if not isinstance(value, Tensor) or (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
        raise ValueError(f"{stored.file} does not hold {stored.name} at byte {stored.offset}")
    tensor.copy_(value)


def _stored(name: object, kinds: dict[object, _Part], place: _Part) -> StoredTensor:
    """The place, type and shape of the tensor `name` in the table, whose parts a stranger may have written.

    `kinds`: the table's shapes and types by tensor name. `place`: the table's file, offset and length of the value.

    Raises:
        ValueError: the table gives no type, shape or place that a tensor can have.
    """
    size, properties = kinds[name].state["size"], kinds[name].state["properties"]
    dtype = properties.state[0] if isinstance(properties, _Part) else None
    file, offset, length = (place.state[field] for field in ("relative_path", "offset", "length"))
    is_shape = isinstance(size, torch.Size) and all(side >= 0 for side in size)
    if not isinstance(name, str) or not is_shape or not isinstance(dtype, torch.dtype):
        raise ValueError(f"it does not describe {name!r} as a tensor")
    if not isinstance(file, str) or not isinstance(offset, int) or not isinstance(length, int):
        raise ValueError("it does not say where each tensor lies")
    if not file.endswith(".distcp") or "/" in file:
        raise ValueError(f"{file!r} is not one of the checkpoint's files")
    if place.state.get("transform_descriptors"):
        raise ValueError(f"{file} is compressed or encrypted, which DiffusionPipe does not do")
    return StoredTensor(
        name=name,
        file=file,
        offset=offset,
        length=length,
        dtype=str(dtype).removeprefix("torch."),
        shape=tuple(size),
    )
