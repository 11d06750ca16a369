from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from kit.descriptions import described
from kit.tiny_models import tiny_controlled, tiny_dit, tiny_flux, tiny_stable_diffusion
from torch import nn

from diffusionpipe.costs.devices import DEVICES
from diffusionpipe.costs.files import profile_from_text, profile_to_text
from diffusionpipe.costs.forms import Form, stored_bytes
from diffusionpipe.costs.mode import Mode
from diffusionpipe.errors import ConfigError
from diffusionpipe.models.cut.sequential import sequential_graph
from diffusionpipe.models.objectives.objective import ObjectiveSettings
from diffusionpipe.models.opening.folder import build_graph
from diffusionpipe.models.parameters.stored_linear import store
from diffusionpipe.profiler import counted, layer_run
from diffusionpipe.profiler.analytic import analytic_profile, with_kept
from diffusionpipe.profiler.counted import count_layers
from diffusionpipe.profiler.measured import profile_model
from diffusionpipe.profiler.operations import Operation, SpeedLimit
from diffusionpipe.profiler.roofline import layer_seconds, operation_seconds

DIGITS = Path(__file__).parents[2] / "examples" / "digits" / "model"
COLUMNS = ("forward", "input_grad", "weight_grad")
MEASURED_RANK, MEASURED_SHARE = 0.92, 0.035
"""Seen on one core of a Zen 4 at batches of 2 to 16: rank correlation of the layers' times at least, difference of any
layer's share of the total at most. The test allows for another or busy machine."""
ALLOWED_RANK, ALLOWED_SHARE = 0.8, 0.08


def squared(prediction, target):
    return ((prediction - target) ** 2).sum(1)


def counts_of(graph, batch, precision="float32", device_type="cpu"):
    model = described(graph, autocast=torch.bfloat16 if precision == "bfloat16" else None)
    return count_layers(graph, model, batch, precision=precision, device_type=device_type, step=lambda: None)


def controlled_in_pairs(dtype):
    """A ControlNet with two layers in each block."""
    return tiny_controlled(dtype, unet={"layers_per_block": 2}, controlnet={"layers_per_block": 2})


def test_the_operations_of_a_linear_layer_are_counted_exactly():
    graph = sequential_graph(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)), inputs=(6,), target=(4,), loss=squared)
    count = counts_of(graph, 3)["model.1"]
    (forward,) = count.forward
    assert (forward.kind, forward.dtype, forward.flops) == (SpeedLimit.MATMUL, "float32", 2 * 3 * 5 * 4)
    assert forward.num_bytes == 4 * (4 + 3 * 5 + 5 * 4 + 3 * 4)  # bias, input, weight, output
    assert sum(op.flops for op in count.input_grad) == 2 * 3 * 4 * 5
    assert sum(op.flops for op in count.backward) == 2 * 2 * 3 * 4 * 5
    assert count.is_trained
    assert count.has_inputs


def test_tables_that_a_device_computes_once_are_no_work_and_no_memory_of_a_layer():
    graph = tiny_flux(torch.float32)
    first, second = (counts_of(graph, 3)[f"transformer.transformer_blocks.{i}"] for i in (0, 1))
    assert not {"cos", "sin", "arange"} & {operation.name for operation in first.forward}
    assert (first.forward, first.drawing) == (second.forward, second.drawing)
    with mock.patch.object(layer_run, "tables_of", return_value=()):
        assert counts_of(graph, 3)["transformer.transformer_blocks.0"].activation > first.activation


def test_a_stored_weight_is_widened_for_each_micro_batch_in_f_and_i():
    module = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 4)).requires_grad_(False)
    graph = sequential_graph(module, inputs=(128,), target=(4,), loss=squared)
    module[0].bias.requires_grad_(True)
    store(graph, lambda component: Form.NF4)
    wide, codes = 2 * 64 * 4, stored_bytes(Form.NF4, 4, 64)
    for batch in (1, 8):  # as many bytes for one sample as for eight: fewer, larger micro-batches widen less
        count = counts_of(graph, batch, "bfloat16")["model.1"]
        for operations in (count.forward, count.input_grad):
            assert [op.num_bytes for op in operations if op.kind is SpeedLimit.MEMORY][:1] == [codes + wide]


def test_casts_of_weights_are_counted_apart_from_the_forward():
    module = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    graph = sequential_graph(module, inputs=(6,), target=(4,), loss=squared)
    wide, narrow = (counts_of(graph, 3, precision)["model.1"] for precision in ("float32", "bfloat16"))
    assert (wide.cast, wide.copies) == ((), 0)
    assert [op.num_bytes for op in narrow.cast] == [(4 + 2) * 5 * 4, (4 + 2) * 4]  # weight and bias
    assert narrow.copies == 2 * (5 * 4 + 4)
    assert [op.kind for op in narrow.forward] == [SpeedLimit.MATMUL]  # what it reads is bfloat16 already
    assert narrow.activation <= wide.activation


def test_frozen_layers_cast_in_every_forward():
    count = counts_of(tiny_dit(torch.float32), 2, "bfloat16")
    model = described(tiny_dit(torch.float32), autocast=torch.bfloat16)
    assert all(count[name].cast == () for name in model.frozen_layers)
    assert any(op.name == "_to_copy" for name in model.frozen_layers for op in count[name].forward)


def test_attention_is_counted_forward_and_backward():
    kinds = {op.kind for op in counts_of(tiny_dit(torch.float32), 2)["transformer.transformer_blocks.1"].backward}
    assert SpeedLimit.ATTENTION_BACKWARD in kinds
    forward = counts_of(tiny_dit(torch.float32), 2)["transformer.transformer_blocks.1"].forward
    (attention,) = [op for op in forward if op.kind is SpeedLimit.ATTENTION]
    assert attention.flops == 2 * 2 * (
        2 * 2 * 4 * 4 * 4
    )  # two products; samples, heads, tokens, tokens, width of a head
    assert attention.scores == 2 * 2 * 4 * 4  # samples, heads, queries, keys


@pytest.mark.parametrize("tiny", [tiny_stable_diffusion, tiny_dit])
def test_counted_bytes_are_the_measured_bytes(tiny):
    graph = tiny(torch.float32)
    model = described(graph)
    measured = profile_model(graph, model, batch_sizes=(2,), repeats=1)
    counted = counts_of(graph, 2)
    for layer in measured.layers:
        count = counted[layer.name]
        found = layer.activation[0], layer.workspace[0], layer.drawing[0]
        assert (count.activation, count.workspace, count.drawing) == found, layer.name


@pytest.mark.parametrize(
    "tiny", [tiny_dit, pytest.param(controlled_in_pairs, marks=pytest.mark.slow)], ids=["dit", "controlnet"]
)
def test_backwards_that_are_not_run_again_are_those_that_running_them_counts(tiny, monkeypatch):
    """Of the ControlNet's layers that are alike some differ by how a tensor lies in memory alone."""
    ran = []
    trace = counted._Traces.trace_input_grad

    def note(self, starts, gradients):
        ran.append(self.run.layer.name)
        trace(self, starts, gradients)

    monkeypatch.setattr(counted._Traces, "trace_input_grad", note)
    graph = tiny(torch.float32)
    counts, some = counts_of(graph, 2), set(ran)
    monkeypatch.setattr(counted, "autograd_graph", lambda *_: object())  # so that no layer is like another
    assert counts == counts_of(graph, 2)
    assert some < set(ran)


def test_two_counts_give_every_batch_size():
    graph = tiny_dit(torch.float32)
    model = described(graph)
    lines = analytic_profile(graph, model, device="a100-80", batch_sizes=(2, 3, 8))
    direct = analytic_profile(graph, model, device="a100-80", batch_sizes=(3, 8))
    for one, other in zip(lines.layers, direct.layers, strict=True):
        for column in COLUMNS:
            assert getattr(one, column)[1:] == pytest.approx(getattr(other, column))
        assert one.activation[1:] == other.activation


@pytest.mark.parametrize(("tiny", "precision"), [(tiny_stable_diffusion, "float32"), (tiny_dit, "bfloat16")])
def test_an_analytic_profile_passes_the_checks_of_reading(tiny, precision):
    graph = tiny(torch.float32)
    model = described(graph, autocast=torch.bfloat16 if precision == "bfloat16" else None)
    profile = analytic_profile(graph, model, device="rtx4090", precision=precision, batch_sizes=(2,))
    assert profile_from_text(profile_to_text(profile)) == profile
    assert (profile.device, profile.source) == ("NVIDIA GeForce RTX 4090", "analytic")
    assert all(parameter.grad is None for c in graph.components.values() for parameter in c.parameters())


def test_norms_under_autocast_are_counted_in_float32_on_a_gpu_alone():
    graph = tiny_dit(torch.float32)
    name = "transformer.transformer_blocks.1"
    kept = {kind: counts_of(graph, 2, "bfloat16", kind)[name].activation for kind in ("cpu", "cuda")}
    assert kept["cuda"] > kept["cpu"]


def test_an_unknown_device_is_refused():
    graph = tiny_dit(torch.float32)
    with pytest.raises(ConfigError, match="known are"):
        analytic_profile(graph, described(graph), device="a100")


MATMUL = Operation(name="mm", kind=SpeedLimit.MATMUL, dtype="bfloat16", flops=1e12, num_bytes=1e6)
COPY = Operation(name="copy_", kind=SpeedLimit.MEMORY, dtype="bfloat16", flops=0, num_bytes=1e9)


def test_an_operation_is_limited_by_the_slower_of_computing_and_moving():
    rates = DEVICES["h100"]
    share = rates.efficiency
    assert operation_seconds(MATMUL, rates) == pytest.approx(
        1e12 / (989.4e12 * share.matmul) + rates.ramp + rates.kernel
    )
    assert operation_seconds(COPY, rates) == pytest.approx(1e9 / (3352e9 * share.memory) + rates.kernel)


def test_a_short_product_takes_twice_its_time():
    rates = DEVICES["h100"]
    short = replace(MATMUL, flops=1e9)
    assert operation_seconds(short, rates) == pytest.approx(2e9 / (989.4e12 * rates.efficiency.matmul) + rates.kernel)


CONVOLUTION = replace(MATMUL, name="convolution", kind=SpeedLimit.CONVOLUTION, num_bytes=1e9)
ATTENTION = replace(MATMUL, name="attention", kind=SpeedLimit.ATTENTION, scores=1e9)
NORM = replace(COPY, name="native_group_norm")
CAST = replace(COPY, name="_to_copy")


@pytest.mark.parametrize(
    ("operation", "mode", "faster"),
    [
        (CONVOLUTION, Mode(is_channels_last=True), True),
        (ATTENTION, Mode(has_flash_attention=False), False),
        (NORM, Mode(has_fused_norms=True), True),
        (CAST, Mode(has_fused_norms=True), True),
        (COPY, Mode(is_compiled=True), True),
        (NORM, Mode(is_compiled=True), True),
    ],
)
def test_each_mode_changes_the_time_of_its_own_operations_alone(operation, mode, faster):
    rates = DEVICES["a100-80"]
    eager, other = operation_seconds(operation, rates), operation_seconds(operation, rates, mode)
    assert (other < eager, other > eager) == (faster, not faster)
    assert operation_seconds(MATMUL, rates, mode) == operation_seconds(MATMUL, rates)


def test_plain_attention_moves_its_scores():
    rates = DEVICES["a100-80"]
    few, many = (
        operation_seconds(replace(ATTENTION, scores=scores), rates, Mode(has_flash_attention=False))
        for scores in (1e9, 2e9)
    )
    assert many - few == pytest.approx(16e9 / (rates.bandwidth * rates.efficiency.memory))


def test_a_profile_states_its_mode_in_its_file():
    graph = tiny_dit(torch.float32)
    model = described(graph)
    eager, compiled = (
        analytic_profile(graph, model, device="a100-80", batch_sizes=(2,), mode=mode)
        for mode in (Mode(), Mode(is_compiled=True))
    )
    assert profile_from_text(profile_to_text(compiled)).mode == Mode(is_compiled=True)
    assert eager.mode == Mode()
    assert all(a.forward[0] >= b.forward[0] for a, b in zip(eager.layers, compiled.layers, strict=True))
    assert eager.layers != compiled.layers


def test_many_small_operations_take_what_the_host_needs_to_dispatch_them():
    tiny = Operation(name="add", kind=SpeedLimit.MEMORY, dtype="float32", flops=0, num_bytes=8)
    rates = DEVICES["h100"]
    assert layer_seconds([tiny] * 1000, rates) == pytest.approx(1000 * rates.dispatch)
    assert layer_seconds([MATMUL] * 3, rates) == pytest.approx(3 * operation_seconds(MATMUL, rates))
    cpu = DEVICES["cpu-1-thread"]
    assert layer_seconds([tiny] * 1000, cpu) == pytest.approx(1000 * (operation_seconds(tiny, cpu) + cpu.dispatch))


def ranks(values):
    order = sorted(range(len(values)), key=values.__getitem__)
    return [order.index(i) for i in range(len(values))]


def rank_correlation(one, other):
    n = len(one)
    return 1 - 6 * sum((a - b) ** 2 for a, b in zip(ranks(one), ranks(other), strict=True)) / (n * (n * n - 1))


@pytest.mark.slow
def test_counted_shares_of_layers_are_the_measured_ones_on_this_cpu():
    graph = build_graph(DIGITS, objective=ObjectiveSettings(), resolution=32)
    model = described(graph)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        measured = profile_model(graph, model, batch_sizes=(8,), repeats=5)
    finally:
        torch.set_num_threads(threads)
    counted = analytic_profile(graph, model, device="cpu-1-thread", batch_sizes=(8,))
    for column in COLUMNS:
        real, computed = ([getattr(layer, column)[0] for layer in p.layers] for p in (measured, counted))
        assert [value > 0 for value in real] == [value > 0 for value in computed]
        pairs = [(a, b) for a, b in zip(real, computed, strict=True) if a > 0]
        assert rank_correlation(*map(list, zip(*pairs, strict=True))) > ALLOWED_RANK, column
        shares = [abs(a / sum(real) - b / sum(computed)) for a, b in pairs]
        assert max(shares) < ALLOWED_SHARE, column


@pytest.mark.parametrize("make", [tiny_stable_diffusion, tiny_dit], ids=["unet", "dit"])
def test_a_profile_without_what_split_backwards_keep_gets_it_back_and_nothing_else_changes(make):
    graph = make(torch.float32)
    profile = analytic_profile(graph, described(graph), device="rtx4090", batch_sizes=(1, 2, 4))
    assert profile.counts_kept
    assert any(any(layer.kept) or layer.kept_reads for layer in profile.layers)
    older = replace(profile, layers=tuple(replace(layer, kept=(), kept_reads=()) for layer in profile.layers))
    assert not older.counts_kept
    assert with_kept(older, graph) == profile
