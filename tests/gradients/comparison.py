"""One random case: a graph under a layout, several batches in turn, against one process on the whole batch."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

import torch
from gradients.graphs import Model, random_model
from gradients.orders import SOURCES, random_layout, random_schedule
from kit.layouts import CPU, copies_of, feed_rows
from torch import Tensor

from diffusionpipe.costs import ModelGraph
from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Op, Plan
from diffusionpipe.models.graphs.describe import describe
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.runtime.comm.threads import run_threads
from diffusionpipe.runtime.comm.transport import Transport
from diffusionpipe.runtime.engine.worker import build_worker

TOLERANCE = 1e-12
"""Of the norm of all gradients; the numbers that are added up are the same, in another order."""
NUM_STEPS = 3
MAX_DRAWS = 40


@dataclass(frozen=True)
class Case:
    """A graph and a layout of it."""

    source: str
    model: Model
    described: ModelGraph
    layout: Layout
    plan: Plan
    num_refused: int
    """Layouts that were drawn before and refused: a weight in common on several ranks, sizes that cannot be."""


@dataclass(frozen=True)
class Result:
    """How a case ended."""

    error: float
    """The largest distance of a gradient from that of one process, of the norm of all."""
    worst: str
    """Whose it is, and in which step."""


def random_case(seed: int, number: int) -> Case:
    """The case of that number: it follows from seed and number alone."""
    random = Random(f"{seed} {number}")
    source = SOURCES[number % len(SOURCES)]
    for num_refused in range(MAX_DRAWS):
        torch.manual_seed(random.randrange(2**31))
        try:
            schedule = random_schedule(random, source, number // len(SOURCES))
            num_blocks = 1 + max(stage.weights for stage in schedule.placement.stages)
            model = random_model(random, max(num_blocks + 1, random.randint(4, 10)), ties=random.random() < 0.15)
            described = describe(model.graph)
            for _ in range(random.choice([1, 8])):  # of half of the cases the first that hands on a view
                layout = random_layout(random, schedule, described.backbone_layers)
                case = Case(source, model, described, layout, build_plan(described, layout), num_refused)
                if handed_views(case):
                    break
        except ConfigError:
            continue
        return case
    raise AssertionError(f"case {number} of seed {seed}: no layout in {MAX_DRAWS} draws")


def handed_views(case: Case) -> int:
    """How many views of received tensors stages hand to other stages of their rank, in one micro-batch of each."""
    placement, memory = case.plan.train.placement, case.model.memory()
    stages, found = placement.stages, 0
    received = {
        (message.destination, name)
        for message in case.plan.train.messages
        if not message.is_gradient and not placement.is_frozen(message.source)
        for name in message.tensors
    }
    for pipeline in placement.pipelines:
        for edge in pipeline.edges:
            if placement.is_frozen(edge.producer) or stages[edge.producer].worker != stages[edge.consumer].worker:
                continue
            found += sum(any((edge.producer, home) in received for home in memory[name]) for name in edge.tensors)
    return found


def compare(case: Case) -> Result:
    """Several steps in threads, the batches different, each against plain autograd."""
    graph, plan = case.model.graph, case.plan
    batches = [case.model.inputs(plan.batch, seed) for seed in range(NUM_STEPS)]
    copies = copies_of(graph, plan.mesh.num_ranks)

    def main(rank: int, transport: Transport) -> list[tuple[float, dict[str, Tensor]]]:
        worker = build_worker(copies[rank], case.described, plan, rank, transport, device=CPU)
        steps = []
        for inputs in batches:
            feed_rows(worker, inputs)
            worker.reset_gradients()
            outputs = worker.train.run()
            gradients = {name: p.grad.clone() for name, p in worker.parameters.items() if p.grad is not None}
            steps.append((sum(float(one.value.sum()) for one in outputs) / plan.batch, gradients))
        return steps

    ranks = run_threads(plan.mesh.num_ranks, main)
    worst = Result(0.0, "")
    for step, inputs in enumerate(batches):
        loss, expected = case.model.whole(inputs)
        total = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
        found = [(abs(sum(rank[step][0] for rank in ranks) - loss) / abs(loss), "loss")]
        missing = dict.fromkeys(expected)
        for rank in ranks:
            for name, gradient in rank[step][1].items():
                found.append((float((gradient - expected[name]).norm() / total), name))
                missing.pop(name, None)
        found += [(1.0, f"{name}, which no rank has,") for name in missing]
        error, name = max(found, key=lambda one: (one[0] != one[0], one[0]))
        if not error <= worst.error:
            worst = Result(error, f"{name} in step {step}")
    return worst


def features(case: Case) -> Mapping[str, bool]:
    """What of a case the table counts."""
    layout, ops = case.layout, {action.op for _, action in case.plan.train.actions()}
    placement = case.plan.train.placement
    homes = [stage.worker for index, stage in enumerate(placement.stages) if not placement.is_frozen(index)]
    return {
        "split backward": Op.W in ops,
        "several stages a rank": max(Counter(homes).values()) > 1,
        "replicas": max(layout.replicas, default=1) > 1,
        "data parallel": layout.data_parallel > 1,
        "buckets": layout.buckets > 1,
        "recomputed": bool(case.plan.checkpointed),
        "weight in two layers": case.model.tied is not None,
        "hands on a view": handed_views(case) > 0,
    }
