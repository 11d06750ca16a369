"""Frozen work: the layers that need no gradient, on some samples."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor, nn

from diffusionpipe.ir import Fill, Range
from diffusionpipe.models.graphs.graph import Layer
from diffusionpipe.models.graphs.kept import in_parts
from diffusionpipe.models.graphs.run import needed_layers
from diffusionpipe.runtime.compute.stage import LayerStage, Precision
from diffusionpipe.runtime.compute.store import RowStore
from diffusionpipe.runtime.recording.layer_watch import LayerWatch
from diffusionpipe.runtime.weights.bringing import BroughtLayer, brought


class FillRunner(Protocol):
    """An object that runs frozen work, a fill at a time, on the samples in a store."""

    def run(self, fill: Fill, store: RowStore) -> None:
        """Run the fill's layers on its samples; inputs come from the store, outputs go into it."""
        ...


@dataclass(slots=True)
class _Carried:
    """Some rows of a tensor that one fill has computed and later fills of the same samples read."""

    samples: Range
    """The rows of the batch that `value` has."""
    value: Tensor
    num_reads: int
    """Samples still to be read, counted once for each fill that reads them."""


class Encoder:
    """Runs the frozen layers of fills on rows of a store, without gradients.

    A fill may hold some layers only; tensors that later fills of the same samples read are carried from one to the
    other, in any chunks of either, and dropped after its last reader.

    Kept tensors are in the store. Where one was put in from outside (`RowStore.given`), the layers that nothing else
    needs do not run for that row.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        components: Mapping[str, nn.Module],
        *,
        outputs: Collection[str],
        fills: Sequence[Fill] = (),
        kept: Collection[str] = (),
        precision: Precision | None = None,
        weights: Mapping[str, BroughtLayer] = MappingProxyType({}),
        watch: LayerWatch | None = None,
    ) -> None:
        """`layers`: the frozen block. `outputs`: tensors of it that stages read.

        `fills`: all that an iteration runs, in its order. `kept`: tensors of the layers, or between their parts, that
        may be put in from outside. `weights`: by layer, the weights that are elsewhere while the layer does not run.
        `watch`: called for every layer while it is on; None: no calls.
        """
        self._watch = watch
        self._layers = tuple(layers)
        self._kept = frozenset(kept)
        self._components = components
        self._outputs = frozenset(outputs)
        self._precision = precision
        self._fills = tuple(fills)
        self._weights = weights
        self._next_weights = self._first_after_each()
        self._stages: dict[tuple[Range, frozenset[str]], LayerStage] = {}
        self._carried: dict[str, list[_Carried]] = {}

    def _stage(self, layers: Range, given: frozenset[str] = frozenset()) -> LayerStage:
        """A stage of the layers in a range that must run although the `given` tensors are in the store already.

        It writes the kept tensors and all that later fills or other stages read.
        """
        key = layers, given
        if key not in self._stages:
            own = self._needed(layers, given)
            later = {
                name for layer in self._needed(Range(layers.stop, len(self._layers)), given) for name in layer.reads
            }
            wanted = self._outputs | later | self._kept
            outputs = [name for layer in own for name in layer.writes if name in wanted]
            own = brought(own, self._weights)
            self._stages[key] = LayerStage(
                own, self._components, outputs=outputs, precision=self._precision, watch=self._watch
            )
        return self._stages[key]

    def _needed(self, layers: Range, given: frozenset[str]) -> tuple[Layer, ...]:
        """The layers in a range that must run although the `given` tensors are in the store already.

        If the encoder has kept tensors, layers that have parts are replaced by them.
        """
        own = self._layers[layers.start : layers.stop]
        if not self._kept:
            return own
        names = {layer.name for layer in needed_layers(in_parts(self._layers), self._outputs, given=given)}
        return tuple(layer for layer in in_parts(own) if layer.name in names)

    def run(self, fill: Fill, store: RowStore) -> None:
        """Run the fill's layers on its samples; inputs come from the store, outputs go into it."""
        self.run_rows(fill, store)
        self.end(fill)

    def run_rows(self, fill: Fill, store: RowStore) -> None:
        """Run a fill's layers on its samples, or on a part of them; `end` is called after the last part."""
        for rows, given in store.split_alike(fill.samples) if self._kept else [(fill.samples, frozenset[str]())]:
            self._run_alike(replace(fill, samples=rows), given, store)

    def _run_alike(self, fill: Fill, given: frozenset[str], store: RowStore) -> None:
        """Run the layers of a fill that must run although all its samples have the `given` tensors in the store."""
        stage = self._stage(fill.layers, given)
        stored = self._outputs | self._kept
        with torch.no_grad():
            # A kept tensor is read from the store: a layer has written it there or it was put in with the batch.
            tensors = {
                name: self._take(name, fill.samples)
                if name in self._carried and name not in self._kept
                else store.view(name, fill.samples)
                for name in stage.reads
            }
            for name, value in stage(tensors).items():
                # A tensor may be needed in both places: stages read the store, later fills what is carried.
                if name in stored:
                    store.write(name, fill.samples, value)
                if name not in self._kept:
                    self._carry(name, value, fill, given)

    def end(self, fill: Fill) -> None:
        """Begin to bring the next weights that are needed after this fill and are elsewhere, if there are any."""
        if fill in self._next_weights:
            self._next_weights[fill].prepare()

    def _first_after_each(self) -> dict[Fill, BroughtLayer]:
        """Fill -> the weights that are brought next after it; after the last fill, the first of the next iteration."""
        first: dict[Fill, BroughtLayer] = {}
        following: BroughtLayer | None = None
        # Backwards through two iterations, because the fill after the last one is the first of the next iteration.
        for fill in (*self._fills, *self._fills)[::-1]:
            if following is not None:
                first[fill] = following
            own = self._layers[fill.layers.start : fill.layers.stop]
            following = next((self._weights[layer.name] for layer in own if layer.name in self._weights), following)
        return first

    def _carry(self, name: str, value: Tensor, fill: Fill, given: frozenset[str]) -> None:
        """Keep a tensor for the later fills that read it."""
        num_reads = sum(
            len(other.samples.intersection(fill.samples))
            for other in self._fills
            if other.stage == fill.stage
            and other.layers.start >= fill.layers.stop
            and name in self._stage(other.layers, given).reads
        )
        if num_reads:
            carried = _Carried(samples=fill.samples, value=value, num_reads=num_reads)
            self._carried.setdefault(name, []).append(carried)

    def _take(self, name: str, samples: Range) -> Tensor:
        """These rows of a carried tensor, joined from the chunks in which it was made.

        Chunks that no later fill reads are dropped.
        """
        parts: list[Tensor] = []
        for carried in sorted(self._carried[name], key=lambda carried: carried.samples.start):
            common = carried.samples.intersection(samples)
            if common:
                start = carried.samples.start
                parts.append(carried.value[common.start - start : common.stop - start])
                carried.num_reads -= len(common)
        left = [carried for carried in self._carried[name] if carried.num_reads]
        if left:
            self._carried[name] = left
        else:
            del self._carried[name]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class SizedEncoder:
    """Runs fills over samples of several sizes, each by the layers of its size."""

    def __init__(self, encoders: Sequence[Encoder]) -> None:
        """`encoders`: one for each size."""
        self._encoders = tuple(encoders)

    def run(self, fill: Fill, store: RowStore) -> None:
        """Run the fill's layers on its samples, cell by cell."""
        for rows in store.split(fill.samples):
            self._encoders[store.size_of(rows)].run_rows(replace(fill, samples=rows), store)
        # All encoders have the same fills and share the weights, so one of them prepares the next ones.
        self._encoders[0].end(fill)
