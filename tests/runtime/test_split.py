"""Op I and op W together are op B: gradients, work and memory, for every kind of layer."""

import copy
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.parametrizations import weight_norm

from diffusionpipe.models.graphs.graph import Layer
from diffusionpipe.profiler.memory import LiveBytes
from diffusionpipe.runtime.comm.threads import Hub, ThreadTransport
from diffusionpipe.runtime.compute.casts import Casts
from diffusionpipe.runtime.compute.split import Deferred, forwards_of, run_with
from diffusionpipe.runtime.compute.stage import LayerStage, Precision
from diffusionpipe.runtime.weights.gradients import BlockGradients


def stage_of(module, *, checkpointed=False, autocast=None):
    layer = Layer(name="all", component="model", reads=("x",), writes=("y",), modules=("",), run=lambda m, x: (m(x),))
    return LayerStage(
        [layer],
        {"model": module},
        outputs=("y",),
        checkpointed=("all",) if checkpointed else (),
        precision=Precision(autocast=autocast),
    )


def gradients_of(module, x):
    """By name; the input's is called "x"."""
    found = {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
    return found | {"x": x.grad}


def backward(module, x, *, deferred=None, **how):
    """Forward and B, or I, on a fixed gradient of the output."""
    y = stage_of(module, **how)({"x": x}, deferred)["y"]
    generator = torch.Generator().manual_seed(1)
    y.backward(torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype))


def whole_and_split(module, x, *, repeats=2, **how):
    """Gradients after so many B, and after as many I and W; how many layers were put aside."""
    other = copy.deepcopy(module)
    mine, theirs = (x.clone().requires_grad_(x.is_floating_point()) for _ in range(2))
    deferred, put_aside = Deferred(), 0
    for _ in range(repeats):
        backward(module, mine, **how)
        backward(other, theirs, deferred=deferred, **how)
        put_aside += len(deferred)
        deferred.run()
        assert not len(deferred)
    return gradients_of(module, mine), gradients_of(other, theirs), put_aside // repeats


def assert_close(whole, split, rtol=1e-12):
    assert whole.keys() == split.keys()
    for name, gradient in whole.items():
        if gradient is None:
            assert split[name] is None, name
        else:
            assert split[name].dtype == gradient.dtype
            assert (split[name] - gradient).norm() <= rtol * gradient.norm(), name


class Raw(nn.Module):
    """Parameters that are used without a module of torch's."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(6))
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return nn.functional.linear(x * self.table, self.inner.weight) + self.inner(x)


class Twice(nn.Module):
    """One layer used twice, and a second one whose weight is the first one's."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(torch.tanh(self.first(x)))))


class Transposed(nn.Module):
    """A layer whose input is not contiguous, and which gets a gradient that is not."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 3)

    def forward(self, x):
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class InPlace(nn.Module):
    """The output of a layer is changed in place."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x).mul_(2).relu_()


IMAGE, TOKENS = (4, 6, 8, 8), (4, 5, 6)
KINDS = {
    "linear": (lambda: nn.Linear(6, 7), TOKENS, 1),
    "linear on one row each": (lambda: nn.Linear(6, 7), (4, 6), 1),
    "linear without bias": (lambda: nn.Linear(6, 7, bias=False), TOKENS, 1),
    "conv1d": (lambda: nn.Conv1d(6, 4, 3, stride=2, padding=1), (4, 6, 9), 1),
    "conv2d": (lambda: nn.Conv2d(6, 4, 3, stride=(1, 2), padding=(2, 1), dilation=2), IMAGE, 1),
    "conv2d in groups": (lambda: nn.Conv2d(6, 4, 3, groups=2, bias=False), IMAGE, 1),
    "conv3d": (lambda: nn.Conv3d(2, 4, (1, 3, 2), padding=(0, 1, 0)), (3, 2, 4, 5, 6), 1),
    "conv2d around the border": (lambda: nn.Conv2d(6, 4, 3, padding=1, padding_mode="circular"), IMAGE, 0),
    "conv2d padded to the same size": (lambda: nn.Conv2d(6, 4, 3, padding="same"), IMAGE, 0),
    "transposed convolution": (lambda: nn.ConvTranspose2d(6, 4, 2), IMAGE, 0),
    "layer norm": (lambda: nn.LayerNorm(6), TOKENS, 0),
    "group norm": (lambda: nn.GroupNorm(2, 6), IMAGE, 0),
    "rms norm": (lambda: nn.RMSNorm(6), TOKENS, 0),
    "weight norm": (lambda: weight_norm(nn.Linear(6, 7)), TOKENS, 0),
    "attention": (lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), TOKENS, 2),
    "raw parameters": (Raw, TOKENS, 1),
    "tied and twice": (Twice, TOKENS, 3),
    "not contiguous": (Transposed, TOKENS, 1),
    "linear changed in place": (lambda: InPlace(nn.Linear(6, 7)), TOKENS, 1),
    "conv2d changed in place": (lambda: InPlace(nn.Conv2d(6, 4, 3)), IMAGE, 1),
    "a stack": (lambda: nn.Sequential(nn.Conv2d(6, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 3, 1)), IMAGE, 2),
}


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(("build", "shape", "num_deferred"), KINDS.values(), ids=KINDS)
def test_gradients_in_two_parts_are_those_of_the_whole(build, shape, num_deferred, checkpointed):
    torch.manual_seed(0)
    module, x = build().double(), torch.randn(shape).double()
    whole, split, put_aside = whole_and_split(module, x, checkpointed=checkpointed)
    assert put_aside == num_deferred
    assert_close(whole, split)


@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"scale_grad_by_freq": True}], ids=str)
def test_embeddings_wait_for_w(options):
    torch.manual_seed(0)
    module, ids = nn.Embedding(7, 3, **options).double(), torch.randint(7, (4, 5))
    whole, split, put_aside = whole_and_split(module, ids)
    assert put_aside == 1
    assert_close(whole, split)


def test_layers_whose_inputs_need_no_gradient_wait_for_w_as_well():
    torch.manual_seed(0)
    module, other = (nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).double() for _ in range(2))
    other.load_state_dict(module.state_dict())
    x, deferred = torch.randn(4, 6).double(), Deferred()
    backward(module, x)
    backward(other, x, deferred=deferred)
    assert all(p.grad is None for p in other.parameters())
    deferred.run()
    assert_close(gradients_of(module, x), gradients_of(other, x))


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "recomputed"])
def test_under_autocast_the_bits_are_those_of_the_whole(checkpointed):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(6, 8, 3), nn.SiLU(), nn.Flatten(), nn.Linear(8 * 36, 16), nn.LayerNorm(16))
    how = {"autocast": torch.bfloat16, "checkpointed": checkpointed}
    whole, split, put_aside = whole_and_split(module, torch.randn(IMAGE), **how)
    assert put_aside == 2
    for name, gradient in whole.items():
        assert torch.equal(split[name], gradient), name


def test_under_autocast_what_is_put_aside_is_as_narrow_as_what_was_computed():
    module, deferred = nn.Linear(6, 7), Deferred()
    backward(module, torch.randn(4, 6), deferred=deferred, autocast=torch.bfloat16)
    seen = []
    deferred._entries[0] = (lambda *tensors: seen.extend(tensors), *deferred._entries[0][1:])
    deferred.run()
    assert [tensor.dtype for tensor in seen] == [torch.bfloat16] * 2


def test_adapters_alone_wait_for_w():
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    module = inject_adapter_in_model(LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False), module)
    module = module.double()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("lora" in name)
    whole, split, put_aside = whole_and_split(module, torch.randn(4, 6).double())
    assert put_aside == 4
    assert sum(gradient is not None for gradient in split.values()) == 5
    assert_close(whole, split)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_half_frozen_layers_get_the_other_gradient(frozen):
    torch.manual_seed(0)
    for module, x in (
        (nn.Linear(6, 7), torch.randn(TOKENS)),
        (nn.Conv2d(6, 4, 3), torch.randn(IMAGE)),
    ):
        getattr(module, frozen).requires_grad_(False)
        whole, split, put_aside = whole_and_split(module.double(), x.double())
        assert put_aside == (frozen == "bias")
        assert split[frozen] is None
        assert_close(whole, split)


def test_gradients_stay_in_the_memory_in_which_they_are_reduced():
    module, x = nn.Linear(6, 7), torch.randn(4, 6)
    flat = torch.zeros(sum(p.numel() for p in module.parameters()))
    module.weight.grad, module.bias.grad = flat[:42].view(7, 6), flat[42:]
    deferred = Deferred()
    backward(module, x, deferred=deferred)
    assert not flat.any()
    deferred.run()
    assert module.weight.grad.data_ptr() == flat.data_ptr()
    assert flat[:42].any()
    assert flat[42:].any()


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.num_runs = nn.Linear(6, 6), 0

    def forward(self, x):
        self.num_runs += 1
        return self.inner(x).tanh()


def test_a_checkpointed_layer_is_recomputed_once_in_i():
    module, deferred, runs = Counting(), Deferred(), []
    x = torch.randn(4, 6, requires_grad=True)
    y = stage_of(module, checkpointed=True)({"x": x}, deferred)["y"]
    runs.append(module.num_runs)
    y.sum().backward()
    runs.append(module.num_runs)
    deferred.run()
    runs.append(module.num_runs)
    assert runs == [1, 2, 2]


def storages_of(module):
    """Weak references to what the children of a sequence write, by index; filled by the next forward."""
    found = {}
    for index, child in enumerate(module):

        def note(_, inputs, output, index=index):
            found[index] = weakref.ref(output.untyped_storage())

        child.register_forward_hook(note)
    return found


def test_i_frees_what_w_does_not_need_and_w_the_rest():
    module = nn.Sequential(nn.Linear(6, 6), nn.Softmax(-1), nn.Sigmoid(), nn.Linear(6, 6), nn.Tanh())
    seen, deferred = storages_of(module), Deferred()
    x = torch.randn(4, 6, requires_grad=True)
    y = stage_of(module)({"x": x}, deferred)["y"]
    assert [seen[i]() is not None for i in (1, 2, 4)] == [True, True, True]
    edge, gradient = torch.autograd.graph.get_gradient_edge(y), torch.ones_like(y)
    del y
    torch.autograd.backward([edge], [gradient])
    del edge
    assert [seen[i]() is not None for i in (1, 2, 4)] == [False, True, False]
    deferred.run()
    assert seen[2]() is None


class Branches(nn.Module):
    """A convolution, or two linear layers, after an operation that needs no input for its backward."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.conv, self.first, self.second = kind, nn.Conv2d(8, 4, 1), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x, skip):
        joined = torch.cat([x, skip], 1)
        return self.conv(joined) if self.kind == "conv" else self.second(self.first(joined.movedim(1, -1)))


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("kind", ["conv", "linear"])
def test_after_i_nothing_refers_to_the_inputs_of_the_stage(kind, checkpointed):
    """The graph that leads to what W needs refers to them, and is gone."""
    layer = Layer(
        name="all", component="model", reads=("x", "skip"), writes=("y",), modules=("",), run=lambda m, *x: (m(*x),)
    )
    stage = LayerStage([layer], {"model": Branches(kind)}, outputs=("y",), checkpointed=("all",) * checkpointed)
    received = {name: torch.randn(2, 4, 3, 3, requires_grad=True) for name in layer.reads}
    storages = [weakref.ref(tensor.untyped_storage()) for tensor in received.values()]
    deferred = Deferred()
    stage(received, deferred)["y"].sum().backward()
    received.clear()
    assert len(deferred) == (1 if kind == "conv" else 2)
    assert [storage() for storage in storages] == [None, None]


def _written_by(run, *, checkpointed=True):
    """The outputs of a layer, their input, and the bytes of what the layer made, by its sizes in numbers."""
    layer = Layer(name="all", component="model", reads=("x",), writes=("a", "b"), modules=("",), run=run)
    module = nn.Linear(6, 6)
    stage = LayerStage([layer], {"model": module}, outputs=("a", "b"), checkpointed=("all",) * checkpointed)
    x = torch.randn(4, 10, 6, requires_grad=True)
    return x, module, stage({"x": x})


def test_a_part_of_what_a_recomputed_layer_makes_does_not_keep_the_rest():
    """The tokens of text and picture are one tensor in the layer; later layers read the picture's."""

    def run(module, x):
        both = module(x)
        return both[:, 7:], both[:, :1].movedim(1, 2)

    x, module, found = _written_by(run)
    assert [found[name].untyped_storage().nbytes() for name in "ab"] == [4 * 4 * 3 * 6, 4 * 4 * 6]
    (found["a"].square().sum() + found["b"].sum()).backward()
    both = module(x.detach().requires_grad_())
    expected = torch.autograd.grad(both[:, 7:].square().sum() + both[:, :1].sum(), [*module.parameters()])
    assert all(map(torch.equal, [parameter.grad for parameter in module.parameters()], expected))


def test_parts_of_fake_tensors_are_apart_too():
    """They have no address, and models of real size are counted with them."""
    with FakeTensorMode():
        _, _, found = _written_by(lambda module, x: (module(x)[:, 7:], x[:, :1]))
    assert found["a"].untyped_storage().nbytes() == 4 * 4 * 3 * 6


@pytest.mark.parametrize("run", [lambda module, x: module(x).split([7, 3], 1), lambda module, x: (x[:, :2], module(x))])
def test_parts_that_fill_a_tensor_and_parts_of_an_input_are_not_copied(run):
    x, _, found = _written_by(run)
    _, _, plain = _written_by(run, checkpointed=False)
    for name in "ab":
        assert found[name].untyped_storage().nbytes() == plain[name].untyped_storage().nbytes()
    shared = {tensor.untyped_storage().data_ptr() for tensor in (x, *found.values())}
    assert len(shared) == 2


def test_a_checkpointed_stage_holds_nothing_before_i():
    module = nn.Sequential(nn.Linear(6, 6), nn.Sigmoid(), nn.Linear(6, 6))
    seen, deferred = storages_of(module), Deferred()
    x = torch.randn(4, 6, requires_grad=True)
    y = stage_of(module, checkpointed=True)({"x": x}, deferred)["y"]
    assert seen[1]() is None
    y.sum().backward()
    assert seen[1]() is not None
    deferred.run()
    assert seen[1]() is None


def test_w_leaves_no_bytes_and_drops_each_layer_after_its_own():
    module, deferred = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]), Deferred()
    x = torch.randn(32, 64, requires_grad=True)
    backward(module, x)  # the gradients of the parameters are there already
    one, weight = 32 * 64 * 4, 64 * 64 * 4
    again = x.detach().requires_grad_()  # its gradient counts as long as it is here
    with LiveBytes() as gauge:
        backward(module, again, deferred=deferred)
        assert 2 * 4 * one <= gauge.live <= 2 * 4 * one + 4 * one
        gauge.restart_peak()
        before = gauge.live
        deferred.run()
        assert gauge.live <= one
        assert gauge.peak <= before + weight


def test_a_forward_of_the_instance_is_left_alone():
    module, deferred = nn.Linear(6, 6), Deferred()
    module.forward = lambda x: nn.functional.linear(x, module.weight)
    stage_of(module)({"x": torch.randn(4, 6)}, deferred)["y"].sum().backward()
    assert not len(deferred)
    assert module.weight.grad is not None
    assert "forward" in vars(module)


def test_modules_are_as_before_even_after_an_error():
    module = nn.Linear(6, 6)

    def fail(x: Tensor) -> None:
        assert "forward" in vars(module)
        raise RuntimeError("broken layer")

    with pytest.raises(RuntimeError, match="broken layer"):
        run_with(tuple(forwards_of([module, module])), Deferred(), Casts(), fail, torch.randn(1, 6))
    assert "forward" not in vars(module)


def test_dtypes_that_do_not_fit_are_refused_as_ever():
    module = nn.Linear(6, 6)
    with pytest.raises(RuntimeError, match="dtype"):
        stage_of(module)({"x": torch.randn(4, 6).double()}, Deferred())


class Added(nn.Module):
    """For one sample the table's gradient is that of the layer's output, in the same memory."""

    def __init__(self):
        super().__init__()
        self.inner, self.table = nn.Linear(6, 6), nn.Parameter(torch.randn(5, 6))

    def forward(self, x):
        return self.inner(x) + self.table.unsqueeze(0)


def test_what_was_put_aside_stays_as_it_was_through_the_next_i():
    torch.manual_seed(0)
    module = Added().double()
    other = copy.deepcopy(module)
    xs = [torch.randn(1, 5, 6).double().requires_grad_() for _ in range(2)]
    deferred, block = (
        [Deferred() for _ in xs],
        BlockGradients(tuple(other.parameters()), (0,), ThreadTransport(Hub(1), 0)),
    )
    block.reset()
    for x, aside in zip(xs, deferred, strict=True):
        backward(module, x)
        backward(other, x, deferred=aside)
        block.added(is_whole=False)
    for aside in deferred:
        aside.run()
    ours, theirs = gradients_of(module, xs[0]), gradients_of(other, xs[0])
    assert_close(ours, theirs)
