"""States of the optimizer in parts: the weights of whole copies, bit for bit, with fewer bytes and no more traffic."""

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch
from kit.descriptions import described
from kit.layouts import CPU, assert_same_step, copy_of, reference_step, run_step, step_in_threads
from kit.tiers import quick_and_slow
from kit.tiny_models import raw_inputs, tiny_dit, tiny_stable_diffusion
from torch import Tensor

from diffusionpipe.ir import Op, Sharded
from diffusionpipe.models.graphs.graph import canonical_names
from diffusionpipe.models.parameters.lora import LoraSettings, add_lora
from diffusionpipe.models.parameters.weights import materialize
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.runtime.comm.threads import run_threads
from diffusionpipe.runtime.compute.stage import Precision
from diffusionpipe.runtime.engine.worker import build_worker
from diffusionpipe.trainer.optim.optimizer import Group, build_optimizer
from diffusionpipe.trainer.optim.prodigy import PATHS, SharedProdigy

BATCH = 12
STEPS = 5
FLOAT32 = Precision()


def owned(**sizes) -> Layout:
    base = {"batch": BATCH, "stages": 1, "microbatches": 1, "data_parallel": 2, "encode_chunk": 3}
    return Layout(**base | {"sharded": Sharded.OPTIMIZER} | sizes)


def with_adapters():
    """Stable Diffusion of which adapters alone are trained."""
    graph = tiny_stable_diffusion(torch.float32)
    add_lora(graph.components, "unet", LoraSettings(rank=2))
    materialize(graph, [layer.name for layer in graph.layers], {}, device="cpu", dtype=torch.float32, seed=0)
    return graph


MODELS = {"whole": lambda: tiny_dit(torch.float32), "adapters": with_adapters}


@dataclass
class Noting:
    """A transport that notes the bytes that each rank gives away, with each collective as a ring does it."""

    transport: object
    rank: int
    sent: Counter = field(default_factory=Counter)

    def reduce(self, tensor: Tensor, destination: int, ranks: tuple[int, ...]):
        self.sent["reduce"] += tensor.nbytes if self.rank != destination else 0
        return self.transport.reduce(tensor, destination, ranks)

    def broadcast(self, tensor: Tensor, source: int, ranks: tuple[int, ...]):
        self.sent["broadcast"] += (
            tensor.nbytes if ranks.index(self.rank) != (ranks.index(source) - 1) % len(ranks) else 0
        )
        return self.transport.broadcast(tensor, source, ranks)

    def __getattr__(self, name):
        return getattr(self.transport, name)


@pytest.fixture(scope="module", params=MODELS)
def prepared(request):
    graph = MODELS[request.param]()
    return graph, described(graph)


def adamw(worker, _):
    optimizer = torch.optim.AdamW(list(worker.parameters.values()), lr=1e-3)
    return optimizer, optimizer.step


def trained(graph, model, layout: Layout, precision=FLOAT32, steps=STEPS, optimizer_of=adamw):
    """Of each rank its model after the steps, the parameters that it steps, bytes of states, and bytes sent."""
    plan = build_plan(model, layout)

    def main(rank, transport):
        own, noting = copy_of(graph), Noting(transport, rank)
        worker = build_worker(own, model, plan, rank, noting, device=CPU, precision=precision)
        optimizer, step = optimizer_of(worker, transport)
        for seed in range(steps):
            run_step(worker, raw_inputs(graph, BATCH, seed))
            step()
        worker.bring_weights()
        kept = [optimizer.state] if isinstance(optimizer, torch.optim.Optimizer) else []
        states = sum(x.nbytes for of in kept for state in of.values() for x in state.values() if x.ndim)
        return own, dict(worker.parameters), states, noting.sent

    return plan, run_threads(plan.mesh.num_ranks, main)


def weights_of(graph) -> dict[str, Tensor]:
    return {name: p.detach() for p, name in canonical_names(graph.components).items() if p.requires_grad}


LAYOUTS = {
    "copies": owned(),
    "buckets": owned(buckets=3, microbatches=2),
    "two stages": owned(stages=2, microbatches=2),
    "split backward": owned(stages=2, microbatches=3, schedule="zb-h1"),
    "a V": owned(stages=2, microbatches=3, schedule="zb-v"),
    "recomputed": owned(microbatches=2, checkpointed=("*",)),
    "three copies": owned(data_parallel=3, microbatches=2),
    "four copies of two stages": owned(stages=2, data_parallel=4),
}


@pytest.mark.parametrize("layout", quick_and_slow(LAYOUTS, ["buckets", "split backward"]))
def test_gradients_at_their_owners_are_those_of_one_process(layout):
    graph = tiny_stable_diffusion()
    inputs = raw_inputs(graph, BATCH)
    assert_same_step(step_in_threads(graph, described(graph), LAYOUTS[layout], inputs), reference_step(graph, inputs))


@pytest.mark.parametrize("layout", quick_and_slow(LAYOUTS, ["copies", "a V"]))
def test_five_steps_of_adamw_give_every_rank_the_bits_of_whole_copies(prepared, layout):
    graph, model = prepared
    plan, parts = trained(graph, model, LAYOUTS[layout])
    _, wholes = trained(graph, model, replace(LAYOUTS[layout], sharded=Sharded.NONE))
    start = weights_of(graph)
    for rank, ((own, mine, _, _), (other, held, _, _)) in enumerate(zip(parts, wholes, strict=True)):
        assert 0 < len(mine) < len(held)
        found, expected = weights_of(own), weights_of(other)
        for name in held:
            assert torch.equal(found[name], expected[name]), (rank, name)
            assert not torch.equal(found[name], start[name]) or "lora_A" in name or not found[name].any(), name
    assert plan.mesh.sharded is Sharded.OPTIMIZER


def test_under_autocast_weights_are_cast_once_they_have_come_from_their_owners():
    graph = tiny_dit(torch.float32)
    model = described(graph, autocast=torch.bfloat16)
    narrow = Precision(autocast=torch.bfloat16)
    (_, parts), (_, wholes) = (
        trained(graph, model, owned(microbatches=2, sharded=kind), narrow, steps=3)
        for kind in (Sharded.OPTIMIZER, Sharded.NONE)
    )
    for (own, *_), (other, *_) in zip(parts, wholes, strict=True):
        expected = weights_of(other)
        assert all(torch.equal(value, expected[name]) for name, value in weights_of(own).items())


def classes_of(name, arguments, worker, transport):
    """An optimizer of the trainer, whose second class steps vectors, and its step."""
    rest = Group(name="rest", optimizer="AdamW") if name == "Muon" else Group()

    def group_of(key):
        return rest if worker.parameters[key].ndim != 2 else Group()

    optimizer = build_optimizer(name, worker.parameters, 1e-3, arguments, group_of)
    if name not in PATHS:
        return optimizer, optimizer.step
    counted = [p for key, p in worker.parameters.items() if key in worker.owned]

    def sum_over(terms):
        total = terms.clone()
        transport.all_reduce(total, (0, 1)).wait()
        return total

    shared = SharedProdigy(optimizer.parts[0], counted, sum_over, CPU)
    return optimizer, partial(shared.step, 1e-3)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("Muon", {}),
        pytest.param("bitsandbytes.optim.AdamW8bit", {}, marks=pytest.mark.slow),
        pytest.param("pytorch_optimizer.CAME", {}, marks=pytest.mark.slow),
        pytest.param("Adafactor", {}, marks=pytest.mark.slow),
        pytest.param("prodigyopt.Prodigy", {}, marks=pytest.mark.slow),
    ],
)
def test_other_optimizers_step_at_owners_as_on_whole_copies(name, arguments):
    graph = tiny_dit(torch.float32)
    model, own = described(graph), partial(classes_of, name, arguments)
    _, parts = trained(graph, model, owned(), optimizer_of=own)
    _, wholes = trained(graph, model, owned(sharded=Sharded.NONE), optimizer_of=own)
    tolerance = 1e-6 if name in PATHS else 0.0  # its sums over all parameters are in another order
    for (found, *_), (expected, *_) in zip(parts, wholes, strict=True):
        whole, start = weights_of(expected), weights_of(graph)
        for key, value in weights_of(found).items():
            torch.testing.assert_close(value, whole[key], rtol=tolerance, atol=tolerance)
        assert any(not torch.equal(whole[key], start[key]) for key in whole)


@pytest.mark.parametrize("copies", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_held_and_sent_bytes_are_those_of_the_formulas_within_the_largest_parameter(copies):
    graph = tiny_dit(torch.float32)
    _, ranks = trained(graph, described(graph), owned(data_parallel=copies), steps=1)
    sizes = [p.nbytes for p in weights_of(graph).values()]
    total, largest = sum(sizes), max(sizes)
    for own, mine, states, sent in ranks:
        held = sum(p.nbytes for p in weights_of(own).values())
        gradients = sum(p.grad.nbytes for p in canonical_names(own.components) if p.requires_grad)
        assert held == gradients == total
        assert abs(states - 2 * total / copies) <= 2 * largest
        assert abs(sum(p.nbytes for p in mine.values()) - total / copies) <= largest
        # One step brings weights twice: at its start, and for what reads them after it.
        moved = sent["reduce"] + sent["broadcast"] / 2
        assert abs(moved - 2 * (copies - 1) / copies * total) <= largest
    assert sum(sent["reduce"] for *_, sent in ranks) >= (copies - 1) * total


def test_blocks_come_from_their_owners_before_anything_reads_them_and_stay():
    plan = build_plan(described(tiny_dit()), owned(stages=2, microbatches=2))
    for order in plan.train.orders:
        ops = [action.op for action in order]
        assert ops.count(Op.UNSHARD) == ops.count(Op.REDUCE_GRAD) == 1
        assert ops.index(Op.UNSHARD) < min(ops.index(op) for op in (Op.F, Op.ENCODE) if op in ops)
        assert Op.RESHARD not in ops
    assert not any(action.op is Op.UNSHARD for _, action in plan.validate.actions())
