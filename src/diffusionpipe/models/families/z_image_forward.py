"""The forward of Z-Image for a whole batch at once.

diffusers' forward takes a list of pictures and works on each of them alone. Here a whole batch goes the same way: each
caption is padded to the longest, and the padding is masked.
"""

from typing import Any

import torch
from torch import Tensor

PATCH, SIZE = 2, "2-1"
"""The side of a patch, and the key of its layers in the transformer."""
_MULTIPLE = 32
"""The numbers of tokens of pictures and of captions are increased, by padding, to multiples of this number."""


def predict(transformer: Any, *, noisy: Tensor, timesteps: Tensor, text_states: Tensor, input_mask: Tensor) -> Tensor:
    """The velocity (B, C, H, W) that Z-Image's transformer predicts for noisy latents (B, C, H, W).

    `text_states`: of captions, (B, T, D). `input_mask`: 1 at their tokens, 0 at padding, (B, T).
    """
    B, C, H, W = noisy.shape
    rows, columns, T = H // PATCH, W // PATCH, text_states.shape[1]
    num_pads = -rows * columns % _MULTIPLE
    # A caption is filled up to a multiple of 32 tokens; the picture's first coordinate comes after it.
    lengths = input_mask.sum(1)  # (B,)
    filled = (lengths + _MULTIPLE - 1) // _MULTIPLE * _MULTIPLE
    places = torch.arange(T, device=noisy.device)
    is_text, is_filled = places < lengths[:, None], places < filled[:, None]  # (B, T)
    axes = [torch.arange(size, device=noisy.device) for size in (1, rows, columns)]
    grid = torch.stack(torch.meshgrid(axes, indexing="ij"), -1).flatten(0, 2)  # (N, 3)
    starts = torch.nn.functional.pad((filled + 1)[:, None, None], (0, 2))  # (B, 1, 3)
    # Padding of the picture is at place 0 on every axis.
    ids = torch.nn.functional.pad(grid + starts, (0, 0, 0, num_pads))  # (B, N, 3)
    turns = transformer.rope_embedder(ids.flatten(0, 1)).unflatten(0, (B, -1))
    text_turns = transformer.rope_embedder(torch.nn.functional.pad(places[:, None] + 1, (0, 2))).expand(B, -1, -1)

    # The transformer counts its times from noise, 0, to data, 1.
    time = transformer.t_embedder((1000 - timesteps) / 1000 * transformer.t_scale).type_as(noisy)
    hidden = noisy.view(B, C, rows, PATCH, columns, PATCH).permute(0, 2, 4, 3, 5, 1).reshape(B, rows * columns, -1)
    hidden = transformer.all_x_embedder[SIZE](hidden)
    hidden = torch.cat([hidden, transformer.x_pad_token.expand(B, num_pads, -1)], 1)  # (B, N, D)
    for block in transformer.noise_refiner:
        hidden = block(hidden, None, turns, time)
    text = torch.where(is_text[..., None], transformer.cap_embedder(text_states), transformer.cap_pad_token)
    for block in transformer.context_refiner:
        text = block(text, is_filled, text_turns)
    both, turns = torch.cat([hidden, text], 1), torch.cat([turns, text_turns], 1)  # (B, N + T, D)
    # Padding of the picture is read, padding of the text beyond `filled` is not.
    mask = torch.cat([torch.ones_like(ids[..., 0], dtype=torch.bool), is_filled], 1)
    for block in transformer.layers:
        both = block(both, mask, turns, time)
    hidden = transformer.all_final_layer[SIZE](both, c=time)[:, : rows * columns]
    hidden = hidden.view(B, rows, columns, PATCH, PATCH, C).permute(0, 5, 1, 3, 2, 4)
    velocity: Tensor = -hidden.reshape(B, C, H, W)
    return velocity
