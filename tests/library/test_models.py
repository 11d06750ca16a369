"""What `dp.pipeline` takes, and what it refuses by name."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import diffusionpipe as dp
from diffusionpipe.errors import ConfigError, ModelError

X, Y = torch.randn(4, 16), torch.randn(4, 4)


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *tensors):
        return self.function(self, *tensors)


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, hidden):
        self.seen += 1
        return hidden


def mse(output, target):
    return (output - target).square().mean(1)


def made(*layers, loss=mse, example=(X, Y)):
    return dp.pipeline(list(layers), loss=loss, example=example)


def lstm(**options):
    return Call(lambda own, x: own.inner(x[:, None])[0][:, 0], inner=nn.LSTM(16, 4, batch_first=True, **options))


LOSSES = {
    "a scalar": (nn.MSELoss(), r"the loss returns a tensor of shape \(\) for 2 samples"),
    "a value an element": (nn.MSELoss(reduction="none"), r"the loss returns a tensor of shape \(2, 4\) for 2 samples"),
    "a number": (lambda output, target: 1.0, "the loss returns float for 2 samples"),
    "a tuple": (lambda output, target: (mse(output, target), output), "the loss returns tuple for 2 samples"),
    "other samples' part": (lambda o, t: mse(o, t) / mse(o, t).sum(), "the output of loss for a sample depends on"),
    "with weights": (nn.Sequential(nn.Bilinear(4, 4, 1), nn.Flatten(0)), "the loss trains"),
    "of more tensors": (lambda output, target, more: mse(output, target), "the loss cannot run on"),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_that_gives_no_value_a_sample_is_refused(kind):
    loss, says = LOSSES[kind]
    with pytest.raises(ModelError, match=says):
        made(nn.Linear(16, 4), loss=loss)


RANDOM = {
    "Dropout": nn.Dropout(0.1),
    "RReLU": nn.RReLU(),
    "function": Call(lambda own, x: functional.dropout(x, 0.1)),
    "noise": Call(lambda own, x: x + torch.randn_like(x)),
    "gumbel": Call(lambda own, x: functional.gumbel_softmax(x)),
}
MIXING = {
    "BatchNorm": nn.BatchNorm1d(4),
    "BatchNorm without statistics": nn.BatchNorm1d(4, track_running_stats=False).eval(),
    "mean": Call(lambda own, x: x - x.mean(0)),
    "softmax": nn.Softmax(0),
}


@pytest.mark.parametrize("kind", RANDOM)
def test_modules_that_draw_random_numbers_are_refused_by_name(kind):
    with pytest.raises(ModelError, match=rf"1.{type(RANDOM[kind]).__name__} draws random numbers"):
        made(nn.Linear(16, 4), RANDOM[kind])


def test_dropout_in_a_recurrent_module_is_refused_and_what_is_off_is_not():
    with pytest.raises(ModelError, match=r"0.Call draws random numbers"):
        made(lstm(num_layers=2, dropout=0.1))
    made(nn.Linear(16, 4), nn.Dropout(0.1).eval(), nn.BatchNorm1d(4).eval(), nn.Dropout(0.0))


@pytest.mark.parametrize("kind", MIXING)
def test_modules_that_mix_samples_are_refused_by_name(kind):
    with pytest.raises(ModelError, match=rf"1.{type(MIXING[kind]).__name__}.*(other|others)") as caught:
        made(nn.Linear(16, 4), MIXING[kind])
    assert len(str(caught.value).splitlines()) <= 3


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (nn.ReLU(inplace=True), "1.ReLU changes in place what it reads: 0.Linear.output"),
        (Counter(), r"1.Counter writes to its seen \(Counter\)"),
        (
            Call(lambda own, x: (own.inner(x), own.inner.weight.data.add_(1))[0], inner=nn.Linear(4, 4)),
            "the output of 1.Call",
        ),
        (Call(lambda own, x: x if x.sum() > 0 else -x), "1.Call cannot run on 0.Linear.output"),
    ],
)
def test_modules_that_change_inputs_or_buffers_or_look_at_values_are_refused(layer, says):
    with pytest.raises(ModelError, match=says):
        made(nn.Linear(16, 4), layer)


@pytest.mark.parametrize(
    ("layer", "kinds"),
    [
        (nn.LSTM(16, 4, batch_first=True), r"\(Tensor, tuple\)"),
        (Call(lambda own, x: {"out": x}), "dict"),
        (Call(lambda own, x: None), "NoneType"),
        (Call(lambda own, x: (x, None)), r"\(Tensor, NoneType\)"),
        (Call(lambda own, x: ()), r"\(\)"),
    ],
)
def test_outputs_that_are_no_tensors_are_refused(layer, kinds):
    with pytest.raises(ModelError, match=rf"0.{type(layer).__name__} returns {kinds}, and a layer returns a tensor or"):
        made(layer)


def test_tensors_that_do_not_fit_name_both_modules_and_no_traceback_is_logged(capfd):
    with pytest.raises(ModelError, match=r"1.Linear cannot run on 0.Linear.output \(2, 8\) float32: "):
        made(nn.Linear(16, 8), nn.Linear(16, 4))
    with pytest.raises(ModelError, match=r"1.Linear cannot run on wide \(2, 8\) float32 of 0.Linear: "):
        made(dp.layer(nn.Linear(16, 8), writes="wide"), dp.layer(nn.Linear(16, 4), reads="wide"))
    with pytest.raises(ModelError, match=r"the loss cannot run on 0.Linear.output \(2, 3\) float32, target \(2, 4\)"):
        made(nn.Linear(16, 3))
    with pytest.raises(ModelError, match=r"0.Linear cannot run on input \(1, 16\) float32: .*dtype"):
        made(nn.Linear(16, 4).double())
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        (
            [dp.layer(nn.Linear(16, 4), reads="wide")],
            "0.Linear reads 'wide', which nothing before it writes; there are",
        ),
        ([dp.layer(nn.Linear(16, 4), writes=("a", "b"))], r"0.Linear returns 1 tensors, but writes=\('a', 'b'\)"),
        ([dp.layer(nn.Linear(16, 4), writes="input")], "0.Linear writes 'input', which is the name of another tensor"),
        ([dp.layer(nn.Linear(16, 4), writes="loss")], "0.Linear writes 'loss', which is the name of another tensor"),
        ([nn.Linear(16, 4), nn.Flatten(0)], "cannot run on|dimension 0"),
        ([lambda x: x], "layer 0 is a function; give an nn.Module that calls it"),
        ([], "a pipeline needs at least one layer"),
    ],
)
def test_layers_that_are_none_are_refused(layers, says):
    with pytest.raises(ModelError, match=says):
        made(*layers)


@pytest.mark.parametrize("options", [{"reads": ""}, {"writes": (1,)}, {"writes": ("a", "a")}])
def test_names_that_are_none_are_refused(options):
    with pytest.raises(ModelError, match="Linear: give"):
        dp.layer(nn.Linear(16, 4), **options)


@pytest.mark.parametrize(
    ("example", "says"),
    [
        ((X,), "at least an input and a target"),
        ((X, 3), "must be tensors"),
        ((X, Y[:2]), "different numbers of samples in dimension 0: input 4, target 2"),
        ({"loss": X, "y": Y}, "'loss' is the name of the result"),
    ],
)
def test_an_example_that_is_no_batch_is_refused(example, says):
    with pytest.raises(ModelError, match=says):
        made(nn.Linear(16, 4), example=example)


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ((X,), "a batch of 1 tensors, but the model takes 2: input, target"),
        ((X[:, :3], Y), r"input has the shape \(4, 3\) .*; the example had \(samples, 16\) and float32"),
        ((X.double(), Y), "input has .* float64; the example had"),
        ((X, Y[:3]), "target has 3 samples and input has 4"),
        ((X, [1]), "target is a list; give a tensor"),
    ],
)
def test_a_batch_unlike_the_example_is_refused(batch, says):
    with pytest.raises(ModelError, match=says):
        made(nn.Linear(16, 4)).loss(*batch)


def test_a_parameter_of_two_layers_is_trained_on_one_rank_or_refused_by_name():
    shared = nn.Linear(16, 16)
    model = made(shared, nn.Tanh(), shared, nn.Linear(16, 4))
    profile = dp.profile(model, analytic="cpu-1-thread", batch_sizes=(1, 2))
    with pytest.raises(ConfigError, match=r"0.Linear and 2.Linear train the same parameter model.0"):
        dp.plan(profile, cluster="cpux2:2", batch=4, replicas=(1, 1, 1, 1))
    copied = dp.plan(profile, cluster="cpux2", batch=4, data_parallel=2)
    with dp.run(model, copied.plan, ranks="threads") as run:
        run.step(X, Y)
        found = run.gradients()
    model.loss(X, Y).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-6)


def test_a_module_without_parameters_may_stand_twice():
    tanh = nn.Tanh()
    assert [layer.name for layer in made(nn.Linear(16, 4), tanh, tanh).graph.layers] == [
        "0.Linear", "1.Tanh", "2.Tanh", "loss"
    ]  # fmt: skip


def test_a_module_with_a_forward_of_its_own_is_cut_at_its_blocks():
    def forward(own, x):
        for block in own.blocks:
            x = torch.tanh(block(x))
        return own.head(x)

    net = Call(forward, blocks=nn.ModuleList(nn.Linear(16, 16) for _ in range(3)), head=nn.Linear(16, 4))
    model = dp.pipeline(net, loss=mse, example=(X, Y))
    assert len(model.graph.layers) == 5
    assert float(model.loss(X, Y).detach()) == pytest.approx(float(mse(net(X), Y).mean().detach()))


def test_a_profile_is_refused_in_a_precision_that_the_model_has_not():
    model = made(nn.Linear(16, 4))
    with pytest.raises(ConfigError, match="precision='float64', but the parameters are float32"):
        dp.profile(model, analytic="cpu-1-thread", precision="float64")
    with pytest.raises(ConfigError, match=r"dp\.profile takes a model, not a Linear; make one with dp\.pipeline"):
        dp.profile(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="the device 'cpu-9' is not known"):
        dp.profile(model, analytic="cpu-9")


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_a_layer_may_stop_gradients_and_pass_on_what_it_reads(schedule):
    torch.manual_seed(0)
    layers = [
        nn.Linear(16, 16),
        Call(lambda own, x: (x.detach(), x)),
        Call(lambda own, x, y: (torch.tanh(own.inner(x)), y), inner=nn.Linear(16, 16)),
        nn.Bilinear(16, 16, 16),
        Call(lambda own, x: (own.inner(x), (x > 0).to(x.dtype)), inner=nn.Linear(16, 16)),
        nn.Bilinear(16, 16, 4),
    ]
    model = made(*layers)
    order = dp.schedule(schedule, ranks=2, microbatches=2)
    choice = dp.plan(
        dp.profile(model, analytic="cpu-1-thread", batch_sizes=(1, 2)), cluster="cpux2", batch=4, schedule=order
    )
    with dp.run(model, choice.plan, ranks="threads") as run:
        run.step(X, Y)
        found = run.gradients()
    model.loss(X, Y).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-6)
