"""What stands in an iteration besides the actions."""

import torch

from diffusionpipe.costs import Costs, StageCosts, TensorSpec
from diffusionpipe.passes import communicate
from diffusionpipe.runtime.comm.threads import run_threads
from diffusionpipe.runtime.engine.equipment import Equipment
from diffusionpipe.runtime.engine.executor import Executor
from diffusionpipe.runtime.rehearsals.virtual import virtual_stages
from diffusionpipe.schedules import one_f_one_b
from diffusionpipe.simulator import simulate


class Noting:
    """A stage that says when it runs."""

    def __init__(self, stage, events):
        self.stage, self.events, self.reads = stage, events, stage.reads

    def __call__(self, tensors, deferred=None):
        self.events.append("F")
        return self.stage(tensors, deferred)


def test_a_stage_prepares_once_in_an_iteration_while_its_first_inputs_are_on_their_way():
    base = one_f_one_b(2, 3)
    costs = Costs(stages=(StageCosts(forward=0, backward=0),) * 2)
    schedule = communicate(base, simulate(base, costs))
    shapes = {"input": (2,), "hidden": (2,), "loss": ()}
    tensors = {n: TensorSpec(name=n, shape=s, needs_gradient=n != "input") for n, s in shapes.items()}

    def main(rank, transport):
        events = []
        stages = virtual_stages(schedule, rank, costs=costs, tensors=tensors, inputs=("input",))
        receive = transport.recv
        transport.recv = lambda buffer, source: (events.append("receive"), receive(buffer, source))[1]
        executor = Executor(
            schedule,
            rank,
            Equipment(
                stages={index: Noting(stage, events) for index, stage in stages.items()},
                tensors=tensors,
                transport=transport,
                device=torch.device("cpu"),
                raw_inputs=("input",),
                preparations={i: lambda: events.append("prepare") for i in stages},
                cleanup=lambda: events.append("clean"),
            ),
        )
        executor.run()
        executor.run()
        spans, _ = executor.recording.spans()
        return events, spans

    for rank, (events, spans) in enumerate(run_threads(2, main)):
        assert [span.action for span in spans] == list(schedule.orders[rank])
        once = [event for event in events[: len(events) // 2] if event != "receive"]
        assert once == ["prepare", "F", "F", "F", "clean"]
        assert events[: len(events) // 2] == events[len(events) // 2 :]
        if rank == 1:
            assert events.index("receive") < events.index("prepare")
