"""What a rank holds while it draws, and what `plan --draw` predicts of it."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

import torch
from kit.drawn_families import Asked
from kit.tiny_models import randomise_pipeline, tiny_flux_transformer
from kit.tiny_pipelines import flux
from planner import synthetic

from diffusionpipe.holding import Workload
from diffusionpipe.models.cut.glue import tables_of
from diffusionpipe.models.graphs.describe import describe
from diffusionpipe.models.graphs.graph import Layer, LayerGraph
from diffusionpipe.planner.drawing.drawing import DrawingMemory, predict_drawing
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.profiler import analytic_profile
from diffusionpipe.profiler.decoding import decoding_of_graph
from diffusionpipe.profiler.memory import LiveBytes
from diffusionpipe.runtime.job.process_group import Job
from diffusionpipe.trainer.inference import drawing, folder_drawing, ranks_drawing
from diffusionpipe.trainer.inference.drawing import Arithmetic
from diffusionpipe.trainer.inference.folder_drawing import open_source
from diffusionpipe.trainer.inference.ranks_drawing import Ranks, draw_on_ranks, rows_together
from diffusionpipe.trainer.recipe import RecipePrecision
from diffusionpipe.workflows.drawing.ranks import _plan


def save_flux(folder: Path) -> Path:
    """A FLUX.1 whose transformer is most of it."""
    pipeline = flux()
    wide = tiny_flux_transformer(num_attention_heads=4, attention_head_dim=64, axes_dims_rope=(16, 24, 24))
    pipeline.register_modules(transformer=wide)
    randomise_pipeline(pipeline)
    pipeline.save_pretrained(folder)
    return folder


@dataclass(slots=True)
class Watch:
    """What a rank holds. Mutable: it fills while the rank draws."""

    encoders: int = 0
    weights: int = 0
    stage: int = 0
    vae: int = 0
    decoding: int = 0
    tables: int = 0
    """Bytes of tables that this drawing was the first to compute: a process keeps them."""
    components: Sequence[torch.nn.Module] = ()
    layers: Sequence[Layer] = ()
    gauge: LiveBytes = field(default_factory=LiveBytes)

    def encode(self, run: Callable, layers, components, tensors, **options):
        """As `run_layers` of the encoders."""
        with self.gauge:
            found = run(layers, components, tensors, **options)
        self.encoders = weights_of(components.values()) + self.gauge.peak
        return found

    def build(self, build: Callable, graph: LayerGraph, *others, **options):
        """As `build_worker`."""
        self.components, self.layers = list(graph.components.values()), graph.layers
        self.tables = -self.bytes_of_tables()
        self.weights = weights_of(self.components)
        self.gauge.restart_peak()
        with self.gauge:
            return build(graph, *others, **options)

    def draw(self, draw: Callable, *arguments, **options):
        """As `drawn_by_stages`. Tables that are computed once do not count, like buffers."""
        with self.gauge:
            drawn = draw(*arguments, **options)
        self.tables += self.bytes_of_tables()
        self.stage = self.gauge.peak - self.tables
        return drawn

    def bytes_of_tables(self) -> int:
        return sum(table.nbytes for table in tables_of(self.layers))

    def decode(self, decode: Callable, *arguments):
        """As `decode` of latents."""
        with self.gauge:
            pictures = decode(*arguments)
        self.decoding = self.vae + self.gauge.peak - self.tables
        return pictures

    def open(self, open_vae: Callable, *arguments):
        """As `open_vae`."""
        before = self.gauge.live
        vae = open_vae(*arguments)
        self.vae = weights_of([vae, *self.components]) - (self.gauge.live - before)
        self.gauge.restart_peak()
        return vae


def weights_of(components: Sequence[torch.nn.Module]) -> int:
    """Bytes of parameters that are there."""
    found = {id(p): p for part in components for p in part.parameters() if not p.is_meta}
    return sum(parameter.nbytes for parameter in found.values())


def held(job: Job, asked: Asked, precision: RecipePrecision) -> DrawingMemory:
    """What a rank holds while it draws."""
    watch = Watch()
    ranks = Ranks(job=job, make_plan=_plan, arithmetic=Arithmetic(precision=precision))
    places = [
        (folder_drawing, "run_layers", watch.encode),
        (ranks_drawing, "build_worker", watch.build),
        (ranks_drawing, "drawn_by_stages", watch.draw),
        (ranks_drawing, "decode", watch.decode),
        (drawing, "open_vae", watch.open),
    ]
    with ExitStack() as patches:
        for module, name, wrapped in places:
            real = getattr(module, name)
            patches.enter_context(
                mock.patch.object(module, name, lambda *a, real=real, wrapped=wrapped, **o: wrapped(real, *a, **o))
            )
        draw_on_ranks(asked.sources, asked.wish, asked.settings, ranks)
    return DrawingMemory(encoders=watch.encoders, weights=watch.weights, tensors=watch.stage, decoding=watch.decoding)


def predicted(asked: Asked, precision: RecipePrecision, ranks: int) -> tuple[DrawingMemory, ...]:
    """As `plan --draw`."""
    opened = open_source(asked.sources[0], asked.wish, asked.settings[0])
    autocast = torch.bfloat16 if precision is RecipePrecision.BFLOAT16 else None
    model = describe(opened.graph, autocast=autocast)
    rows = len(asked.wish) * asked.settings[0].copies
    profile = analytic_profile(
        opened.graph, model, device="cpu-1-thread", precision=precision.value, batch_sizes=(1, rows)
    )
    profile = replace(profile, decoding=decoding_of_graph(opened.graph))
    setting = Setting(profile=profile, cluster=synthetic.cluster(ranks), workload=Workload(batch=1))
    return predict_drawing(setting, pictures=len(asked.wish), rows=rows, size=rows_together(rows)).memory
