"""Names and order of layers of a transformer whose blocks pass on two streams of tokens: a picture's and its text's.

    time_text_embed    temb ───────────────── read by every block
    context_embedder   transformer.text    ─┐
    x_embedder         transformer.picture ─┴─ blocks.0 ─┬─ transformer.blocks.0      ─┬─ blocks.1 ── ...
                                                         └─ transformer.blocks.0.text ─┘

Plan files and profiles hold names and order, so families that had these before `cut` made their layers keep them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from diffusionpipe.models.cut.glue import GluedRun
from diffusionpipe.models.graphs.graph import Layer


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStreams:
    """The names of a transformer's children that embed time, text and picture, and of children without a layer."""

    first: tuple[str, str, str]
    """The modules whose layers come first: they embed the time, the text and the picture."""
    joined: tuple[str, ...]
    """The modules without a layer of their own: each is called by the layer that reads its result."""


def named_streams(layers: Sequence[Layer], streams: BlockStreams, inputs: Collection[str]) -> tuple[Layer, ...]:
    """The layers that `cut` returned, with the tensors of time, text and picture renamed; computations stay the same.

    The first three write "temb", "transformer.text" and "transformer.picture", and read in the order of `inputs`. Of
    what a block returns, the picture's tokens come last, and have the block's name; the text's, which the last block
    does not write, are "<block>.text".
    """
    tensors = ("temb", "transformer.text", "transformer.picture")
    first = {f"transformer.{child}": tensor for child, tensor in zip(streams.first, tensors, strict=True)}
    names: dict[str, str] = {}
    for layer in layers:
        # `cut` numbers what a block returns: "<block>", "<block>.1".
        # The picture's result has the highest number, so it comes first here.
        returned = sorted((name for name in layer.writes if name.startswith(layer.name)), reverse=True)
        names.update(zip(returned, (first.get(layer.name, layer.name), f"{layer.name}.text"), strict=False))
    by_name = {layer.name: layer for layer in layers}
    return (
        *(_renamed(by_name[name], names, list(inputs)) for name in first),
        *(_renamed(layer, names, []) for layer in layers if layer.name not in first),
    )


def _renamed(layer: Layer, names: Mapping[str, str], order: Sequence[str]) -> Layer:
    """The layer with its tensors renamed by `names`, old -> new, its reads in `order` if given, its writes sorted."""
    run = layer.run
    assert isinstance(run, GluedRun)
    reads = [(names.get(name, name), node) for name, node in zip(layer.reads, run.reads, strict=True)]
    writes = [(names.get(name, name), node) for name, node in zip(layer.writes, run.writes, strict=True)]
    if order:
        reads.sort(key=lambda read: order.index(read[0]))
    writes.sort(key=lambda write: write[0])
    return replace(
        layer,
        reads=tuple(name for name, _ in reads),
        writes=tuple(name for name, _ in writes),
        run=replace(run, reads=tuple(node for _, node in reads), writes=tuple(node for _, node in writes)),
    )
