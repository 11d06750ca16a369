"""Stored matrices beside a second implementation: numpy alone, written from the papers and from docs/recipe.md.

nf4       Dettmers et al., "QLoRA", 2023: levels of the normal distribution, blocks of 64
float8    Micikevicius et al., "FP8 formats for deep learning", 2022: e4m3 has no infinity
int8      symmetric steps, a scale for each 128 inputs of a row
integers  Dettmers et al., "LLM.int8()", 2022: numbers beyond 6 apart
"""

from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import nn

from diffusionpipe.costs.forms import Form, shapes
from diffusionpipe.errors import ConfigError
from diffusionpipe.models.parameters.forms import encode, wide
from diffusionpipe.models.parameters.kernels import number_type
from diffusionpipe.models.parameters.stored_linear import StoredLinear

INPUTS, BLOCK, GROUP = 128, 64, 256
LARGEST = 3.3895e38
"""The largest number of bfloat16."""


def _levels_of_nf4():
    quantile = NormalDist().inv_cdf
    above = [quantile(p) for p in np.linspace(0.9677083, 0.5, 9)[:-1]]
    below = [-quantile(p) for p in np.linspace(0.9677083, 0.5, 8)[:-1]]
    return np.array(sorted([*below, 0.0, *above])) / above[0]


def _levels_of_float8():
    found = []
    for code in range(256):
        sign, exponent, mantissa = (-1.0 if code & 128 else 1.0), (code >> 3) & 15, code & 7
        size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        found.append(np.nan if (exponent, mantissa) == (15, 7) else sign * size)
    return np.array(found)


NF4, FLOAT8 = _levels_of_nf4(), _levels_of_float8()
LEVELS = {
    Form.NF4: NF4,
    Form.FLOAT8: np.unique(FLOAT8[~np.isnan(FLOAT8)]),
    Form.INT8: np.arange(-127, 128.0),
}


def stored_numbers(form, codes, scales, shape):
    """(the wide matrix, the scale of each number), in float64."""
    count = shape[0] * shape[1]
    if form is Form.NF4:
        pairs = -(-count // 2)
        numbers = NF4[np.stack([codes[:pairs] >> 4, codes[:pairs] & 15], 1).reshape(-1)[:count]]
        parts = (codes[pairs:].astype(np.float64) / 255) ** 2
        of_blocks = parts * np.repeat(scales.astype(np.float64), GROUP)[: len(parts)]
        scale = np.repeat(of_blocks, BLOCK)[:count].reshape(shape)
        return numbers.reshape(shape) * scale, scale
    numbers = codes.view(np.int8).astype(np.float64) if form is Form.INT8 else FLOAT8[codes]
    scale = np.repeat(scales.astype(np.float64), INPUTS, 1)[:, : shape[1]]
    return numbers * scale, scale


def by_bitsandbytes(weight):
    """nf4 with nested scales: the largest of each block less their mean, in a dynamic map of 8 bits by 256 blocks."""
    count, blocks = weight.size, -(-weight.size // BLOCK)
    numbers = np.pad(weight.reshape(-1), (0, blocks * BLOCK - count)).reshape(blocks, BLOCK)
    largest = np.abs(numbers).max(1)
    steps = [0.0, 1.0]
    for exponent in range(7):
        edges = np.linspace(0.1, 1, 2**exponent + 1)
        means = 10.0 ** (exponent - 6) * (edges[:-1] + edges[1:]) / 2
        steps += [*means, *-means]
    nested, offset = np.empty(blocks), largest.mean()
    for start in range(0, blocks, GROUP):
        part = largest[start : start + GROUP] - offset
        unit = np.abs(part).max() or 1.0
        nested[start : start + GROUP] = np.array(steps)[np.abs(part[:, None] / unit - steps).argmin(1)] * unit + offset
    units = np.where(largest > 0, largest, 1.0)[:, None]
    places = np.abs((numbers / units)[..., None] - NF4).argmin(2)
    return (NF4[places] * nested[:, None]).reshape(-1)[:count].reshape(weight.shape)


def by_integers(x, weight):
    """x w^T for w in int8: numbers of x beyond 6 wide, all others in 8 bits with a scale for each row of x."""
    is_outlier = np.abs(x) > 6
    rest = np.where(is_outlier, 0, x)
    scale = np.abs(rest).max(1, keepdims=True) / 127
    rounded = np.rint(rest / np.where(scale > 0, scale, 1)) * scale
    return np.where(is_outlier, x, 0) @ weight.T + rounded @ weight.T


KINDS = {
    "normal": lambda rng, w: w,
    "columns of many sizes": lambda rng, w: w * 10.0 ** rng.uniform(-4, 3, (1, w.shape[1])),
    "rows of many sizes": lambda rng, w: w * 10.0 ** rng.uniform(-6, 3, (len(w), 1)),
    "few numbers": lambda rng, w: w * (rng.random(w.shape) < 0.05),
    "rows of zeros": lambda rng, w: w * (rng.random((len(w), 1)) < 0.5),
    "zeros": lambda rng, w: w * 0,
    "one number": lambda rng, w: np.full(w.shape, w[0, 0]),
    "below the least normal number": lambda rng, w: w * 1e-42,
    "the largest number": lambda rng, w: np.where(w > 0, LARGEST, -LARGEST),
}
COLUMNS = (1, 2, 3, 63, 64, 65, 127, 128, 129, 255, 256, 257, 385)


def matrices(kind, seed):
    """Four matrices of odd sizes."""
    rng = np.random.default_rng(seed)
    for columns in rng.choice(COLUMNS, 4, replace=False):
        shape = (int(rng.integers(1, 70)), int(columns))
        yield rng, KINDS[kind](rng, rng.standard_normal(shape)).astype(np.float32)


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_the_nearest_and_are_widened_as_the_documents_say(kind, form):
    for _, weight in matrices(kind, seed=len(kind)):
        codes, scales = encode(form, torch.from_numpy(weight))
        found = wide(form, codes, scales, weight.shape, torch.float64).numpy()
        expected, scale = stored_numbers(form, codes.numpy(), scales.numpy(), weight.shape)
        exact, least = weight.astype(np.float64), 3e-45  # two steps of float32 near zero
        np.testing.assert_allclose(found, expected, rtol=0, atol=3e-7 * np.abs(expected).max() + least)
        nearest = np.min([np.abs(exact - scale * level) for level in LEVELS[form]], axis=0)
        assert (np.abs(found - exact) <= nearest + 1e-6 * np.abs(exact).max() + least).all(), weight.shape


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith(("below", "the largest"))])
def test_nf4_loses_no_more_than_the_nested_scales_of_bitsandbytes(kind):
    for _, weight in matrices(kind, seed=1):
        found = wide(Form.NF4, *encode(Form.NF4, torch.from_numpy(weight)), weight.shape, torch.float64).numpy()
        theirs = np.linalg.norm(by_bitsandbytes(weight.astype(np.float64)) - weight)
        assert np.linalg.norm(found - weight) <= 1.1 * theirs + 1e-6 * np.linalg.norm(weight)


def layer_of(form, weight, bias=None, *, multiplies_integers=False):
    rows, columns = weight.shape
    layer = StoredLinear(form, nn.Linear(columns, rows, bias=bias is not None, device="meta").requires_grad_(False))
    if bias is not None:
        layer.bias = nn.Parameter(torch.from_numpy(bias), requires_grad=False)
    for name, value in layer.encoded(torch.from_numpy(weight)).items():
        setattr(layer, name, nn.Parameter(value, requires_grad=False))
    layer.multiplies_integers = multiplies_integers
    return layer


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("leading", [(), (1,), (0,), (2, 3), (2, 0, 3)])
def test_products_are_those_of_numpy_and_gradients_those_of_finite_differences(form, leading):
    for rng, weight in matrices("columns of many sizes", seed=len(leading)):
        bias = rng.standard_normal(len(weight))
        layer = layer_of(form, weight, bias)
        matrix, _ = stored_numbers(form, layer.codes.numpy(), layer.scales.numpy(), weight.shape)
        x, way = (rng.standard_normal((*leading, weight.shape[1])) for _ in range(2))
        given = torch.from_numpy(x).requires_grad_()
        y = layer(given)
        size = np.abs(matrix).sum(1).max() + 1
        np.testing.assert_allclose(y.detach().numpy(), x @ matrix.T + bias, rtol=0, atol=1e-6 * size)
        upstream = rng.standard_normal(y.shape)
        (gradient,) = torch.autograd.grad(y, given, torch.from_numpy(upstream))
        with torch.no_grad():
            ends = [layer(torch.from_numpy(x + sign * way)).numpy() for sign in (1, -1)]  # linear: any step is exact
        difference = ((ends[0] - ends[1]) / 2 * upstream).sum()
        assert (gradient.numpy() * way).sum() == pytest.approx(difference, rel=1e-9, abs=1e-9 * size * (1 + way.size))


@pytest.mark.parametrize("kind", ["normal", "columns of many sizes", "zeros", "few numbers"])
@pytest.mark.parametrize("size", [0.1, 3, 60])
def test_integers_are_multiplied_as_the_paper_does_but_for_single_numbers(kind, size):
    for rng, weight in matrices(kind, seed=int(size)):
        layer = layer_of(Form.INT8, weight, multiplies_integers=True)
        matrix, _ = stored_numbers(Form.INT8, layer.codes.numpy(), layer.scales.numpy(), weight.shape)
        x = rng.standard_normal((int(rng.integers(1, 40)), weight.shape[1])).astype(np.float32)
        x[:, rng.integers(weight.shape[1])] *= size
        found = layer(torch.from_numpy(x)).numpy()
        most = (np.abs(x) @ np.abs(matrix).T).max()
        np.testing.assert_allclose(found, by_integers(x.astype(np.float64), matrix), rtol=0, atol=2e-6 * most)


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (1, 1)])
def test_matrices_without_numbers_are_stored_too(form, shape):
    layer = layer_of(form, np.zeros(shape, np.float32))
    x = torch.ones(2, shape[1], requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert (tuple(y.shape), y.any().item(), x.grad.any().item()) == ((2, shape[0]), False, False)


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_weight_that_is_no_number_never_becomes_one(form, value):
    weight = np.ones((5, 300), np.float32)
    weight[2, 140] = value
    found = wide(form, *encode(form, torch.from_numpy(weight)), weight.shape, torch.bfloat16)
    assert not torch.isfinite(found[2, 140])


def test_a_form_without_a_rule_is_refused_by_name():
    for use in (lambda: shapes("fp6", 4, 4), lambda: encode("fp6", torch.ones(4, 4))):
        with pytest.raises(ConfigError, match="'fp6' is not a form of stored weights; use float8, int8, nf4"):
            use()
    with pytest.raises(ConfigError, match="with scales along rows; use float8 or int8"):
        number_type(Form.NF4)
