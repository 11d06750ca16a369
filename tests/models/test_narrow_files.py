"""Folders whose weights are stored in 4 bits, int8 or float8 with scales are read as wide ones, or refused by name."""

from math import ceil

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from diffusionpipe.costs.forms import Form
from diffusionpipe.errors import ModelError
from diffusionpipe.models.graphs.graph import Layer, LayerGraph
from diffusionpipe.models.parameters.forms import encode, wide
from diffusionpipe.models.parameters.stored import opened, stored_weights
from diffusionpipe.models.parameters.stored_linear import store
from diffusionpipe.models.parameters.weights import materialize, misfits_of

ROWS, COLUMNS = 48, 256


@pytest.fixture
def weight():
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))


def _graph():
    component = nn.ModuleDict({"to_q": nn.Linear(COLUMNS, ROWS, device="meta"), "norm": nn.LayerNorm(4, device="meta")})
    layer = Layer(name="only", component="part", reads=(), writes=(), modules=("",), run=lambda _: ())
    return LayerGraph(layers=(layer,), components={"part": component.requires_grad_(False)}, inputs=())


def _read(folder, form=None):
    """The weight of `to_q` as the layer computes with it."""
    graph, source = _graph(), stored_weights(folder)
    assert misfits_of(graph, "part", source) == []
    store(graph, lambda _: form)
    materialize(graph, ["only"], {"part": source}, device="cpu", dtype=torch.float32, seed=0)
    layer = graph.components["part"]["to_q"]
    assert torch.equal(layer.bias, torch.ones(ROWS))
    return layer.weight.detach() if form is None else layer.wide(torch.float32)


def _saved(folder, tensors):
    rest = {"to_q.bias": torch.ones(ROWS), "norm.weight": torch.ones(4), "norm.bias": torch.zeros(4)}
    save_file({name: value.contiguous() for name, value in (rest | tensors).items()}, folder / "model.safetensors")


@pytest.mark.parametrize("has_nested_scales", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits_of_bitsandbytes_are_read_as_it_reads_them(tmp_path, weight, kind, has_nested_scales):
    functional = pytest.importorskip("bitsandbytes").functional
    codes, state = functional.quantize_4bit(
        weight.bfloat16(), blocksize=64, compress_statistics=has_nested_scales, quant_type=kind
    )
    beside = {f"to_q.weight.{name}": value for name, value in state.as_dict(packed=True).items()}
    _saved(tmp_path, {"to_q.weight": codes} | beside)
    expected = functional.dequantize_4bit(codes, state).float()
    torch.testing.assert_close(_read(tmp_path), expected, rtol=2**-7, atol=1e-6)
    if kind == "nf4":
        stored = _read(tmp_path, Form.NF4)
        assert float((stored - expected).norm() / expected.norm()) < 0.02  # the same numbers in scales of our own


def test_int8_of_bitsandbytes_has_a_scale_for_each_row(tmp_path, weight):
    largest = weight.abs().amax(1)
    codes = (weight / largest[:, None] * 127).round().to(torch.int8)
    _saved(tmp_path, {"to_q.weight": codes, "to_q.SCB": largest, "to_q.weight_format": torch.tensor(0).to(torch.uint8)})
    torch.testing.assert_close(_read(tmp_path), weight, rtol=0, atol=float(largest.max()) / 127)


@pytest.mark.parametrize(
    ("end", "shape"),
    [("weight_scale", (1,)), ("scale_weight", ()), ("weight_scale", (ROWS, 1)), ("weight_scale_inv", (1, 2))],
)
def test_float8_is_multiplied_by_its_scales(tmp_path, weight, end, shape):
    scales = torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.5
    of_each = scales.repeat_interleave(128, 1).expand(ROWS, COLUMNS) if end == "weight_scale_inv" else scales
    numbers = (weight / of_each).to(torch.float8_e4m3fn)
    mark = {"scaled_fp8": torch.zeros(0, dtype=torch.float8_e4m3fn), "to_q.scale_input": torch.ones(())}
    _saved(tmp_path, {"to_q.weight": numbers, f"to_q.{end}": scales} | mark)
    torch.testing.assert_close(_read(tmp_path), numbers.float() * of_each, rtol=2**-8, atol=0)
    found = _read(tmp_path, Form.INT8)
    expected = wide(
        Form.INT8, *encode(Form.INT8, (numbers.float() * of_each).bfloat16()), (ROWS, COLUMNS), torch.float32
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("rows", "block"), [(576, 128), (130, 128), (127, 128), (6, 2)])
def test_the_last_block_of_float8_may_be_cut(tmp_path, rows, block):
    """Blocks are 128 wide however many of them there are; 576 rows in 5 blocks are not 116 each."""
    scales = torch.rand((ceil(rows / block), 1), generator=torch.Generator().manual_seed(rows)) + 0.5
    numbers = torch.randn(rows, 8, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    save_file({"to_q.weight": numbers, "to_q.weight_scale_inv": scales}, tmp_path / "file.safetensors")
    with opened(tmp_path / "file.safetensors") as file:
        found = file.get("to_q.weight")
    expected = numbers.float() * scales[torch.arange(rows) // block]
    torch.testing.assert_close(found.float(), expected, rtol=2**-8, atol=0)


def test_blocks_of_another_size_that_may_be_cut_are_refused(tmp_path):
    stored = {"to_q.weight": torch.zeros(100, 8).to(torch.float8_e4m3fn), "to_q.weight_scale_inv": torch.ones(3, 1)}
    save_file(stored, tmp_path / "file.safetensors")
    with (
        opened(tmp_path / "file.safetensors") as file,
        pytest.raises(
            ModelError, match=r"to_q.weight has 3 scales for a side of 100 numbers.*get the model in bfloat16"
        ),
    ):
        file.get("to_q.weight")


def test_float8_without_scales_is_read_as_numbers(tmp_path, weight):
    numbers = weight.to(torch.float8_e4m3fn)
    _saved(tmp_path, {"to_q.weight": numbers})
    assert torch.equal(_read(tmp_path), numbers.float())


@pytest.mark.parametrize(
    ("name", "method"), [("to_q.qweight", "GPTQ or AWQ"), ("to_q.weight_packed", "compressed-tensors")]
)
def test_other_methods_are_refused_by_name(tmp_path, name, method):
    _saved(tmp_path, {name: torch.zeros(4, dtype=torch.int32)})
    with pytest.raises(ModelError, match=f"holds weights of {method} .*get the model in bfloat16") as caught:
        misfits_of(_graph(), "part", stored_weights(tmp_path))
    assert len(str(caught.value).splitlines()) == 1


def test_scales_that_do_not_fit_are_said(tmp_path, weight):
    _saved(tmp_path, {"to_q.weight": weight.to(torch.float8_e4m3fn), "to_q.weight_scale": torch.ones(7)})
    with pytest.raises(ModelError, match=r"7 scales do not fit to_q\.weight of shape"):
        _read(tmp_path)


def test_a_plain_file_is_read_as_it_is(tmp_path, weight):
    _saved(tmp_path, {"to_q.weight": weight, "to_q.scale": torch.ones(3)})
    with opened(tmp_path / "model.safetensors") as tensors:
        assert set(tensors.names()) == {"to_q.weight", "to_q.bias", "to_q.scale", "norm.weight", "norm.bias"}
        assert torch.equal(tensors.get("to_q.weight"), weight)
