"""The bytes that a VAE needs to decode, counted on fake tensors: neither weights nor the device are needed.

    latents ──> decoder ──> picture        whole: one run of `decode`
    latents ──> tile, tile, tile ──> blended     tiled: one run on a tile, beside all tiles that are done

Blending is not run: it takes less than the decoder, and thousands of operations.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from diffusionpipe.costs.decoding import Decoding
from diffusionpipe.models.graphs.graph import LayerGraph
from diffusionpipe.models.parts.decoder import decoded_latents, reads_pictures, tiles_of
from diffusionpipe.profiler.memory import LiveBytes
from diffusionpipe.profiler.substitution import substituted
from diffusionpipe.units import Bytes


@dataclass(frozen=True, slots=True)
class DecodingRun:
    """The bytes that one `decode` of a VAE takes at its peak, and the bytes of its picture."""

    peak: Bytes
    """Bytes at the peak besides weights and latents; the picture is included."""
    written: Bytes
    """Bytes of the picture."""


def decoding_of(vae: nn.Module, latents: Sequence[int], dtype: torch.dtype = torch.float32) -> Decoding:
    """The bytes that the VAE needs to decode a sample's latents, whole and tile by tile.

    `latents`: their shape, without the batch. `dtype`: of the weights and the latents.
    """
    whole = run_decoder(vae, (1, *latents), dtype)
    tiles = tiles_of(vae, latents)
    tiled = whole.peak
    if len(tiles) > 1:
        first = run_decoder(vae, (1, *latents[:-2], *tiles[0]), dtype)
        # The worst moment: the last of the largest tiles runs beside the pictures of all tiles before it.
        last = max(index for index, tile in enumerate(tiles) if tile == tiles[0])
        before, all_of_them = (_written(first, tiles, count) for count in (last, len(tiles)))
        if not reads_pictures(vae):
            before += first.written  # frames are put together, and the last one's tile is still there
        tiled = max(first.peak + before, all_of_them + 2 * whole.written)  # rows of blended tiles, then all in one
    return Decoding(
        weights=sum(p.numel() for p in vae.parameters()) * dtype.itemsize,
        whole=whole.peak,
        tiled=tiled,
        picture=whole.written // dtype.itemsize * torch.float32.itemsize,  # it waits in float32
        latents=prod(latents) * dtype.itemsize,
    )


def _written(first: DecodingRun, tiles: Sequence[tuple[int, int]], count: int) -> Bytes:
    """Bytes of the pictures of the first `count` tiles; `first`: the run on the first tile."""
    area = sum(height * width for height, width in tiles[:count])
    return first.written * area // prod(tiles[0])


def decoding_of_graph(graph: LayerGraph) -> Decoding | None:
    """The bytes that the model's VAE needs to decode a sample; None for a model without a VAE."""
    vae = graph.components.get("vae")
    pixels = next((spec.shape for spec in graph.inputs if spec.name == "pixels"), None)
    return None if vae is None or pixels is None else decoding_of(vae, decoded_latents(vae, pixels))


def run_decoder(vae: Any, latents: Sequence[int], dtype: torch.dtype = torch.float32) -> DecodingRun:
    """Run `decode` on fake latents of the shape (B, ...), with the VAE's present settings; returns its bytes.

    No number is computed.
    """
    live = LiveBytes()
    with FakeTensorMode(allow_non_fake_inputs=True), _fake(vae, dtype), torch.no_grad():
        read = torch.zeros(tuple(latents), dtype=dtype)
        times = (torch.zeros(len(read), dtype=dtype),) if vae.config.get("timestep_conditioning") else ()
        with live:
            written: Tensor = vae.decode(read, *times, return_dict=False)[0]
    return DecodingRun(peak=live.peak, written=written.untyped_storage().nbytes())


@contextmanager
def _fake(vae: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    tensors = {id(tensor) for tensor in (*vae.parameters(), *vae.buffers())}

    def fake(name: str, tensor: Tensor) -> Tensor:
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        return torch.empty(tensor.shape, dtype=kind, device="cpu")

    with substituted((vae,), tensors, fake):
        yield
