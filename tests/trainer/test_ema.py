import pytest
import torch
from torch import nn

from diffusionpipe.errors import RecipeError
from diffusionpipe.profiler.memory import LiveBytes
from diffusionpipe.trainer.optim.ema import Ema


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in
            (("w", (4, 3)), ("b", (3,)))}  # fmt: skip


@torch.no_grad()
def change(named, step):
    for parameter in named.values():
        parameter.add_(torch.sin(parameter + step).to(parameter.dtype))


def test_the_average_is_that_of_a_plain_loop_in_float64_with_the_warm_up():
    named = parameters(torch.float64)
    ema = Ema(named, dict.fromkeys(named, 0.9))
    expected = {name: parameter.detach().clone() for name, parameter in named.items()}
    for step in range(120):
        change(named, step)
        ema.update(step)
        decay = min(0.9, (1 + step) / (10 + step))
        for name, parameter in named.items():
            expected[name] = decay * expected[name] + (1 - decay) * parameter.detach()
    for name, average in ema.tensors().items():
        torch.testing.assert_close(average, expected[name], rtol=1e-13, atol=1e-13)


def test_bfloat16_parameters_have_float32_averages_that_feel_small_changes():
    named = {"w": nn.Parameter(torch.ones(2, dtype=torch.bfloat16))}
    ema = Ema(named, {"w": 0.9999})
    with torch.no_grad():
        named["w"].fill_(1.0078125)  # the next bfloat16
    ema.update(100_000)
    average = ema.tensors()["w"]
    assert average.dtype == torch.float32
    assert (average > 1.0).all()
    assert (average < 1.0001).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_an_average_on_the_host_has_the_bits_of_one_on_the_device(dtype):
    found = []
    for kept in ("device", "host"):
        named = parameters(dtype)
        ema = Ema(named, dict.fromkeys(named, 0.9), kept)
        for step in range(20):
            change(named, step)
            ema.update(step)
        found.append(ema.tensors())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_averages_in_bfloat16_follow_those_in_float32_in_the_mean():
    size, steps = 20_000, 400
    ends = {}
    for kept in ("device", "bfloat16"):
        named = {"w": nn.Parameter(torch.ones(size))}
        ema = Ema(named, {"w": 0.9999}, kept, seed=4)
        with torch.no_grad():
            named["w"].fill_(1.5)
        for step in range(100_000, 100_000 + steps):
            ema.update(step)
        ends[kept] = ema.tensors()["w"]
    assert ends["bfloat16"].dtype is torch.bfloat16
    expected = ends["device"][0].item()
    assert expected == pytest.approx(1.5 - 0.5 * 0.9999**steps, abs=1e-5)
    found = ends["bfloat16"].double()
    assert abs(found.mean().item() - expected) < 3 * found.std().item() / size**0.5 + 1e-6
    assert torch.ones(1, dtype=torch.bfloat16).lerp_(torch.full((1,), 1.5, dtype=torch.bfloat16), 1e-4) == 1  # else


@pytest.mark.parametrize("kept", ["host", "bfloat16"])
def test_an_average_that_is_kept_otherwise_is_shown_and_gives_back_the_weights(kept):
    named = parameters()
    ema = Ema(named, dict.fromkeys(named, 0.5), kept)
    change(named, 0)
    ema.update(0)
    weights = {name: parameter.detach().clone() for name, parameter in named.items()}
    averages = {name: tensor.float().clone() for name, tensor in ema.tensors().items()}
    with ema.swapped():
        assert all(torch.equal(named[name], averages[name]) for name in named)
    assert all(torch.equal(named[name], weights[name]) for name in named)
    assert all(torch.equal(ema.tensors()[name].float(), averages[name]) for name in named)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_swapping_shows_the_averages_and_gives_back_the_same_bits_also_after_an_error(dtype):
    named = parameters(dtype)
    ema = Ema(named, dict.fromkeys(named, 0.5))
    change(named, 0)
    ema.update(0)
    change(named, 1)
    weights = {name: parameter.detach().clone() for name, parameter in named.items()}
    averages = {name: tensor.clone() for name, tensor in ema.tensors().items()}

    def look_and_fail():
        with ema.swapped():
            assert all(torch.equal(named[name], averages[name].to(dtype)) for name in named)
            assert not any(torch.equal(named[name], weights[name]) for name in named)
            with pytest.raises(AssertionError, match="hold the averages"):
                ema.tensors()
            raise KeyError("inside")

    with pytest.raises(KeyError):
        look_and_fail()
    assert all(torch.equal(named[name], weights[name]) for name in named)
    assert all(torch.equal(ema.tensors()[name], averages[name]) for name in named)


def test_swapping_takes_the_memory_of_the_largest_parameter_alone():
    named = {str(size): nn.Parameter(torch.ones(size)) for size in (1000, 4000, 3000)}
    ema = Ema(named, dict.fromkeys(named, 0.9))
    live = LiveBytes()
    with live, ema.swapped():
        assert live.peak == 4 * 4000
        assert live.live == 0
    assert live.peak == 4 * 4000


def test_loading_into_its_tensors_restores_the_average():
    named = parameters()
    trained, resumed = Ema(named, dict.fromkeys(named, 0.9)), Ema(named, dict.fromkeys(named, 0.9))
    for step in range(3):
        change(named, step)
        trained.update(step)
    for name, tensor in resumed.tensors().items():
        tensor.copy_(trained.tensors()[name])
    for step in range(3, 6):
        change(named, step)
        trained.update(step)
        resumed.update(step)
    assert all(torch.equal(trained.tensors()[name], resumed.tensors()[name]) for name in named)


def test_a_rank_without_parameters_has_an_empty_average():
    ema = Ema({}, {})
    ema.update(0)
    with ema.swapped():
        pass
    assert ema.tensors() == {}


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_a_decay_that_never_averages_is_refused(decay):
    with pytest.raises(RecipeError, match="at least 0 and less than 1"):
        Ema(parameters(), {"b": decay})
