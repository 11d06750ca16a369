"""A component of a single file, read as if it had a file of its own.

Beside the component's config.json a small file replaces the weights:

    unet/config.json         {"_class_name": "UNet2DConditionModel", ...}
    unet/single_file.json    {"file": "/models/v1-5.safetensors", "kind": "UNet2DConditionModel"}
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from diffusionpipe.errors import ModelError
from diffusionpipe.files.input_file import read_json
from diffusionpipe.models.parameters.single_file.origins import RowOrigin, Shape, Shapes, origins_of

POINTER = "single_file.json"
"""The name of the file in a component's folder that replaces its weights."""


def pointer_text(file: Path, kind: str) -> str:
    """The JSON contents of a `POINTER` file: the single file, and the class of the component to read from it."""
    return json.dumps({"file": str(file), "kind": kind})


def file_behind(pointer: Path) -> Path:
    """The path of the single file that a `POINTER` file names."""
    return Path(_read(pointer)["file"])


def shapes_in(file: Path) -> dict[str, Shape]:
    """Name -> shape of each tensor in a safetensors file, from its header.

    Raises:
        ModelError: the file is damaged, or is not a safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as content:
            return {name: tuple(content.get_slice(name).get_shape()) for name in content.keys()}  # noqa: SIM118 (no dict)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}; get the model again") from error


def found_in(file: Path, shapes: Shapes, kind: str, config: Mapping[str, Any]) -> dict[str, RowOrigin] | None:
    """Name of each tensor of a component in diffusers -> its origin in the file; None if the file has nothing of it.

    `shapes`: name -> shape of the file's tensors. `kind`, `config`: the component's class and configuration.

    Raises:
        ModelError: the file has only a part of the component, or belongs to another model.
    """
    try:
        return origins_of(kind, config, shapes) or None
    except (KeyError, ValueError, IndexError, RuntimeError) as error:
        raise ModelError(
            f"{file} has another {kind} than model.config says (diffusers' converter stops at {type(error).__name__}: "
            f"{error}); set model.config to this model's configuration"
        ) from error


@contextmanager
def opened_part(pointer: Path) -> Iterator["ComponentTensors"]:
    """Within the block, the tensors of the component that a `POINTER` file names, read one by one.

    Raises:
        ModelError: the file is damaged, or does not hold the component.
    """
    from safetensors import safe_open

    found = _read(pointer)
    file, config = Path(found["file"]), _read(pointer.with_name("config.json"))
    origins = found_in(file, shapes_in(file), found["kind"], config)
    if origins is None:
        raise ModelError(f"{file} holds no {found['kind']} any more; get the model again")
    with safe_open(file, framework="pt") as content:
        yield ComponentTensors(origins, content)


class ComponentTensors:
    """The tensors of one component in an open single file, under diffusers' names and shapes; see `Tensors`."""

    def __init__(self, origins: Mapping[str, RowOrigin], content: Any) -> None:
        self._origins, self._content = origins, content

    def names(self) -> list[str]:
        """The names of the component's tensors in diffusers."""
        return list(self._origins)

    def shape(self, key: str) -> Shape:
        """The shape in diffusers of the tensor with this name in diffusers."""
        return self._origins[key].shape

    def get(self, key: str) -> Tensor:
        """A copy of a tensor, by its name in diffusers and in its shape there; only its rows of the file are read."""
        origin = self._origins[key]
        return origin.read(self._rows(origin.name))

    def metadata(self) -> dict[str, str]:
        """Key -> text in the file's header; {} if it has none."""
        return self._content.metadata() or {}

    def _rows(self, name: str) -> Callable[[int, int], Tensor]:
        def rows(first: int, end: int) -> Tensor:
            part = self._content.get_slice(name)
            shape = part.get_shape()
            tensor: Tensor = part[first:end] if shape and end - first < shape[0] else self._content.get_tensor(name)
            return tensor

        return rows


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    assert isinstance(content, dict), "it is our own file, or a configuration that was read before"
    return content
