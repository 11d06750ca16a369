"""Training without a flush is the sequential recurrence, whose weights are as old as the table says.

w_s[v+1] = update( w_s[v],  d loss / d w_s  with forwards on { w_j[v - a_j] } and backwards on { w_j[v - b_j] } )
"""

from functools import cache

import pytest
import torch
from descriptions import described
from tiny_models import tiny_controlled, tiny_dit, tiny_flux, tiny_stable_diffusion
from windowed import (
    RATES,
    STEPS,
    batches_of,
    distances_of,
    is_within_limits,
    layout_of,
    recurrence,
    run_windows,
)

from diffusionpipe.ir.versions import Versions, versions_held
from diffusionpipe.models.lora import LoraSettings, add_lora
from diffusionpipe.models.weights import materialize
from diffusionpipe.planner import build_plan
from diffusionpipe.runtime.threads import run_threads
from diffusionpipe.runtime.versions import BlockVersions


def tiny_adapters():
    graph = tiny_flux(torch.float64)
    add_lora(graph.components, "transformer", LoraSettings(rank=2))
    materialize(graph, [layer.name for layer in graph.layers], {}, device="cpu", dtype=torch.float64, seed=0)
    return graph


MODELS = {
    "stable diffusion": tiny_stable_diffusion,
    "dit": tiny_dit,
    "adapters": tiny_adapters,
    "text encoder": lambda: tiny_stable_diffusion(train=("unet", "text_encoder")),
    "controlnet": tiny_controlled,
    "float32": lambda: tiny_dit(torch.float32),
}


@cache
def model_of(name):
    graph = MODELS[name]()
    return graph, described(graph, autocast=torch.bfloat16 if name == "float32" else None), batches_of(graph)


def pipeline_of(graph, model, plan, batches, names, stops, autocast=None):
    """The real executor in threads: of each rank the weights at the end, the losses, the bytes of its versions."""

    def main(rank, transport):
        one = {"batch_of": batches.__getitem__, "names": names, "stops": stops, "autocast": autocast}
        return run_windows(graph, model, plan, rank, transport, **one)

    return run_threads(plan.mesh.num_ranks, main)


def distances(name, layout, names=tuple(RATES), stops=(STEPS,), autocast=None):
    """Of the pipeline from the recurrence, as parts of the distance moved: optimizer -> of its parameters."""
    graph, model, batches = model_of(name)
    plan = build_plan(model, layout)
    start, expected = recurrence(graph, plan, batches[: stops[-1]], names, {0, *stops}, autocast)
    found = pipeline_of(graph, model, plan, batches, names, stops, autocast)
    return distances_of(plan, names, start, expected, found)


ROWS = [row for row in Versions if row is not Versions.FLUSHED]
"""Of them "predicted" trains with optimizers that have a direction."""


def optimizers_of(versions):
    return ("momentum", "adamw") if versions is Versions.PREDICTED else tuple(RATES)


@pytest.mark.parametrize("versions", ROWS)
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (3, 4)])
def test_a_window_is_the_recurrence(versions, stages, microbatches):
    assert is_within_limits(distances("dit", layout_of(versions, stages, microbatches), optimizers_of(versions)))


SIZES = [
    *(("dit", stages, microbatches) for stages, microbatches in ((2, 4), (3, 1), (4, 1), (4, 4))),
    ("stable diffusion", 4, 1),
    ("stable diffusion", 3, 4),
]
"""Beside those of `test_a_window_is_the_recurrence`."""


@pytest.mark.slow
@pytest.mark.parametrize("versions", ROWS)
@pytest.mark.parametrize(("name", "stages", "microbatches"), SIZES)
def test_every_row_is_the_recurrence(name, versions, stages, microbatches):
    assert is_within_limits(distances(name, layout_of(versions, stages, microbatches), optimizers_of(versions)))


@pytest.mark.parametrize("versions", [Versions.STASHED, Versions.PREDICTED])
def test_copies_of_the_pipeline_recomputation_and_flushes_between(versions):
    """Two groups that share each batch; batches 3 and 5 begin with empty pipelines."""
    layout = layout_of(versions, 2, 2, data_parallel=2, checkpointed=("*",))
    assert is_within_limits(distances("dit", layout, ("momentum",), stops=(3, 5, STEPS)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adapters", "text encoder", "controlnet"])
def test_every_kind_of_trained_part_is_the_recurrence(name):
    assert is_within_limits(distances(name, layout_of(Versions.STASHED, 2, 2), ("momentum",), stops=(4,)))


def test_in_bfloat16_every_forward_reads_narrow_weights_of_its_version():
    found = distances("float32", layout_of(Versions.STASHED, 2, 1), ("momentum",), (4,), torch.bfloat16)
    assert found["momentum"] < 1e-3


class LateBinding(BlockVersions):
    """Binds the newest version before a backward too."""

    def bind(self, version):
        super().bind(self.newest)


def test_a_backward_on_other_weights_than_its_forward_is_noticed(monkeypatch):
    monkeypatch.setattr("diffusionpipe.runtime.worker.BlockVersions", LateBinding)
    assert distances("stable diffusion", layout_of(Versions.STASHED, 2, 1), ("sgd",))["sgd"] > 1e-4


@pytest.mark.parametrize(("versions", "counts"), [(Versions.STASHED, (3, 2, 1)), (Versions.PREDICTED, (4, 3, 1))])
def test_bytes_of_versions_are_those_of_the_table(versions, counts):
    graph, model, batches = model_of("dit")
    plan = build_plan(model, layout_of(versions, 3, 1))
    found = pipeline_of(graph, model, plan, batches, ("momentum",), (2,))
    for rank, (parameters, _, held) in enumerate(found):
        own = sum(p.numel() * p.element_size() for p in parameters.values())
        assert held == own * versions_held(plan.train)[rank] == own * counts[rank]
