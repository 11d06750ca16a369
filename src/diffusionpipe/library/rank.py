"""One rank of a run: its part of the model, of the batch and of the optimizer's state."""

import copy
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diffusionpipe.costs import ModelGraph
from diffusionpipe.ir import Phase, Plan
from diffusionpipe.library.models import LOSS, Model, public
from diffusionpipe.library.saves import OptimizerState, RankTensors, read_save, write_part
from diffusionpipe.models.graphs.graph import LayerGraph, attribute, layer_parameters
from diffusionpipe.models.graphs.run import needed_layers, run_layers
from diffusionpipe.runtime.comm.places import encoded_rows, trained_layers
from diffusionpipe.runtime.comm.transport import Transport
from diffusionpipe.runtime.compute.stage import Precision
from diffusionpipe.runtime.engine.executor import Executor
from diffusionpipe.runtime.engine.slot import Output
from diffusionpipe.runtime.engine.worker import build_worker
from diffusionpipe.runtime.machine.machine_use import machine_name
from diffusionpipe.runtime.recording.clocks import RankClock, RankTrace
from diffusionpipe.runtime.weights.squares import sum_of_squares
from diffusionpipe.trainer.optim.gradient_norm import clip_factor, scale


class Rank:
    """One rank of a run: it runs its part of a plan and trains its own copy of the layers that it holds. Mutable.

    A parameter "counts" on one of the ranks that hold it, which alone gives its gradient, value and state.
    """

    def __init__(
        self,
        model: Model,
        plan: Plan,
        rank: int,
        transport: Transport,
        *,
        device: torch.device,
        precision: str,
        description: ModelGraph,
    ) -> None:
        self._model, self._plan, self._rank, self._transport, self._device = model, plan, rank, transport, device
        self._everyone = tuple(range(plan.mesh.num_ranks))
        self._graph = own_copy(model.graph, trained_layers(plan, rank), device, is_sharded=plan.mesh.shard > 1)
        autocast = torch.bfloat16 if precision == "bfloat16" else None
        self._worker = build_worker(
            self._graph,
            description,
            plan,
            rank,
            transport,
            device=device,
            precision=Precision(device=device.type, autocast=autocast),
        )
        self._optimizer: torch.optim.Optimizer | None = None
        self._has_optimizer = False
        self._clip_norm: float | None = None
        self._update: tuple[Phase, ...] = ()
        self._has_stepped = False

    # The samples of a batch.

    def rows(self) -> range:
        """The positions in the batch of the samples that this rank reads in a step; an empty range if it reads none."""
        rows = self._worker.encoded
        if rows is None:
            return range(0)
        offset = self._offset(self._worker.train)
        return range(offset + rows.start, offset + rows.stop)

    def _offset(self, executor: Executor) -> int:
        """The position in the batch of the first sample for this rank's copy of the pipeline."""
        return self._worker.place.group * executor.schedule.placement.num_samples

    def _feed(self, executor: Executor, batch: Mapping[str, Tensor]) -> None:
        rows = encoded_rows(executor.schedule, self._worker.place.worker)
        if rows is not None:
            offset = self._offset(executor)
            own = {name: tensor[offset + rows.start : offset + rows.stop] for name, tensor in batch.items()}
            self._worker.feed(executor, own)

    # Work.

    def step(self, batch: Mapping[str, Tensor]) -> float:
        """Compute a batch's gradients and, with an optimizer, update; returns the mean loss, the same on all ranks.

        `batch`: the raw inputs by name, of all samples; this rank reads only its `rows`.
        """
        worker = self._worker
        is_ahead = worker.prologue is not None
        self._update = ()
        if worker.prologue is not None:
            self._feed(worker.prologue, batch)
            worker.prologue.run()
        self._feed(worker.train, batch)
        worker.reset_gradients()
        outputs = worker.train.run()
        if is_ahead:  # each step encodes its own batch, because nobody knows the next one
            worker.train.rewind()
        self._has_stepped = True
        if self._has_optimizer:
            start = time.perf_counter()
            self._clip()
            if self._optimizer is not None:
                self._optimizer.step()
            began, end = worker.train.began, time.perf_counter()
            self._update = (Phase(worker=self._rank, name="update", start=start - began, end=end - began),)
        # In float64 the sum hardly depends on how the batch was divided.
        losses = self._gathered(outputs, LOSS, self._offset(worker.train), self._plan.batch, torch.float64)
        return float(losses.sum() / len(losses))

    def evaluate(self, batch: Mapping[str, Tensor]) -> float:
        """The mean loss of any number of samples, computed without gradients, the same on all ranks."""
        self._worker.bring_weights()
        executor = self._worker.validate
        size = executor.schedule.placement.num_samples * self._plan.mesh.data_parallel
        found = []
        for part, count in chunks(batch, size):
            self._feed(executor, part)
            with torch.no_grad():
                outputs = executor.run()
            found.append(self._gathered(outputs, LOSS, self._offset(executor), size, torch.float64)[:count])
        losses = torch.cat(found)
        return float(losses.sum() / len(losses))

    def predict(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The outputs of the last layer for any number of samples, (samples, ...), in their order, on all ranks."""
        self._worker.bring_weights()
        executor = self._worker.sample()
        result = self._model.graph.backbones[0].result
        size = executor.schedule.placement.num_samples * self._plan.mesh.data_parallel
        spec = self._worker.model.tensor(result)
        found = []
        for part, count in chunks(batch, size):
            with torch.no_grad():
                self._put(executor, part)
                outputs = executor.run()
            dtype = getattr(torch, spec.dtype)
            found.append(self._gathered(outputs, result, self._offset(executor), size, dtype, spec.shape)[:count])
        return torch.cat(found)

    def _put(self, executor: Executor, batch: Mapping[str, Tensor]) -> None:
        """Write raw inputs and outputs of frozen layers into the executor's row store, from which stages read them."""
        store = executor.store
        wanted = list(store)
        # The last block of a plan is the frozen part.
        frozen = [layer for layer in self._graph.layers if layer.name in set(self._plan.blocks[-1])]
        encoders = needed_layers(frozen, wanted, given=tuple(batch))
        placed = {name: tensor.to(self._device) for name, tensor in batch.items()}
        made = run_layers(encoders, self._graph.components, placed, targets=wanted) if encoders else {}
        offset = self._offset(executor)
        for name in wanted:
            rows = store.extents[name]
            tensor = made.get(name, placed.get(name))
            if tensor is not None:
                store.write(name, rows, tensor[offset + rows.start : offset + rows.stop])

    def _gathered(
        self,
        outputs: Sequence[Output],
        name: str,
        offset: int,
        size: int,
        dtype: torch.dtype,
        shape: tuple[int, ...] = (),
    ) -> Tensor:
        """The output tensor `name` of all `size` samples, on the CPU, the same bits on all ranks: (size, *shape).

        `offset`: the position of the first sample of this rank's copy. Each sample is computed by one rank, so the sum
        over all ranks adds zeros to it.
        """
        whole = torch.zeros((size, *shape), dtype=dtype, device=self._device)
        for output in outputs:
            if output.name == name:
                rows = slice(offset + output.rows.start, offset + output.rows.stop)
                whole[rows] = output.value.detach().to(dtype)
        if len(self._everyone) > 1:
            self._transport.all_reduce(whole, self._everyone).wait()
        return whole.cpu()

    def _from_each(self, number: Tensor) -> Tensor:
        """The `number` of each rank, in the order of ranks, float64 (ranks,); all ranks call it."""
        numbers = torch.zeros(len(self._everyone), dtype=torch.float64, device=self._device)
        numbers[self._rank] = number
        if len(self._everyone) > 1:
            self._transport.all_reduce(numbers, self._everyone).wait()
        return numbers

    def _clip(self) -> None:
        if self._clip_norm is None:
            return
        gradients = {name: p.grad for name, p in self._worker.parameters.items() if p.grad is not None}
        counted = [gradient for name, gradient in gradients.items() if name in self._worker.owned]
        norm = self._from_each(sum_of_squares(counted, self._device)).sum().sqrt()
        scale(list(gradients.values()), clip_factor(norm, self._clip_norm))

    # What it holds.

    def set_optimizer(
        self, cls: type[torch.optim.Optimizer], clip_norm: float | None, options: Mapping[str, Any]
    ) -> None:
        """Make the optimizer of the parameters that this rank holds, with whose update each `step` then ends.

        `cls`, `options`: the class and its arguments. `clip_norm`: the norm of all gradients of the model to which
        longer ones are shortened; None: no limit.
        """
        parameters = [p for p in self._worker.parameters.values() if p.requires_grad]
        self._optimizer = cls(parameters, **options) if parameters else None
        self._has_optimizer, self._clip_norm = True, clip_norm

    def set_options(self, options: Mapping[str, Any]) -> None:
        """Change options of this rank's optimizer, such as the learning rate; without an optimizer it does nothing."""
        for group in self._optimizer.param_groups if self._optimizer is not None else ():
            group.update(options)

    def gradients(self) -> dict[str, Tensor]:
        """Name -> CPU copy of the last gradient, of the parameters that count on this rank; each counts on one."""
        return {
            public(name): parameter.grad.detach().cpu().clone()
            for name, parameter in self._worker.parameters.items()
            if name in self._worker.owned and parameter.grad is not None
        }

    def parameters(self) -> dict[str, Tensor]:
        """Name -> CPU copy, of the trained parameters that count on this rank; each counts on one."""
        return {
            public(name): parameter.detach().cpu().clone()
            for name, parameter in self._worker.parameters.items()
            if name in self._worker.owned
        }

    def trace(self) -> RankTrace | None:
        """The recorded times of the last step on this rank; None before the first one."""
        if not self._has_stepped:
            return None
        executor = self._worker.train
        spans, _ = executor.recording.spans()
        is_device, began = self._device.type != "cpu", executor.began
        clock = RankClock(machine=machine_name(), is_device=is_device, met=began, began=began)
        return RankTrace(clock=clock, spans=spans, update=self._update)

    # Saves.

    def save(self, folder: Path) -> None:
        """Write the parameters that count on this rank, with optimizer states, into the existing folder of a save."""
        states: dict[str, OptimizerState] = {}
        if self._optimizer is not None:
            of_parameter = self._optimizer.state
            states = {
                public(name): dict(of_parameter[parameter])
                for name, parameter in self._worker.parameters.items()
                if name in self._worker.owned and parameter in of_parameter
            }
        write_part(folder, self._rank, RankTensors(self.parameters(), states))

    def load(self, folder: Path) -> None:
        """Set this rank's parameters and optimizer states to the values in the folder of a save, of any layout."""
        own = {public(name): parameter for name, parameter in self._worker.parameters.items()}
        part = read_save(folder, own)
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(part.parameters[name])
        if self._optimizer is None:
            return
        self._optimizer.state.clear()
        for name, parameter in own.items():
            if name in part.states:
                self._optimizer.state[parameter] = {
                    key: _placed(value, parameter) for key, value in part.states[name].items()
                }

    def barrier(self) -> None:
        """Wait until all ranks have called it."""
        self._from_each(torch.zeros(()))

    def agreed(self, number: float) -> float:
        """The `number` that rank 0 was called with, on every rank; all ranks call it."""
        return float(self._from_each(torch.tensor(float(number), dtype=torch.float64))[0])


def _placed(value: Any, parameter: Tensor) -> Any:
    """A value of an optimizer's state on the parameter's device; numbers, such as the count of steps, as they are."""
    if isinstance(value, Tensor) and value.ndim:
        return value.to(parameter.device)
    return value


def own_copy(graph: LayerGraph, held: Collection[str], device: torch.device, *, is_sharded: bool) -> LayerGraph:
    """A copy of the graph with its own modules on the device, for a rank that holds the layers `held`.

    Trained parameters of other layers are the model's own, so that the ranks in threads together hold one copy more of
    each part. With `is_sharded` all are copied, because sharding takes weights away from modules.
    """
    others = {layer.name for layer in graph.layers} - set(held) if not is_sharded else set()
    mine = {id(parameter) for parameter in layer_parameters(graph, held).values()}
    shared = {
        id(parameter): parameter
        for parameter in layer_parameters(graph, others).values()
        if parameter.requires_grad and id(parameter) not in mine
    }
    copied: dict[int, Any] = dict(shared)
    # deepcopy takes an object that is in its memo for a copy that exists already.
    components = {name: copy.deepcopy(module, copied) for name, module in graph.components.items()}
    for layer in graph.layers:
        for name in layer.modules:
            owned = attribute(components[layer.component], name)
            is_own = isinstance(owned, nn.Module) and not any(id(p) in shared for p in owned.parameters())
            if is_own and isinstance(owned, nn.Module):
                owned.to(device)
    return replace(graph, components=components)


def chunks(batch: Mapping[str, Tensor], size: int) -> list[tuple[dict[str, Tensor], int]]:
    """A batch in parts of `size` samples, each as (name -> tensor, number of its samples that are the batch's own).

    The last part is filled up with copies of its last sample.
    """
    total = len(next(iter(batch.values())))
    found = []
    for start in range(0, total, size):
        count = min(size, total - start)
        part = {name: tensor[start : start + count] for name, tensor in batch.items()}
        if count < size:
            part = {name: torch.cat([t, t[-1:].expand(size - count, *t.shape[1:])]) for name, t in part.items()}
        found.append((part, count))
    return found
