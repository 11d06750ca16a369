"""Random layer graphs, and the step of one process on the whole batch: plain autograd, layer after layer.

A tensor holds four tokens of six numbers a sample, in whatever shape its layer left it: each layer reshapes what it
reads, which is a view where it can be. Some layers are nothing but a view of what they read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from random import Random

import torch
from torch import Tensor, nn
from torch.nn import functional

from diffusionpipe.costs import Backbone, TensorSpec
from diffusionpipe.models.graphs.graph import Layer, LayerGraph

TOKENS, WIDTH = 4, 6
FLOAT = torch.float64
NUM_IDS = 5


def tokens(x: Tensor) -> Tensor:
    """Any tensor of a graph as tokens: (B, T, D)."""
    return x.reshape(len(x), TOKENS, WIDTH)


class Compute(nn.Module):
    """Linear layers with something between them; `how` is one of `COMPUTES`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm, self.conv = nn.LayerNorm(WIDTH), nn.Conv1d(TOKENS, TOKENS, 3, padding=1)
        self.table, self.other = nn.Parameter(torch.randn(TOKENS * WIDTH)), nn.Parameter(torch.randn(TOKENS * WIDTH))
        used = set(COMPUTES[how][0])
        for name in ("one", "two", "norm", "conv", "table", "other"):
            if name not in used:
                delattr(self, name)

    def forward(self, *reads: Tensor) -> Tensor:
        """Of the sum of what it reads."""
        x = tokens(reads[0])
        for more in reads[1:]:
            x = x + tokens(more)
        return COMPUTES[self.how][1](self, x)


COMPUTES: dict[str, tuple[tuple[str, ...], Callable[..., Tensor]]] = {
    "linear": (("one",), lambda m, x: m.one(x).tanh()),
    "linear alone": (("one",), lambda m, x: m.one(x)),
    "changed in place": (("one",), lambda m, x: m.one(x).mul_(2).sigmoid_()),
    "a slice changed in place": (("one",), lambda m, x: _halved_in_place(m.one(x))),
    "weight used twice": (("one",), lambda m, x: m.one(m.one(x).tanh())),
    "module and function": (("one",), lambda m, x: functional.linear(m.one(x).tanh(), m.one.weight)),
    "two linear layers": (("one", "two"), lambda m, x: m.two(m.one(x).sin()) + x),
    "norm": (("norm", "one"), lambda m, x: m.one(m.norm(x))),
    "convolution": (("conv",), lambda m, x: m.conv(x).tanh()),
    "tables that are reshaped": (
        ("table", "other"),
        lambda m, x: x * (m.table.view(TOKENS, WIDTH) + m.other.view(TOKENS, WIDTH)).cos(),
    ),
    "a table added": (("one", "table"), lambda m, x: m.one(x) + m.table.view(1, TOKENS, WIDTH)),
    "heads": (("one",), lambda m, x: _attention(m.one(x))),
}


def _halved_in_place(x: Tensor) -> Tensor:
    x[:, ::2].mul_(0.5)
    return x


def _attention(x: Tensor) -> Tensor:
    heads = x.view(len(x), TOKENS, 2, WIDTH // 2).transpose(1, 2)
    return functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(x.shape)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "flat": lambda x: x.flatten(1),
    "unflat": lambda x: x.reshape(len(x), 2, -1),
    "same type": lambda x: x.type_as(x),
    "turned twice": lambda x: tokens(x).transpose(1, 2).transpose(1, 2),
    "alias": lambda x: x[:],
}


class View(nn.Module):
    """Nothing but a view of what it reads."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        """A view of the first thing that it reads."""
        return VIEWS[self.how](x)


class Chunks(nn.Module):
    """Two outputs in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Halves of what a linear layer makes."""
        return self.inner(tokens(x)).chunk(2, dim=-1)


class Embedded(nn.Module):
    """Reads numbers of words."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Embedding(NUM_IDS, WIDTH)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """Of tokens and ids, (B, T)."""
        return tokens(x) + self.inner(ids)


class Passing(nn.Module):
    """A result, and a view of what it has read for a later layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What it computes, and what it was given."""
        return self.inner(tokens(x)).tanh(), x.flatten(1)


@dataclass(frozen=True)
class Model:
    """A random graph and what one process makes of it."""

    graph: LayerGraph
    tied: tuple[str, str] | None
    """Two layers with a weight in common, if there are."""

    def inputs(self, batch: int, seed: int) -> dict[str, Tensor]:
        """Raw inputs."""
        generator = torch.Generator().manual_seed(seed)
        shape = (batch, TOKENS, WIDTH)
        return {
            "input": torch.randn(shape, generator=generator, dtype=FLOAT),
            "target": torch.randn(shape, generator=generator, dtype=FLOAT),
            "ids": torch.randint(NUM_IDS, (batch, TOKENS), generator=generator),
        }

    def whole(self, inputs: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        """Mean loss and gradients of the whole batch in one process."""
        values = dict(inputs)
        for layer in self.graph.layers:
            written = layer.run(self.graph.components[layer.component], *(values[name] for name in layer.reads))
            values.update(zip(layer.writes, written, strict=True))
        loss = values["loss"].mean()
        trained = {n: p for n, p in self.graph.components["model"].named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(loss, list(trained.values()))
        return float(loss.detach()), {f"model.{name}": g for name, g in zip(trained, gradients, strict=True)}

    def memory(self) -> dict[str, tuple[str, ...]]:
        """Each tensor -> all written before it in whose memory it lies, found by running the layers."""
        values = self.inputs(2, 0)
        found: dict[str, tuple[str, ...]] = {}
        for layer in self.graph.layers:
            written = layer.run(self.graph.components[layer.component], *(values[name] for name in layer.reads))
            for name, value in zip(layer.writes, written, strict=True):
                home = value.untyped_storage().data_ptr()
                found[name] = tuple(n for n, v in values.items() if v.untyped_storage().data_ptr() == home)
                values[name] = value
        return found


def random_model(random: Random, num_layers: int, *, ties: bool) -> Model:
    """Layers that each read the one before and, some of them, others; the loss reads what nobody has read.

    With `ties` two of them may have a module in common.
    """
    modules: dict[str, nn.Module] = {}
    layers: list[Layer] = []
    current, kept = "input", []
    if random.random() < 0.3:
        layers.append(_layer("encode", "frozen", ("input",), ("encoded",)))
        current = "encoded"
    for index in range(num_layers):
        name, reads, writes = f"l{index}", [current], [f"t{index}"]
        # A first layer that is nothing but a view would be frozen.
        kind = random.choices(KINDS, WEIGHTS)[0] if index else "compute"
        if kind == "compute":
            while kept and random.random() < 0.5:
                reads.append(kept.pop(random.randrange(len(kept))))
            others = [layer.writes[0] for layer in layers if layer.component == "model"][:-1]
            if others and random.random() < 0.25:
                reads.append(random.choice(others[-4:]))
            module: nn.Module = Compute(random.choice(list(COMPUTES)))
        elif kind == "embedded":
            reads.append("ids")
            module = Embedded()
        elif kind == "view":
            module = View(random.choice(list(VIEWS)))
        else:
            writes.append(f"t{index}.more")
            kept.append(writes[1])
            module = Chunks() if kind == "chunks" else Passing()
        modules[name] = module
        layers.append(_layer(name, "model", tuple(dict.fromkeys(reads)), tuple(writes)))
        current = writes[0]
    tied = _tie(random, modules) if ties else None
    modules["last"] = nn.Linear(WIDTH, WIDTH)
    reads = (current, *dict.fromkeys(kept), "target")
    layers.append(Layer(name="loss", component="model", reads=reads, writes=("loss",), modules=("last",), run=_loss))
    components = {"frozen": nn.Identity(), "model": nn.ModuleDict(modules).to(FLOAT)}
    words = TensorSpec(name="ids", shape=(TOKENS,), dtype="int64")
    rest = (TensorSpec(name=name, shape=(TOKENS, WIDTH), dtype="float64") for name in ("input", "target"))
    graph = LayerGraph(
        layers=tuple(layers), components=components, inputs=(*rest, words), backbones=(Backbone(prediction=None),)
    )
    return Model(graph, tied)


KINDS = ("compute", "view", "passing", "chunks", "embedded")
WEIGHTS = (4, 5, 2, 1, 0.5)


def _layer(name: str, component: str, reads: tuple[str, ...], writes: tuple[str, ...]) -> Layer:
    is_frozen = component == "frozen"
    return Layer(
        name=name,
        component=component,
        reads=reads,
        writes=writes,
        modules=() if is_frozen else (name,),
        run=_encode if is_frozen else partial(_call, name),
    )


def _encode(_: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    return (x.flatten(1),)


def _call(name: str, model: nn.Module, *reads: Tensor) -> tuple[Tensor, ...]:
    written = model[name](*reads)  # type: ignore[index]  # a ModuleDict
    return written if isinstance(written, tuple) else (written,)


def _loss(model: nn.Module, *reads: Tensor) -> tuple[Tensor, ...]:
    *others, target = reads
    prediction = sum(tokens(x) for x in others)
    return (((model.last(prediction) - target) ** 2).flatten(1).mean(1),)  # type: ignore[operator, union-attr]


def _tie(random: Random, modules: dict[str, nn.Module]) -> tuple[str, str] | None:
    """Give two layers a linear layer in common; None where there are no two."""
    having = [name for name, module in modules.items() if isinstance(module, Compute) and hasattr(module, "one")]
    if len(having) < 2:
        return None
    first, second = random.sample(having, 2)
    modules[second].one = modules[first].one
    return first, second
