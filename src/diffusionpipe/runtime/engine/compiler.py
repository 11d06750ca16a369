"""Actions to instructions: every route is resolved once, before the first iteration.

An instruction is a pair of closures (wait, run); `runtime.engine.executor` says what happens to them. The closures know
the slots that they read and write, one for each stage and micro-batch: nothing is looked up while they run.

One worker with two stages, one micro-batch, waits of no length in place of compute. The forward of stage 1 takes "x"
from the slot of stage 0, which then drops it [1], and its backward leaves the gradient of "x" for stage 0 [2]:

>>> from diffusionpipe.costs import Costs, StageCosts, TensorSpec
>>> from diffusionpipe.ir import Edge, Range, parse_action
>>> from diffusionpipe.passes import connect_blocks
>>> from diffusionpipe.runtime.engine.equipment import Equipment
>>> from diffusionpipe.runtime.engine.routing import routes_of
>>> from diffusionpipe.runtime.rehearsals.virtual import virtual_stages
>>> from diffusionpipe.schedules.building.shapes import Pipe, schedule_of
>>> order = [parse_action(text) for text in "0F0 1F0 1B0 0B0".split()]
>>> schedule = schedule_of("example", [Pipe(workers=(0, 0), microbatches=(2,))], [order])
>>> schedule = connect_blocks(schedule, [Edge(producer=0, consumer=1, tensors=("x",), gradients=("x",))])
>>> tensors = {name: TensorSpec(name=name, shape=(), needs_gradient=name != "noisy") for name in ("noisy", "x", "loss")}
>>> costs = Costs(stages=(StageCosts(forward=0, backward=0),) * 2)
>>> stages = virtual_stages(schedule, 0, costs=costs, tensors=tensors, inputs=("noisy",))
>>> slots, store = {(0, 0): Slot(), (1, 0): Slot()}, RowStore({"noisy": Range(0, 2)}, tensors, torch.device("cpu"))
>>> compiler = Compiler(
...     schedule=schedule, worker=0, routes=routes_of(schedule, 0), releases={}, slots=slots, works=(), held=(),
...     equipment=Equipment(stages=stages, tensors=tensors, transport=None, device=torch.device("cpu")),
...     outputs=[], reading=store, writing=store, trained=frozenset({0, 1}),
... )
>>> for action in order:
...     wait, run = compiler.instruction(action)
...     run()
...     print(action, wait, "stage 0 holds", [*slots[0, 0].outputs], "stage 1", [*slots[1, 0].input_gradients])
0F0 None stage 0 holds ['x'] stage 1 []
1F0 None stage 0 holds [] stage 1 []
1B0 None stage 0 holds [] stage 1 ['x']
0B0 None stage 0 holds [] stage 1 []
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from diffusionpipe.errors import ScheduleError
from diffusionpipe.ir import Action, Op
from diffusionpipe.ir.action import COMPUTE_OPS
from diffusionpipe.runtime.compute.backward import run_backward
from diffusionpipe.runtime.compute.store import RowStore
from diffusionpipe.runtime.engine.equipment import Equipment, nothing
from diffusionpipe.runtime.engine.routing import MessagePart, Route
from diffusionpipe.runtime.engine.slot import Output, Slot, count_read
from diffusionpipe.runtime.engine.transfers import Transfers

Instruction = tuple[Callable[[], None] | None, Callable[[], None]]
"""(wait, run) of an action: a function that waits for messages, None if there are none, and one that works."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler(Transfers):
    """Makes the instructions of one worker's actions; it holds the slots, stores and modules to which they refer."""

    outputs: list[Output]
    """The list to which the results of the iteration are added."""
    reading: RowStore
    """The store from which forwards read frozen outputs."""
    trained: frozenset[int]
    """The numbers of the stages that have a backward."""

    def of_size(self, equipment: Equipment) -> "Compiler":
        """A copy of the compiler with the equipment for samples of another size."""
        return replace(self, equipment=equipment)

    def instruction(self, action: Action) -> Instruction:
        """(wait, run) of an action: a function that waits for the messages it reads, and one that does its work.

        `wait` is None where there is nothing to wait for.

        Raises:
            ScheduleError: an op that the executor cannot run.
        """
        wait, run = self._plain_instruction(action)
        block = self.schedule.placement.stages[action.stage].weights
        weights = self.equipment.brought.get(block)
        if weights is None or action.op not in COMPUTE_OPS:
            return wait, run
        # UNSHARD only starts to bring the weights, so each compute waits for them.
        wait = _both(wait, weights.present)
        # Between reductions a sharded block has no gradients of other ranks' parameters. The first backward opens
        # memory for them.
        return wait, run if action.op is Op.F else _both(self.equipment.gradients[block].open, run)

    def _plain_instruction(self, action: Action) -> Instruction:
        match action.op:
            case Op.F:
                return self._compile_forward(action)
            case Op.B | Op.I:
                return self._compile_backward(action)
            case Op.W:
                return None, self._compile_weight_gradients(action)
            case Op.SEND_F | Op.SEND_B:
                return None, self.send(action)
            case Op.RECV_F | Op.RECV_B:
                return None, self.receive(action)
            case Op.ENCODE:
                return None, self._compile_encode(action)
            case Op.REDUCE_GRAD:
                block = self.equipment.gradients[self.schedule.placement.stages[action.stage].weights]
                return None, block.reduce
            case Op.UNSHARD:
                return None, self.equipment.brought[self.schedule.placement.stages[action.stage].weights].prepare
            case Op.RESHARD:
                return None, self.equipment.brought[self.schedule.placement.stages[action.stage].weights].release
        raise ScheduleError([f"worker {self.worker}: {action}: the executor does not run {action.op} yet"])

    def _compile_forward(self, action: Action) -> Instruction:
        assert action.microbatch is not None
        key = (action.stage, action.microbatch)
        slot, route, module = self.slots[key], self.routes[key], self.equipment.stages[action.stage]
        trains = action.stage in self.trained
        # Only a schedule with W defers: without W nothing would ever use up what is put aside.
        splits = Op.W in self.schedule.placement.pipeline_of(action.stage).ops
        deferred = slot.deferred if splits else None
        gather = [(name, self._compile_input(slot, route, name, trains)) for name in module.reads]
        producers = [self.slots[peer, action.microbatch] for peer in route.local_producers]
        read, with_gradient = route.read, frozenset(route.gradients)

        def forward() -> None:
            # A slot serves every iteration, so its counts of reads start again.
            slot.num_reads, slot.num_gradient_reads = route.num_reads, route.num_gradient_reads
            tensors = {name: get() for name, get in gather}
            # All inputs have been taken, so producers of this worker may drop theirs.
            for producer in producers:
                count_read(producer, is_gradient=False)  # [1]
            if trains:
                outputs = module(tensors, deferred)
            else:
                with torch.no_grad():
                    outputs = module(tensors)
            # A layer that reads an input again in its backward holds it through its graph.
            slot.inputs.clear()
            for name, value in outputs.items():
                if name in read:
                    # A reader makes a leaf of the detached value, because each stage walks its own graph.
                    slot.outputs[name] = value.detach()
                    if trains and name in with_gradient and value.requires_grad:  # a layer may detach
                        # The edge holds the node of the graph and not the tensor, so the output's memory goes with its
                        # last reader.
                        slot.graph[name] = get_gradient_edge(value)
                else:
                    # A layer may hand on a view of the store's rows, which a later batch overwrites.
                    lasting = self.reading.lasting(value.detach())
                    self.outputs.append(Output(name, route.microbatch, route.batch_rows, lasting))
                    if trains and value.requires_grad:
                        slot.graph[name] = get_gradient_edge(value)

        return self.wait_for(route.arrivals, action), forward

    def _compile_input(self, slot: Slot, route: Route, name: str, trains: bool) -> Callable[[], Tensor]:
        """A function that returns one input of a forward: rows of the store, a neighbour's output, or received parts.

        `trains`: whether the stage has a backward.
        """
        parts = route.inputs.get(name)
        if parts is None:
            # One view for all iterations: buffers of the store never move, and `Program` makes an instruction for each
            # size.
            view = self.reading.view(name, route.batch_rows)
            return lambda: view
        value = self._compile_value(slot, route, name, parts)
        if not (trains and name in route.with_gradient and self.equipment.tensors[name].needs_gradient):
            return value

        # The gradient of this leaf is the one that goes back to the producers.
        def leaf() -> Tensor:
            tensor = slot.leaves[name] = value().detach().requires_grad_()
            return tensor

        return leaf

    def _compile_value(
        self, slot: Slot, route: Route, name: str, parts: tuple[MessagePart, ...]
    ) -> Callable[[], Tensor]:
        # An input comes in several parts where producer and consumer divide a micro-batch over replicas in different
        # ways.
        local = [
            (part.rows, part.peer_rows, self.slots[part.peer, route.microbatch].outputs)
            for part in parts
            if part.message is None
        ]
        if len(parts) == 1 and local:
            _, rows, outputs = local[0]
            return lambda: outputs[name][rows.start : rows.stop]
        # RECV has put all parts into this memory (`receive`).
        if not local:
            return lambda: slot.inputs[name]
        buffer = self.buffer_of(slot, route, name)

        # Received parts are there already, because F has waited for them; parts of this worker are copied beside them.
        def gather() -> Tensor:
            value = buffer()
            for rows, peer_rows, outputs in local:
                value[rows.start : rows.stop].copy_(outputs[name][peer_rows.start : peer_rows.stop])
            return value

        return gather

    def _compile_backward(self, action: Action) -> Instruction:
        """The wait and the work of a B or an I.

        Both walk the graph in the same way; where the forward was told to defer, weight gradients are put aside.
        """
        assert action.microbatch is not None
        key = (action.stage, action.microbatch)
        slot, route = self.slots[key], self.routes[key]
        added = self._addition(action)
        consumers = [self.slots[peer, action.microbatch] for peer in route.local_consumers]
        gradient_of = {name: self._compile_gradient(slot, route, name) for name in route.gradients}
        # False where no producer trains; the gradients of the leaves are dropped then.
        keeps_gradients = route.num_gradient_reads > 0

        def backward() -> None:
            graph, leaves = slot.graph, slot.leaves
            # An output that has a graph and no reader is a loss.
            gradients = [
                gradient_of[name]() if name in gradient_of else self._loss_gradient(route, name) for name in graph
            ]
            for consumer in consumers:
                count_read(consumer, is_gradient=True)
            # Empty where no output depends on anything trained. The readers of input gradients still get zeros [2].
            if graph:
                run_backward(graph.values(), gradients)
            graph.clear()
            slot.arrived.clear()
            # A producer waits for a gradient of each of its outputs, even if no layer here has used one.
            if keeps_gradients:
                for name, leaf in leaves.items():
                    gradient = leaf.grad
                    slot.input_gradients[name] = torch.zeros_like(leaf) if gradient is None else gradient  # [2]
            leaves.clear()
            added()

        return self.wait_for(route.gradient_arrivals, action), backward

    def _compile_weight_gradients(self, action: Action) -> Callable[[], None]:
        assert action.microbatch is not None
        return self.slots[action.stage, action.microbatch].deferred.run

    def _addition(self, action: Action) -> Callable[[], None]:
        """A function that tells the stage's gradients that this backward has added to them."""
        block = self.equipment.gradients.get(self.schedule.placement.stages[action.stage].weights)
        return nothing if block is None else partial(block.added, is_whole=action.op is Op.B)

    def _loss_gradient(self, route: Route, name: str) -> Tensor:
        """The gradient of the step's loss for each sample's loss, (route.num_rows,): all are `loss_scale`.

        The step's loss is `loss_scale` times the sum of the samples' losses.
        """
        return torch.full(
            (route.num_rows,), self.equipment.loss_scale, dtype=self.dtype(name), device=self.equipment.device
        )

    def _compile_gradient(self, slot: Slot, route: Route, name: str) -> Callable[[], Tensor]:
        """A function that returns the gradient of one output: the sum over all stages that read it, in edge order."""
        parts = route.gradients[name]
        getters = [(part.rows, self._compile_part(slot, route, name, part)) for part in parts]
        # The only reader's gradient is passed on as it is.
        if len(parts) == 1 and len(parts[0].rows) == route.num_rows:
            return getters[0][1]
        is_whole = all(len(part.rows) == route.num_rows for part in parts)

        def gradient() -> Tensor:
            total: Tensor | None = None
            for rows, get in getters:
                part = get()
                if len(rows) == route.num_rows:
                    # `total + part` is a new tensor. Rows are added in place, and the first part may be a message or
                    # belong to another stage: then a copy of it is the total.
                    total = (part if is_whole else part.clone()) if total is None else total + part
                else:
                    if total is None:
                        total = part.new_zeros((route.num_rows, *part.shape[1:]))
                    total[rows.start : rows.stop] += part
            assert total is not None
            return total

        return gradient

    def _compile_part(self, slot: Slot, route: Route, name: str, part: MessagePart) -> Callable[[], Tensor]:
        """A function that returns the gradient that one reader of an output gives back."""
        if part.message is not None:
            arrived, key = slot.arrived, (name, part.peer)
            return lambda: arrived[key]
        gradients, rows = self.slots[part.peer, route.microbatch].input_gradients, part.peer_rows
        return lambda: gradients[name][rows.start : rows.stop]

    def _compile_encode(self, action: Action) -> Callable[[], None]:
        assert action.slot is not None
        assert self.equipment.encoder is not None, "a schedule with fills needs an encoder"
        fill, encoder, store = self.schedule.fills[action.slot], self.equipment.encoder, self.writing
        return lambda: encoder.run(fill, store)


def _both(first: Callable[[], None] | None, second: Callable[[], None]) -> Callable[[], None]:
    """A function that runs the first, if there is one, and then the second."""
    if first is None:
        return second

    def both() -> None:
        first()
        second()

    return both
