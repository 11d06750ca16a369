"""Adapters of several layers as one of the layer that joins them, and back; both are exact."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType

import torch
from torch import Tensor

from diffusionpipe.models.parameters.adapter_names.originals import OriginalRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One layer's adapter, which adds scale * up * down to its weight."""

    down: Tensor
    """The first matrix, (rank, inputs), of a convolution (rank, inputs, height, width)."""
    up: Tensor
    """The second matrix, (outputs, rank), of a convolution (outputs, rank, 1, 1)."""
    scale: float = 1.0
    """The factor of the product: alpha / rank, or alpha / sqrt(rank) of a rank-stabilised adapter."""
    magnitude: Tensor | None = None
    """The norm that DoRA gives each row of the sum, (outputs,); None for a plain adapter."""

    @property
    def rank(self) -> int:
        """The rank of the adapter: the number of rows of its first matrix."""
        return self.down.shape[0]


def scaled(adapter: Adapter) -> Adapter:
    """An equal adapter with scale 1: its scale is multiplied into the second matrix."""
    if adapter.scale == 1.0:
        return adapter
    return Adapter(down=adapter.down, up=adapter.up * adapter.scale, magnitude=adapter.magnitude)


def difference(adapter: Adapter, weight: Tensor) -> Tensor:
    """The new weight less the old one, `weight`, for this adapter, in float64, of the weight's shape.

    With a magnitude (DoRA) the rows of the sum of weight and adapter are scaled to these norms. This is peft's rule,
    which divides by the norms of the sum, not of the old weight alone.
    """
    old, up, down = weight.double(), adapter.up.double().flatten(1), adapter.down.double().flatten(1)
    new = old + (adapter.scale * (up @ down)).reshape(old.shape)  # (outputs, inputs) or (outputs, inputs, h, w)
    if adapter.magnitude is not None:
        norms = new.flatten(1).norm(dim=1)
        new = new * (adapter.magnitude.double().flatten() / norms).reshape(-1, *[1] * (new.dim() - 1))
    return new - old


def joined_differences(parts: Sequence[OriginalRows], found: Mapping[str, Tensor]) -> Tensor:
    """The change of the weight of an original layer that joins `parts`; rows of a part without a change are zero.

    `found`: module of a part -> the change of its weight; at least one.
    """
    sample = next(iter(found.values()))
    rows = [
        _ordered(part, found[part.module]) if part.module in found else sample.new_zeros(part.rows, *sample.shape[1:])
        for part in parts
    ]
    return torch.cat(rows)


def with_one_alpha(adapters: Mapping[str, Adapter]) -> dict[str, Adapter]:
    """Name -> equal adapter, all with one alpha (scale * rank): the most common alpha of the given ones."""
    alphas = Counter(adapter.scale * adapter.rank for adapter in adapters.values())
    # Of alphas that are as common as each other the largest, so that the order of layers decides nothing.
    alpha = max(alphas, key=lambda one: (alphas[one], one), default=1.0)
    return {
        name: adapter
        if adapter.scale * adapter.rank == alpha
        else replace(adapter, up=adapter.up * (adapter.scale * adapter.rank / alpha), scale=alpha / adapter.rank)
        for name, adapter in adapters.items()
    }


def joined(parts: Sequence[OriginalRows], adapters: Mapping[str, Adapter]) -> Adapter:
    """The adapter of an original layer that joins `parts`; a part without an adapter has zero rows.

    `adapters`: module of a part -> its adapter; at least one.

    The first matrices are stacked, the second ones are blocks on a diagonal: the rank is the sum of the ranks. One
    scale belongs to all; where the parts have several, these are multiplied in first.
    """
    present = [adapters[part.module] for part in parts if part.module in adapters]
    if len({adapter.scale for adapter in present}) > 1:
        adapters = {name: scaled(adapter) for name, adapter in adapters.items()}
        present = [adapters[part.module] for part in parts if part.module in adapters]
    # The rank stays as it is; only the halves of its rows may have to change places.
    if len(parts) == 1:
        ((part,), (adapter,)) = (parts, present)
        return Adapter(down=adapter.down, up=_ordered(part, adapter.up), scale=adapter.scale)
    down = torch.cat([adapter.down for adapter in present])
    up = down.new_zeros(sum(part.rows for part in parts), down.shape[0])
    row = column = 0
    for part in parts:
        if part.module in adapters:
            adapter = adapters[part.module]
            up[row : row + part.rows, column : column + adapter.rank] = _ordered(part, adapter.up)
            column += adapter.rank
        row += part.rows
    return Adapter(down=down, up=up, scale=present[0].scale)


def separated(
    parts: Sequence[OriginalRows], adapter: Adapter, ranks: Mapping[str, int] = MappingProxyType({})
) -> dict[str, Adapter]:
    """Module of a part -> its adapter, from the adapter of the layer that joins `parts`: the inverse of `joined`.

    `ranks`: module -> expected rank; if blocks of these ranks fit, the adapter is divided into them. Else a part whose
    rows are all zero gets no adapter, and if the second matrix has no blocks on its diagonal, every part keeps the
    whole rank. `adapter.up` has the rows of all parts.
    """
    sizes = [part.rows for part in parts]
    ups = [_ordered(part, rows) for part, rows in zip(parts, adapter.up.split(sizes), strict=True)]
    live = [number for number, part in enumerate(parts) if ranks.get(part.module)]
    columns = _expected(
        [ups[number] for number in live], [ranks[parts[number].module] for number in live], adapter.rank
    )
    if not columns:
        # An adapter of zeros belongs to every part.
        live = [number for number, up in enumerate(ups) if bool(up.any())] or list(range(len(parts)))
        columns = _blocks([ups[number] for number in live], adapter.rank)
    found = {}
    for number, own in zip(live, columns, strict=True):
        magnitude = None
        if adapter.magnitude is not None:  # one number a row, in the order of the rows
            magnitude = _ordered(parts[number], adapter.magnitude.flatten().split(sizes)[number])
        found[parts[number].module] = Adapter(
            down=adapter.down[own], up=ups[number][:, own].contiguous(), scale=adapter.scale, magnitude=magnitude
        )
    return found


def _expected(ups: Sequence[Tensor], ranks: Sequence[int], rank: int) -> list[slice]:
    """The columns of each part's own block, if the parts have these ranks; [] if they cannot have them.

    `ups`: each part's rows of the second matrix. `rank`: the number of columns of all blocks.
    """
    ends = list(accumulate(ranks))
    own = [slice(end - size, end) for end, size in zip(ends, ranks, strict=True)]
    is_theirs = bool(ends) and ends[-1] == rank
    return own if is_theirs and not any(map(_is_used_beside, ups, own)) else []


def _blocks(ups: Sequence[Tensor], rank: int) -> list[slice]:
    """The columns of each part's own block; all columns for each if the parts have columns in common.

    `ups`: each part's rows of the second matrix. `rank`: the number of columns of all blocks.

    Equal blocks go first. Blocks of other ranks follow each other in the order of the parts, and each begins with its
    first column that is not zero.
    """
    starts = [0, *(int(up.any(0).int().argmax()) for up in ups[1:])]
    size, rest = divmod(rank, len(ups))
    # Equal blocks can only be there if the rank is a multiple of the number of parts.
    for borders in ([number * size for number in range(len(ups))] if not rest else [], starts):
        own = [slice(start, end) for start, end in zip(borders, [*borders[1:], rank], strict=False)]
        if own and not any(_is_used_beside(up, columns) for up, columns in zip(ups, own, strict=True)):
            return own
    return [slice(None)] * len(ups)


def _is_used_beside(up: Tensor, columns: slice) -> bool:
    return bool(up[:, : columns.start].any()) or bool(up[:, columns.stop :].any())


def _ordered(part: OriginalRows, rows: Tensor) -> Tensor:
    """The rows of a part in the order of the other names: with halves exchanged if `part.is_swapped`."""
    return torch.cat(rows.chunk(2)[::-1]) if part.is_swapped else rows
