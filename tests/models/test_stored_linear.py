"""Frozen matrices in float8, int8 and nf4: their bytes, their errors, and layers that compute with them."""

import weakref
from dataclasses import replace
from fractions import Fraction
from math import ceil

import numpy as np
import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock
from kit.tiny_models import tiny_sd3, tiny_stable_diffusion
from safetensors.torch import save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from diffusionpipe.costs.forms import Form, shapes, stored_bytes
from diffusionpipe.models.graphs.graph import canonical_names
from diffusionpipe.models.parameters.forms import encode, nf4_values, wide
from diffusionpipe.models.parameters.int8_product import int8_product
from diffusionpipe.models.parameters.lora import LoraSettings, adapt
from diffusionpipe.models.parameters.stored import stored_weights
from diffusionpipe.models.parameters.stored_linear import StoredLinear, store, stored_layers
from diffusionpipe.models.parameters.weights import materialize

SHAPES = [(256, 512), (3, 130), (7, 5), (300, 257)]


def relative(found, expected):
    return float((found - expected).norm() / expected.norm())


def through(form, weight, dtype=torch.float32):
    return wide(form, *encode(form, weight), tuple(weight.shape), dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer_holds_the_bytes_of_its_form_to_the_byte(shape):
    rows, columns = shape
    by_hand = {
        Form.FLOAT8: rows * columns + 4 * rows * ceil(Fraction(columns, 128)),
        Form.INT8: rows * columns + 4 * rows * ceil(Fraction(columns, 128)),
        Form.NF4: ceil(Fraction(rows * columns, 2)) + ceil(Fraction(rows * columns, 64))
        + 4 * ceil(Fraction(rows * columns, 64 * 256)),
    }  # fmt: skip
    for form, expected in by_hand.items():
        layer = StoredLinear(form, nn.Linear(columns, rows, bias=False))
        assert sum(p.nbytes for p in layer.parameters()) == expected == stored_bytes(form, rows, columns)
        codes, scales = encode(form, torch.randn(shape))
        assert (tuple(codes.shape), tuple(scales.shape)) == shapes(form, rows, columns)
        assert (codes.nbytes + scales.nbytes, codes.dtype, scales.dtype) == (expected, torch.uint8, torch.float32)


def test_a_large_matrix_in_nf4_takes_0_5159_bytes_a_number():
    assert stored_bytes(Form.NF4, 6144, 6144) / 6144**2 == pytest.approx(0.5159, rel=1e-4)


def test_int8_is_the_nearest_of_255_steps_of_its_block():
    weight = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    found = through(Form.INT8, weight).numpy()
    for row in range(5):
        for start in (0, 128, 256):
            block = weight[row, start : start + 128].numpy()
            step = np.abs(block).max() / np.float32(127)
            np.testing.assert_allclose(found[row, start : start + 128], np.rint(block / step) * step, rtol=1e-6)


def test_float8_keeps_three_bits_behind_the_first_of_each_number():
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    scale = weight.abs().unflatten(1, (2, 128)).amax(2).repeat_interleave(128, 1)
    large = weight.abs() > scale * 2**-6 / 448 * 8
    error = (through(Form.FLOAT8, weight) - weight).abs() / weight.abs()
    assert float(error[large].max()) <= 2**-4


def test_the_values_of_nf4_are_those_of_the_paper():
    """Appendix E of Dettmers et al., 2023, in four digits."""
    listed = (-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0)
    listed += (0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0)
    assert nf4_values() == pytest.approx(listed, abs=1e-4)


def test_nf4_is_the_nearest_of_its_16_values_times_the_scale_of_its_block():
    weight = torch.randn(100, 130, generator=torch.Generator().manual_seed(0))
    flat, found = weight.view(-1).numpy(), through(Form.NF4, weight).view(-1).numpy()
    largest = np.array([np.abs(flat[start : start + 64]).max() for start in range(0, len(flat), 64)])
    scales = np.rint(np.sqrt(largest / largest.max()) * 255) ** 2 / np.float32(255**2) * largest.max()
    values = np.array(nf4_values(), dtype=np.float32)
    for block, scale in enumerate(scales):
        numbers = flat[64 * block : 64 * block + 64]
        nearest = np.abs(numbers[:, None] / scale - values).argmin(1)
        np.testing.assert_allclose(found[64 * block : 64 * block + 64], values[nearest] * scale, rtol=1e-5)


def test_the_error_of_nf4_is_a_golden_number():
    torch.manual_seed(1)
    weight = nn.Linear(64, 128).weight.detach()
    assert relative(through(Form.NF4, weight), weight) == pytest.approx(9.1e-2, rel=0.1)


@pytest.mark.parametrize(("form", "most"), [(Form.FLOAT8, 0.03), (Form.INT8, 0.012), (Form.NF4, 0.11)])
def test_an_outlier_spoils_no_more_than_its_block(form, most):
    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    weight[:, 7] *= 60
    found, rest = through(form, weight), slice(128, None)
    assert relative(found[:, rest], weight[:, rest]) < most


def test_zeros_stay_zeros_and_tiny_blocks_are_not_lost():
    weight = torch.zeros(4, 512)
    assert not any(through(form, weight).any() for form in Form)
    weight[0, :64], weight[1, :64] = 1.0, 1e-4
    assert all(through(form, weight)[1, :64].abs().min() > 0 for form in Form)


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_layer_computes_with_its_wide_weight_and_keeps_none(form, dtype):
    torch.manual_seed(0)
    plain = nn.Linear(130, 24, dtype=dtype).requires_grad_(False)
    layer = StoredLinear(form, plain)
    for name, value in layer.encoded(plain.weight).items():
        getattr(layer, name).data = value
    plain.weight.data = layer.wide(dtype)
    x = torch.randn(2, 3, 130, dtype=dtype, requires_grad=True)
    same = x.detach().clone().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = layer(x)
    assert not [tensor for tensor in kept if tensor.numel() >= 24 * 130]
    expected = plain(same)
    torch.testing.assert_close(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, same.grad)


def test_under_autocast_it_computes_as_a_linear_layer_does():
    torch.manual_seed(0)
    plain = nn.Linear(64, 24).requires_grad_(False)
    layer = StoredLinear(Form.INT8, plain)
    for name, value in layer.encoded(plain.weight).items():
        getattr(layer, name).data = value
    plain.weight.data = layer.wide(torch.float32)
    x = torch.randn(5, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, expected = layer(x), plain(x)
    assert y.dtype is expected.dtype is torch.bfloat16
    torch.testing.assert_close(y, expected)
    assert layer.weight.dtype is torch.float32
    with pytest.raises((TypeError, AttributeError)):
        nn.functional.linear(x, layer.weight)


def test_norms_tables_convolutions_and_trained_layers_stay_as_they_are():
    graph = tiny_stable_diffusion(torch.float32)
    before = {name: p.dtype for p, name in canonical_names(graph.components).items()}
    adapt(graph, ["unet"], LoraSettings(rank=2))
    store(graph, lambda component: Form.NF4 if component != "vae" else None)
    stored = {f"{name}.{path}" for name, one in graph.components.items() for path in stored_layers(one)}
    assert any(path.startswith("text_encoder.") for path in stored)
    assert any(path.endswith(".to_q.base_layer") for path in stored)
    assert not any(path.startswith("vae.") for path in stored)
    for parameter, name in canonical_names(graph.components).items():
        owner, _, last = name.rpartition(".")
        if last in ("codes", "scales"):
            assert owner in stored
        elif name in before:
            assert parameter.dtype is before[name]
    left = [m for m in graph.components["unet"].modules() if type(m) is nn.Linear and not m.weight.requires_grad]
    assert left == []


class _Wide(TorchDispatchMode):
    """The most matrices of at least `size` floating numbers that lived at a time."""

    def __init__(self, size):
        super().__init__()
        self.size, self.most, self.alive = size, 0, weakref.WeakValueDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            is_matrix = isinstance(one, torch.Tensor) and one.is_floating_point() and not one.is_meta
            if is_matrix and one.untyped_storage().nbytes() >= 2 * self.size:
                self.alive.setdefault(one.untyped_storage().data_ptr(), one)
        self.most = max(self.most, len(self.alive))
        return result


@pytest.mark.parametrize("form", Form)
def test_no_more_than_two_wide_matrices_are_there_while_a_model_is_read(tmp_path, form):
    side, layers = 1100, 4
    source = nn.ModuleList([nn.Linear(side, side) for _ in range(layers)])
    save_file({k: v.bfloat16() for k, v in source.state_dict().items()}, tmp_path / "model.safetensors")
    graph = tiny_sd3(torch.float32)
    component = nn.ModuleList([nn.Linear(side, side, device="meta") for _ in range(layers)])
    component.requires_grad_(False)
    first = graph.layers[0]
    layer = replace(first, component="stack", modules=("",))
    alone = replace(graph, layers=(layer,), components={"stack": component})
    store(alone, lambda _: form)
    with _Wide(side * side) as counted:
        materialize(
            alone, [layer.name], {"stack": stored_weights(tmp_path)}, device="cpu", dtype=torch.float32, seed=0,
            frozen_dtype=torch.bfloat16,
        )  # fmt: skip
    assert 0 < counted.most <= 2
    for number, linear in enumerate(source):
        expected = through(form, linear.weight.detach().bfloat16(), torch.bfloat16)
        assert torch.equal(component[number].wide(torch.bfloat16), expected)
        assert component[number].bias.dtype is torch.bfloat16


@pytest.mark.slow
def test_of_blocks_of_flux_1_at_their_real_size_no_more_than_two_wide_matrices_are_there(tmp_path):
    """Two blocks of FLUX.1: 10 matrices of up to 47 million numbers, 0.5 GB in bfloat16; in nf4 a quarter of it."""
    blocks, dim = 2, 3072

    def stack():
        with torch.device("meta"):
            one = [
                FluxSingleTransformerBlock(dim, num_attention_heads=24, attention_head_dim=128) for _ in range(blocks)
            ]
        return nn.ModuleList(one).requires_grad_(False)

    empty = stack().state_dict()
    sizes = sorted(value.numel() for value in empty.values() if value.dim() == 2)
    assert (sizes[0], sizes[-1]) == (dim * dim, 5 * dim * dim)
    save_file({name: torch.randn(value.shape, dtype=torch.bfloat16) for name, value in empty.items()},
              tmp_path / "model.safetensors")  # fmt: skip
    component, graph = stack(), tiny_sd3(torch.float32)
    layer = replace(graph.layers[0], component="stack", modules=("",))
    alone = replace(graph, layers=(layer,), components={"stack": component})
    store(alone, lambda _: Form.NF4)
    with _Wide(sizes[0]) as counted:
        materialize(
            alone, [layer.name], {"stack": stored_weights(tmp_path)}, device="cpu", dtype=torch.float32, seed=0,
            frozen_dtype=torch.bfloat16,
        )  # fmt: skip
    assert 0 < counted.most <= 2
    stored = stored_layers(component)
    assert len(stored) == len(sizes)
    for layer in stored.values():
        held = layer.codes.nbytes + layer.scales.nbytes
        assert held == stored_bytes(Form.NF4, layer.out_features, layer.in_features)


@pytest.fixture
def with_an_outlier():
    """x with one input 60 times as large, w, and their product."""
    torch.manual_seed(1)
    weight, x = torch.randn(256, 512), torch.randn(64, 512)
    x[:, 7] *= 60
    return x, weight, x @ weight.t()


def test_an_outlier_costs_what_was_measured(with_an_outlier, monkeypatch):
    x, weight, y = with_an_outlier
    codes, scales = encode(Form.INT8, weight)
    assert relative(int8_product(x, codes, scales, weight), y) == pytest.approx(3.7e-3, rel=0.1)
    per_row = weight.abs().amax(1, keepdim=True) / 127
    assert relative(x @ ((weight / per_row).round() * per_row).t(), y) == pytest.approx(8.0e-3, rel=0.1)
    assert relative(x @ through(Form.INT8, weight).t(), y) == pytest.approx(7.0e-3, rel=0.1)
    monkeypatch.setattr("diffusionpipe.models.parameters.int8_product.OUTLIER", float("inf"))
    assert relative(int8_product(x, codes, scales, weight), y) == pytest.approx(5.2e-2, rel=0.1)


def test_a_scale_for_128_inputs_costs_less_than_one_a_row_by_the_ratio_of_the_scales(with_an_outlier):
    """LLM.int8 has a scale a row: 8.0e-3 of the product above, 7.0e-3 here.

    Rounding costs a twelfth of a squared step, and a step is the largest number of those that share it over 127.
    """
    x, weight, y = with_an_outlier
    _, scales = encode(Form.INT8, weight)
    per_row = weight.abs().amax(1, keepdim=True) / 127
    steps = float(scales.square().mean().sqrt() / per_row.square().mean().sqrt())
    ours, rows = through(Form.INT8, weight), (weight / per_row).round() * per_row
    assert relative(ours, weight) / relative(rows, weight) == pytest.approx(steps, rel=0.01)
    assert relative(x @ ours.t(), y) / relative(x @ rows.t(), y) == pytest.approx(steps, rel=0.03)
    assert steps == pytest.approx(0.87, rel=0.01)
    short = weight[:, :128]
    per_row = short.abs().amax(1, keepdim=True) / 127
    assert torch.equal(through(Form.INT8, short), (short / per_row).round() * per_row)


def test_the_product_of_integers_is_exact_where_nothing_is_rounded():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-5, 6, (20, 300), generator=generator).float() * 6 / 127
    x[:, 0] = 6.0
    weight = torch.randint(-3, 4, (24, 300), generator=generator).float()
    weight[:, [0, 128, 256]] = 127.0
    codes, scales = encode(Form.INT8, weight)
    torch.testing.assert_close(int8_product(x, codes, scales, weight), x @ weight.t(), rtol=1e-5, atol=1e-4)


def test_no_row_of_a_product_of_integers_depends_on_other_rows(with_an_outlier):
    x, weight, _ = with_an_outlier
    codes, scales = encode(Form.INT8, weight[:30, :300].contiguous())
    whole = int8_product(x[:, :300], codes, scales, weight[:30, :300])
    for rows in (slice(0, 1), slice(5, 40)):
        torch.testing.assert_close(int8_product(x[rows, :300], codes, scales, weight[:30, :300]), whole[rows])


def test_a_layer_multiplies_integers_where_it_is_asked_to_and_differentiates_as_before(with_an_outlier):
    x, weight, _ = with_an_outlier
    plain = nn.Linear(512, 256, device="meta").requires_grad_(False)
    layer = StoredLinear(Form.INT8, plain)
    layer.bias = nn.Parameter(torch.ones(256), requires_grad=False)
    for name, value in layer.encoded(weight).items():
        setattr(layer, name, nn.Parameter(value, requires_grad=False))
    gradients, outputs = [], []
    for asked in (False, True):
        layer.multiplies_integers = asked
        mine = x.clone().requires_grad_()
        outputs.append(layer(mine))
        outputs[-1].sum().backward()
        gradients.append(mine.grad)
    assert 0 < relative(outputs[1], outputs[0]) < 4e-3
    assert torch.equal(*gradients)
