"""Which rows of which tensor of a single file each tensor of diffusers is.

diffusers' converter is run on numbered rows in place of the file's tensors, with the file's names and numbers of rows:

    file       attn.qkv.weight     0 1 2 3 4 5
    converter  to_q.weight         0 1
               to_k.weight             2 3
               to_v.weight                 4 5

So nothing is converted twice, a rank reads its own rows alone, and the same table writes a file.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
Convert = Callable[[dict[str, Tensor]], Mapping[str, Tensor | None]]
_CLIPS = ("CLIPTextModel", "CLIPTextModelWithProjection")
_T5 = "T5EncoderModel"
_PROJECTION = "text_projection.weight"


@dataclass(frozen=True, slots=True)
class RowOrigin:
    """The rows of a tensor in the authors' file that make one tensor of diffusers."""

    name: str
    """The name of the file's tensor; "" for an identity matrix, which no file has."""
    ranges: tuple[tuple[int, int], ...]
    """(first row, row after the last one) of each range, in the order in which they are joined."""
    shape: Shape
    """The shape of the tensor in diffusers."""
    is_transposed: bool = False
    """Whether the rows are transposed after they are joined."""

    def read(self, rows: Callable[[int, int], Tensor]) -> Tensor:
        """The tensor of diffusers, contiguous, from the file's rows.

        `rows(first, end)`: rows of the file's tensor, or the tensor itself if it has no dimensions.
        """
        # The projection that a file lacks is an identity in diffusers.
        if not self.name:
            return torch.eye(*self.shape)
        parts = [rows(first, end) for first, end in self.ranges]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return (joined.T if self.is_transposed else joined).reshape(self.shape).contiguous()

    def write(self, tensor: Tensor, whole: Tensor) -> None:
        """Copy a tensor of diffusers into its rows of the file's tensor `whole`, in place."""
        values = (tensor.T if self.is_transposed else tensor).reshape(-1, *whole.shape[1:]) if whole.ndim else tensor
        if not whole.ndim:
            whole.copy_(values)
            return
        done = 0
        for first, end in self.ranges:
            whole[first:end].copy_(values[done : done + end - first])
            done += end - first


def origins_of(kind: str, config: Mapping[str, Any], shapes: Shapes) -> dict[str, RowOrigin] | None:
    """Name of each tensor of a component in diffusers -> its origin in a file of these shapes.

    None if the file lacks the component.

    Raises:
        KeyError, ValueError, IndexError, RuntimeError: the converter does not find the tensors that it needs.
    """
    convert = _converter(kind, config, shapes)
    if convert is None:
        return None
    names, starts, numbered, start = list(shapes), list[int](), dict[str, Tensor](), 0
    for name in names:
        shape = shapes[name]
        rows = shape[0] if shape else 1
        numbered[name] = torch.arange(start, start + rows).reshape((rows, *(1 for _ in shape[1:])) if shape else ())
        starts.append(start)
        start += rows
    found = {}
    for name, numbers in convert(numbered).items():
        if numbers is None:
            continue
        # Numbered rows are whole numbers.
        if numbers.is_floating_point():  # made by the converter
            found[name] = RowOrigin("", (), tuple(numbers.shape))
            continue
        flat = numbers.flatten()
        place = bisect_right(starts, int(flat[0])) - 1
        whole, taken = shapes[names[place]], flat - starts[place]
        # The rows of a transposed matrix run along its second axis.
        is_transposed = len(whole) == 2 and numbers.shape[0] == 1 < numbers.shape[-1]
        shape = (len(flat), *whole[1:]) if whole else ()
        shape = shape[::-1] if is_transposed else shape[: numbers.ndim]
        found[name] = RowOrigin(names[place], _ranges(taken.tolist()), shape, is_transposed)
    return found


def _ranges(rows: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(first, last + 1) of each range of consecutive numbers in `rows`, in order.

    >>> _ranges([4, 5, 6, 0, 1])
    ((4, 7), (0, 2))
    """
    ends = [place for place in range(1, len(rows)) if rows[place] != rows[place - 1] + 1]
    # A range ends where the next row is not the following one.
    return tuple((rows[first], rows[end - 1] + 1) for first, end in zip([0, *ends], [*ends, len(rows)], strict=True))


def _converter(kind: str, config: Mapping[str, Any], shapes: Shapes) -> Convert | None:
    """Diffusers' converter for a component of this class; None if a file of these shapes has nothing of it."""
    from diffusers.loaders import single_file_utils as converters
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    if kind in _CLIPS:
        return _clip_converter(config, shapes)
    if kind == _T5:
        return converters.convert_sd3_t5_checkpoint_to_diffusers if converters.is_t5_in_single_file(shapes) else None
    if kind == "AutoencoderKL" and not any(name.startswith(tuple(converters.LDM_VAE_KEYS)) for name in shapes):
        return None
    mapping: Any = SINGLE_FILE_LOADABLE_CLASSES[kind]["checkpoint_mapping_fn"]
    return lambda numbered: mapping(numbered, config=config)


def _clip_converter(config: Mapping[str, Any], shapes: Shapes) -> Convert | None:
    """The converter for a CLIP of this configuration's width; None if a file of these shapes has none.

    It looks for the encoders in the order in which diffusers does.
    """
    from diffusers.loaders import single_file_utils as converters

    width = config["hidden_size"]

    def has(name: str, *, is_of_width: bool = True) -> bool:
        key = converters.CHECKPOINT_KEY_NAMES[name]
        return key in shapes and (not is_of_width or shapes[key][-1] == width)

    def of_open_clip(prefix: str) -> Convert:
        model = SimpleNamespace(config=SimpleNamespace(hidden_size=width))
        return lambda numbered: converters.convert_open_clip_checkpoint(model, numbered, prefix=prefix)

    def of_sd3(part: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor | None]]:
        return lambda numbered: converters.convert_ldm_clip_checkpoint(numbered, f"text_encoders.{part}.transformer.")

    if has("clip", is_of_width=False) or has("clip_sdxl"):
        convert: Convert = converters.convert_ldm_clip_checkpoint
        return convert
    if has("clip_sd3"):
        return lambda numbered: {**of_sd3("clip_l")(numbered), _PROJECTION: torch.eye(width)}
    if has("open_clip", is_of_width=False):
        return of_open_clip("cond_stage_model.model.")
    if has("open_clip_sdxl"):
        return of_open_clip("conditioner.embedders.1.model.")
    if has("open_clip_sd3"):
        return of_sd3("clip_g")
    return None
