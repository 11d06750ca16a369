"""Messages as instructions: the tensors that are sent, the places where they arrive, and when a sent tensor may go.

An input or a gradient arrives in new memory each time. The allocator, malloc or torch's of the GPU, gives out memory
again whose last tensor is gone. So nothing stays here for later, and no list of readers is needed. A sent tensor is
held here until the backend has read it: neither gloo's works nor all of NCCL's hold their tensors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from diffusionpipe.ir import Action, Message, Schedule
from diffusionpipe.runtime.comm.transport import Pending
from diffusionpipe.runtime.compute.store import RowStore
from diffusionpipe.runtime.engine.equipment import Equipment
from diffusionpipe.runtime.engine.routing import Route
from diffusionpipe.runtime.engine.slot import Slot, count_read

Sending = tuple[list[Pending], list[Tensor]]
"""The works of a message that are under way, and the tensors that are being sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """Makes the instructions of messages (send, receive, wait); it holds the tensors and transfers under way."""

    schedule: Schedule
    worker: int
    equipment: Equipment
    routes: Mapping[tuple[int, int], Route]
    releases: Mapping[Action, tuple[Sending, ...]]
    """Action -> the sends that are surely over in front of it (`timing.sends`)."""
    slots: Mapping[tuple[int, int], Slot]
    works: tuple[list[Pending], ...]
    """The transfers under way of each message, by message."""
    held: tuple[list[Tensor], ...]
    """The tensors that are being sent of each message, by message."""
    writing: RowStore
    """The store to which fills and frozen messages write: another one than forwards read if they work ahead."""

    def wait_for(self, messages: tuple[int, ...], action: Action) -> Callable[[], None] | None:
        """A function that waits for messages and drops the tensors of sends that are over; None: nothing to do.

        `messages`: the numbers of the messages that the action reads. `action`: its sends in `releases` are dropped.
        """
        over = self.releases.get(action, ())
        pending = [*(self.works[k] for k in messages), *(works for works, _ in over)]
        held = [tensors for _, tensors in over]
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
        """A function that starts to send a message: rows of the store, a stage's outputs or its input gradients."""
        assert action.slot is not None
        k, message = action.slot, self.schedule.messages[action.slot]
        placement = self.schedule.placement
        works, held, send = self.works[k], self.held[k], self.equipment.transport.send
        destination = self.equipment.rank_of_worker(placement.stages[message.destination].worker)
        if placement.is_frozen(message.source):
            # These views are not put into `held`: the store outlives the send, which is waited for before the rows are
            # written again.
            views = [view for name in message.tensors for view in self.writing.views(name, message.samples)]
            return lambda: works.extend([send(view, destination) for view in views])
        key = (message.source, message.microbatch)
        slot, names, is_gradient = self.slots[key], message.tensors, message.is_gradient
        source = slot.input_gradients if is_gradient else slot.outputs
        rows = message.samples.shifted(-placement.samples(*key).start)
        is_whole = len(rows) == self.routes[key].num_rows

        def run() -> None:
            for name in names:
                tensor = source[name] if is_whole else source[name][rows.start : rows.stop]
                # Backends accept contiguous memory alone.
                tensor = tensor.contiguous()
                held.append(tensor)
                works.append(send(tensor, destination))
            count_read(slot, is_gradient)

        return run

    def receive(self, action: Action) -> Callable[[], None]:
        """A function that starts to receive a message: frozen outputs into the store, all else into new tensors."""
        assert action.slot is not None
        message = self.schedule.messages[action.slot]
        placement = self.schedule.placement
        works, recv = self.works[action.slot], self.equipment.transport.recv
        source = self.equipment.rank_of_worker(placement.stages[message.source].worker)
        if placement.is_frozen(message.source):
            views = [view for name in message.tensors for view in self.writing.views(name, message.samples)]
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
        self, slot: Slot, message: Message, num_rows: int, works: list[Pending], source: int
    ) -> Callable[[], None]:
        arrived, recv = slot.arrived, self.equipment.transport.recv
        makers = [((name, message.source), self.memory_for(name, num_rows)) for name in message.tensors]

        def run() -> None:
            for key, make in makers:
                buffer = arrived[key] = make()
                works.append(recv(buffer, source))

        return run

    def buffer_of(self, slot: Slot, route: Route, name: str) -> Callable[[], Tensor]:
        """A function that returns the memory of a slot's input, (route.num_rows, ...), made at its first call."""
        inputs, make = slot.inputs, self.memory_for(name, route.num_rows)

        def buffer() -> Tensor:
            found = inputs.get(name)
            if found is None:
                found = inputs[name] = make()
            return found

        return buffer

    def memory_for(self, name: str, num_rows: int) -> Callable[[], Tensor]:
        """A function that returns a new uninitialised tensor, (num_rows, ...), of a tensor's dtype and shape."""
        shape = (num_rows, *self.equipment.tensors[name].shape)
        # Faster than `torch.empty`, which reads a dtype and a device each time.
        return partial(torch.empty(0, dtype=self.dtype(name), device=self.equipment.device).new_empty, shape)

    def dtype(self, name: str) -> torch.dtype:
        """The torch dtype of the tensor with this name."""
        dtype = getattr(torch, self.equipment.tensors[name].dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype
