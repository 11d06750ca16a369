"""How a transformer class of diffusers is called: shapes of its arguments as functions of its configuration.

Flux2Transformer2DModel(in_channels=128, joint_attention_dim=15360, ...), 1024 x 1024 pixels
    hidden_states            (64 * 64, in_channels)                tokens of 16 x 16 pixels
    encoder_hidden_states    (512, joint_attention_dim)            text
    img_ids, txt_ids         the same for all samples
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from diffusionpipe.models.base.family import Clip

Config = Mapping[str, Any]

_TEXT_WIDTHS = (
    "text_embed_dim", "text_dim", "joint_attention_dim", "caption_channels", "encoder_hidden_size", "context_in_dim",
    "cap_feat_dim", "text_in_dim", "text_hidden_dim", "in_text_dim", "dit_text_dim", "llm_features_dim",
    "cross_attention_input_dim", "cross_attention_dim", "condition_dim", "embedding_dim", "hidden_size",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The size of one sample as a transformer sees it: frames, height and width in cells, and text tokens."""

    clip: Clip
    """The size of the sample in pixels."""
    frames: int
    """The number of frames of its latents."""
    height: int
    """The height in cells."""
    width: int
    """The width in cells."""
    text: int
    """The number of text tokens."""

    @property
    def cells(self) -> int:
        """The number of cells of the sample."""
        return self.frames * self.height * self.width


Shape = Callable[[Config, Grid], tuple[int, ...] | None]
"""`shape(configuration, grid)` -> the shape of an argument for one sample; None: the model of this configuration has no
such argument."""
Tensors = Mapping[str, Tensor]
Made = Callable[[Config, Grid, Tensors], object]
"""`made(configuration, grid, name -> argument with values for each sample)` -> the value of a further argument."""


def text_states(config: Config, grid: Grid) -> tuple[int, ...]:
    """The shape of a text's states, (T, D); D is the first of the known width fields that the configuration has."""
    return grid.text, next(config[name] for name in _TEXT_WIDTHS if config.get(name) is not None)


def picture(config: Config, grid: Grid) -> tuple[int, ...]:
    """The shape of a picture's latents, (C, H, W)."""
    return config["in_channels"], grid.height, grid.width


def clip(config: Config, grid: Grid) -> tuple[int, ...]:
    """The shape of a clip's latents, (C, F, H, W)."""
    return config["in_channels"], grid.frames, grid.height, grid.width


def frames_first(config: Config, grid: Grid) -> tuple[int, ...]:
    """The shape of a clip's latents with frames first, (F, C, H, W)."""
    return grid.frames, config["in_channels"], grid.height, grid.width


def tokens(config: Config, grid: Grid) -> tuple[int, ...]:
    """The shape of latents as tokens, (N, C): a token for each cell."""
    return grid.cells, config["in_channels"]


def sound(config: Config, grid: Grid) -> tuple[int, ...]:
    """The shape of a sample's sound latents: (channels, latents in time)."""
    return config["in_channels"], grid.frames


def vector(name: str) -> Shape:
    """The `Shape` (width,), where the configuration's field `name` has the width; None if the field is not set."""
    return lambda config, grid: None if config.get(name) is None else (config[name],)


def always(*shape: int) -> Shape:
    """The `Shape` of an argument that has this shape in every configuration."""
    return lambda config, grid: shape


def if_set(name: str, *shape: int) -> Shape:
    """The `Shape` of an argument that has this shape if the configuration's field `name` is true, else None."""
    return lambda config, grid: shape if config.get(name) else None


def places(config: Config, grid: Grid, axes: str = "axes_dims_rope") -> Tensor:
    """The position of each cell by frame, row and column, (N, axes), float32; further axes are zero.

    `axes`: the field of the configuration that lists the axes.
    """
    sizes = [torch.arange(size) for size in (grid.frames, grid.height, grid.width)]
    found = torch.stack(torch.meshgrid(*sizes, indexing="ij"), -1).flatten(0, 2).float()  # (N, 3)
    return torch.nn.functional.pad(found, (0, len(config[axes]) - 3))


def no_places(config: Config, grid: Grid, axes: str = "axes_dims_rope") -> Tensor:
    """The positions of a text's tokens, (T, axes), all zero.

    `axes`: the field of the configuration that lists the axes.
    """
    return torch.zeros(grid.text, len(config[axes]))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassCall:
    """The call of a transformer class of diffusers: its arguments, their shapes, and the size of a sample."""

    latents: Shape
    """The shape of the denoised latents, and of the prediction."""
    size: Clip
    """The default size of a sample, which diffusers' pipeline draws."""
    pixels: int = 8
    """Side of the square of pixels that is one cell; 0: samples have no size in pixels, and `size.frames` cells."""
    patch: int = 2
    """Side of the square of cells that is one token."""
    frames: Callable[[int], int] | None = None
    """Number of a clip's frames -> number of frames of its latents; raises ModelError for a number that the VAE cannot
    encode. None: the class draws pictures."""
    text: int = 512
    """The number of text tokens: the most that diffusers' pipeline reads, or 512 where it reads a text in full."""
    noisy: str = "hidden_states"
    """The argument with the noisy latents."""
    times: str = "timestep"
    """The argument with the times."""
    tensors: Mapping[str, Shape] = field(default_factory=lambda: {"encoder_hidden_states": text_states})
    """Other argument with numbers for each sample -> its shape."""
    whole: Mapping[str, Shape] = field(default_factory=dict)
    """Other argument with whole numbers for each sample -> its shape."""
    masks: tuple[str, ...] = ()
    """The arguments, (T,), that are true at the tokens of the text and false at padding."""
    made: Mapping[str, Made] = field(default_factory=dict)
    """Argument that is the same for all samples, or follows from others -> the function that makes it."""
    predict: Callable[..., Any] | None = None
    """`predict(transformer, **arguments)` -> the prediction; None: the class's own forward makes it."""

    def shapes(self, config: Config, grid: Grid) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Argument -> (shape for one sample, dtype), of all in this configuration but noisy latents and times."""
        found = {
            **{name: (shape(config, grid), torch.float32) for name, shape in self.tensors.items()},
            **{name: (shape(config, grid), torch.int64) for name, shape in self.whole.items()},
            **dict.fromkeys(self.masks, ((grid.text,), torch.bool)),
        }
        return {name: (shape, dtype) for name, (shape, dtype) in found.items() if shape is not None}

    def forward(self, config: Config, grid: Grid, transformer: Any, **tensors: Tensor) -> Tensor:
        """The transformer's prediction; `tensors` are noisy latents, times and all of `shapes`, by argument.

        Tensors that the class's forward has no argument for are read by the functions in `made` alone.
        """
        made = {name: make(config, grid, tensors) for name, make in self.made.items()}
        if self.predict is not None:
            prediction: Tensor = self.predict(transformer, **tensors, **made)
            return prediction
        named = signature(type(transformer).forward).parameters
        # Tensors that only `made` reads are not arguments of the class.
        given = {name: tensor for name, tensor in tensors.items() if name in named}
        output: Tensor | tuple[Tensor, ...] = transformer(**given | made, return_dict=False)
        return output if isinstance(output, Tensor) else output[0]
