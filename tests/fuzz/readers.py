"""The code that reads inputs, by the kind of input."""

from collections.abc import Callable
from pathlib import Path

import torch
from kit.tiny_runs import recipe_of

from diffusionpipe import cli
from diffusionpipe.trainer.checkpoints.checkpoint import load, resolve


def load_run_recipe(recipe: Path, overrides: tuple[str, ...] = ()) -> Callable[[], object]:
    from diffusionpipe.trainer.recipe import load_recipe, recipe_to_toml
    from diffusionpipe.workflows.training.recipe_checks import checks_of_run

    return lambda: recipe_to_toml(load_recipe(recipe, overrides, checks_of_run(2, None)))


def command(*words: object) -> Callable[[], object]:
    return lambda: cli.main([str(word) for word in words])


def scan_data(data: Path) -> None:
    from diffusionpipe.trainer.data.decoding.images import load_pixels
    from diffusionpipe.trainer.data.scan.dataset import scan

    found = scan(data, "text")
    for index in range(len(found.samples)):
        load_pixels(found.path(index), resolution=16)


def scan_clips(data: Path) -> None:
    from diffusionpipe.trainer.data.decoding.clips import FrameSelection, load_clip
    from diffusionpipe.trainer.data.scan.dataset import scan

    taken = FrameSelection(frames=5, rate=6)
    found = scan(data, "text", taken=taken)
    for index in range(len(found.samples)):
        load_clip(found.path(index), size=(16, 16), taken=taken, start=0.5)


def open_model(model: Path) -> None:
    from diffusionpipe.models.opening.folder import scheduler_config
    from diffusionpipe.trainer.inference.conditions import open_tokenizer
    from diffusionpipe.trainer.inference.denoise import Spacing, build_scheduler, set_times
    from diffusionpipe.trainer.model.members import build_model

    recipe = recipe_of(model, model, model / "run")
    build_model(recipe, "cpu")
    open_tokenizer(model)
    config = scheduler_config(model)
    set_times(build_scheduler(config), config, 4, Spacing())


def materialize_unet(model: Path) -> None:
    from diffusionpipe.models.objectives.objective import ObjectiveSettings
    from diffusionpipe.models.opening.folder import build_graph, weight_sources
    from diffusionpipe.models.parameters.weights import materialize

    graph = build_graph(model, objective=ObjectiveSettings(), resolution=16)
    names = [layer.name for layer in graph.layers]
    materialize(graph, names, weight_sources(model, graph), device="cpu", dtype=torch.float32, seed=0)


def load_checkpoint(run: Path) -> None:
    """The latest checkpoint of the originals' run, as a resumed run reads it."""
    from diffusionpipe.trainer.course.kept_facts import kept_facts
    from diffusionpipe.trainer.course.run_identity import check_resumed
    from diffusionpipe.trainer.step.spikes import kept_values

    path = resolve(run, "latest")
    state = load(path, {"model.a": torch.zeros(50), "ema.b": torch.zeros(3, 4)})
    check_resumed(kept_facts(state, path), {"prediction": "epsilon"}, 10)
    kept_values(state)


def use_run(run: Path) -> None:
    """What a resumed run and `sample` read of a run's folder beside its checkpoints."""
    from diffusionpipe.trainer.checkpoints.checkpoint import clean, problem_of_folder
    from diffusionpipe.trainer.data.scan.skipped import count_skipped
    from diffusionpipe.trainer.launching.lock_owner import Timing
    from diffusionpipe.trainer.launching.run_lock import acquire
    from diffusionpipe.trainer.reporting.metrics import MetricsWriter, last_step, read_metrics
    from diffusionpipe.workflows.drawing.run_recipe import sampling_of, size_of

    with acquire(run, take_over=True, timing=Timing(beat=0.01, stale=0.05, ending=0.05)):
        clean(run)
        problem_of_folder(run, "latest")
        last_step(run)
        MetricsWriter(run, resume_step=2).close()
        read_metrics(run)
        count_skipped(run, 3)
        sampling_of(run)
        size_of(run, run, None, None, None)
