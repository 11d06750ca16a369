"""Messages and their buffers as instructions: what is sent, what arrives where, and when a sent tensor may go."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from diffusionpipe.ir import Action, Message, Schedule
from diffusionpipe.runtime.buffers import BufferPool
from diffusionpipe.runtime.equipment import Equipment
from diffusionpipe.runtime.routing import Route
from diffusionpipe.runtime.slot import Slot, count_read
from diffusionpipe.runtime.store import RowStore
from diffusionpipe.runtime.transport import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """What the instructions of messages refer to, and how they are made; the computes' come on top (`Compiler`)."""

    schedule: Schedule
    worker: int
    equipment: Equipment
    pool: BufferPool
    routes: Mapping[tuple[int, int], Route]
    releases: Mapping[int, tuple[int, ...]]
    slots: Mapping[tuple[int, int], Slot]
    works: tuple[list[Work], ...]
    """Per message what is under way."""
    held: tuple[list[Tensor], ...]
    """Per message the tensors that are being sent."""
    writing: RowStore
    """Where fills and frozen messages write: another store if they work ahead."""

    def wait_for(self, messages: tuple[int, ...]) -> Callable[[], None] | None:
        """Wait for arrivals, then drop the sends that are over by then."""
        over = sorted({sent for k in messages for sent in self.releases.get(k, ())})
        pending = [self.works[k] for k in (*messages, *over)]
        held = [self.held[k] for k in over]
        if not pending:
            return None

        def wait() -> None:
            for works in pending:
                for work in works:
                    work.wait()
                works.clear()
            for tensors in held:
                tensors.clear()

        return wait

    def send(self, action: Action) -> Callable[[], None]:
        """Starts sending a message: of frozen outputs rows of the store, else a stage's output or input gradient."""
        assert action.slot is not None
        k, message = action.slot, self.schedule.messages[action.slot]
        placement = self.schedule.placement
        works, held, send = self.works[k], self.held[k], self.equipment.transport.send
        destination = self.equipment.rank_of_worker(placement.stages[message.destination].worker)
        if placement.is_frozen(message.source):
            views = [self.writing.view(name, message.samples) for name in message.tensors]
            return lambda: works.extend([send(view, destination) for view in views])
        key = (message.source, message.microbatch)
        slot, names, is_gradient = self.slots[key], message.tensors, message.is_gradient
        source = slot.input_gradients if is_gradient else slot.outputs
        rows = message.samples.shifted(-placement.samples(*key).start)
        is_whole = len(rows) == self.routes[key].num_rows

        def run() -> None:
            for name in names:
                tensor = source[name] if is_whole else source[name][rows.start : rows.stop]
                tensor = tensor.contiguous()
                held.append(tensor)
                works.append(send(tensor, destination))
            count_read(slot, is_gradient)

        return run

    def receive(self, action: Action) -> Callable[[], None]:
        """Starts receiving a message: into the store, into buffers of the pool, or into new tensors for gradients."""
        assert action.slot is not None
        message = self.schedule.messages[action.slot]
        placement = self.schedule.placement
        works, recv = self.works[action.slot], self.equipment.transport.recv
        source = self.equipment.rank_of_worker(placement.stages[message.source].worker)
        if placement.is_frozen(message.source):
            views = [self.writing.view(name, message.samples) for name in message.tensors]
            return lambda: works.extend([recv(view, source) for view in views])
        key = (message.destination, message.microbatch)
        slot, route = self.slots[key], self.routes[key]
        rows = message.samples.shifted(-placement.samples(*key).start)
        if message.is_gradient:
            return self._receive_gradient(slot, message, len(rows), works, source)
        buffers = [self.buffer_of(slot, route, name) for name in message.tensors]
        is_whole = len(rows) == route.num_rows

        def run() -> None:
            for buffer in buffers:
                tensor = buffer() if is_whole else buffer()[rows.start : rows.stop]
                works.append(recv(tensor, source))

        return run

    def _receive_gradient(
        self, slot: Slot, message: Message, num_rows: int, works: list[Work], source: int
    ) -> Callable[[], None]:
        arrived, recv = slot.arrived, self.equipment.transport.recv
        makers = [
            (
                (name, message.source),
                torch.empty(0, dtype=self.dtype(name), device=self.equipment.device).new_empty,
                shape,
            )
            for name in message.tensors
            for shape in [(num_rows, *self.equipment.tensors[name].shape)]
        ]

        def run() -> None:
            # Not from the pool: autograd may keep a view of an incoming gradient in a parameter's `.grad`.
            for key, new_empty, shape in makers:
                buffer = arrived[key] = new_empty(shape)
                works.append(recv(buffer, source))

        return run

    def buffer_of(self, slot: Slot, route: Route, name: str) -> Callable[[], Tensor]:
        """Makes the buffer of an input that arrives in parts when the first part needs it."""
        shape, dtype = (route.num_rows, *self.equipment.tensors[name].shape), self.dtype(name)
        inputs, take = slot.inputs, self.pool.take

        def buffer() -> Tensor:
            found = inputs.get(name)
            if found is None:
                found = inputs[name] = take(shape, dtype)
            return found

        return buffer

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor by its name."""
        dtype = getattr(torch, self.equipment.tensors[name].dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype
