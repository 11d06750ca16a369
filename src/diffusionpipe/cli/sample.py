"""`diffusionpipe sample RUN`: draw pictures from a trained model."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from diffusionpipe.trainer.recipe import SamplingSection

_GUIDANCE_HELP = (
    "How closely a picture follows its prompt: the scale of classifier-free guidance (1 is without), or the guidance "
    "embedding of a distilled model (FLUX.1-dev); default: the run's, or that of diffusers' pipeline."
)
_TRUE_CFG_HELP = (
    "Scale of classifier-free guidance of a distilled model (FLUX.1-dev), 1 is without; default: the run's, or 1."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """What is drawn from."""

    folder: Path
    """A diffusers folder."""
    adapters: Path | None
    """The folder of adapters that belong to it, if there are some."""
    scheduler: Mapping[str, object]


def sample(
    run: Annotated[
        Path, typer.Argument(help="The run's folder, its export/, or any diffusers folder.", show_default=False)
    ],
    prompt: Annotated[list[str] | None, typer.Option(help="A caption to draw; may be given several times.")] = None,
    label: Annotated[list[int] | None, typer.Option(help="A class to draw; may be given several times.")] = None,
    out: Annotated[Path, typer.Option(help="The picture to write: a captioned grid.")] = Path("grid.png"),
    count: Annotated[int, typer.Option(min=1, help="Pictures of each prompt or label.")] = 1,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Denoising steps; default: the run's, or 30.", show_default=False)
    ] = None,
    guidance: Annotated[float | None, typer.Option(min=0.0, help=_GUIDANCE_HELP, show_default=False)] = None,
    true_cfg_scale: Annotated[float | None, typer.Option(min=1.0, help=_TRUE_CFG_HELP, show_default=False)] = None,
    seed: Annotated[int, typer.Option(help="Keys the noise.")] = 0,
    resolution: Annotated[
        int | None,
        typer.Option(
            min=8, help="Pixels; default: as the run was trained, or as diffusers' pipeline draws.", show_default=False
        ),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(help="A diffusers scheduler, e.g. DDIMScheduler; default: the run's.", show_default=False),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Draw pictures from a run's export, also of a U-Net trained by flow matching, or of adapters (LoRA)."""
    import torch
    from rich.progress import Progress

    from diffusionpipe.cli.train import grid_columns
    from diffusionpipe.trainer.drawing import Wish, draw_from_folder
    from diffusionpipe.trainer.guidance import guidance_of
    from diffusionpipe.trainer.sampling import SamplingSettings
    from diffusionpipe.viz.grid import sample_grid

    model = _model(run)
    prompts = tuple(text for text in prompt or () for _ in range(count))
    wish = Wish(prompts=prompts, labels=tuple(number for number in label or () for _ in range(count)))
    _check(wish.prompts, wish.labels)
    own = _sampling_of(run)
    steps = steps or own.steps
    strength = guidance_of(
        model.folder,
        own.guidance if guidance is None else guidance,
        own.true_cfg_scale if true_cfg_scale is None else true_cfg_scale,
    )
    settings = SamplingSettings(
        steps=steps,
        guidance=strength.scale,
        embedded_guidance=strength.embedded,
        seed=seed,
        scheduler=model.scheduler,
        scheduler_class=scheduler or own.scheduler,
    )
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    with Progress(transient=True) as progress:
        task = progress.add_task("drawing", total=steps)
        pictures = draw_from_folder(
            model.folder,
            wish,
            settings,
            resolution=resolution or _resolution(run, model.folder),
            device=torch.device(chosen),
            adapters=model.adapters,
            on_step=lambda done, total: progress.update(task, completed=done, total=total),
        )
    sample_grid(list(zip(wish.captions, pictures, strict=True)), out, columns=grid_columns(len(pictures)))
    typer.echo(f"{len(pictures)} pictures in {out}")


def _check(prompts: tuple[str, ...], labels: tuple[int, ...]) -> None:
    from diffusionpipe.errors import ConfigError

    if bool(prompts) == bool(labels):
        raise ConfigError('say what to draw: --prompt "..." for a text model, or --label N for a class model')


def _model(run: Path) -> _Model:
    """What a run has exported, or any diffusers folder.

    Raises:
        ConfigError: there is none, or adapters whose base model is not known or not there.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.models.folder import scheduler_config
    from diffusionpipe.models.lora_file import ADAPTERS

    for folder in (run / "export", run):
        if (folder / "model_index.json").is_file():
            return _Model(folder=folder, adapters=None, scheduler=scheduler_config(folder))
        if (folder / ADAPTERS).is_file():
            return _with_adapters(folder, _recipe_of(run))
    if not run.is_dir():
        raise ConfigError(f"there is no folder {run}; give a run's folder or a diffusers folder")
    raise ConfigError(f"{run} holds no export/ yet: let the run finish (diffusionpipe train RECIPE --resume latest)")


def _with_adapters(adapters: Path, recipe: Path) -> _Model:
    """The base model of a run's adapters, with the scheduler that the run drew with."""
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.models.folder import resolve_folder
    from diffusionpipe.trainer.recipe_file import load_recipe
    from diffusionpipe.trainer.scheduler import sampling_scheduler
    from diffusionpipe.trainer.session import prediction_of

    if not recipe.is_file():
        raise ConfigError(
            f"{adapters} holds adapters alone, and no recipe.toml beside it names their base model; give the run's "
            "folder, or load them with diffusers' load_lora_weights"
        )
    loaded = load_recipe(recipe)
    folder = resolve_folder(loaded.model.path)
    scheduler = sampling_scheduler(folder, prediction_of(loaded, folder), loaded.objective.shift)
    return _Model(folder=folder, adapters=adapters, scheduler=scheduler)


def _recipe_of(run: Path) -> Path:
    """Where the resolved recipe of a run or of its export/ stands."""
    own = run / "recipe.toml"
    return own if own.is_file() else run.parent / "recipe.toml"


def _sampling_of(run: Path) -> "SamplingSection":
    """[sampling] of the run's recipe, or its defaults."""
    import tomllib

    from diffusionpipe.trainer.recipe import SamplingSection

    recipe = _recipe_of(run)
    if not recipe.is_file():
        return SamplingSection()
    return SamplingSection.model_validate(tomllib.loads(recipe.read_text(encoding="utf-8")).get("sampling", {}))


def _resolution(run: Path, folder: Path) -> int:
    """The resolution that the run was trained at, or that of diffusers' pipeline."""
    import tomllib

    from diffusionpipe.models.pipeline_defaults import default_resolution

    recipe = _recipe_of(run)
    if recipe.is_file():
        return int(tomllib.loads(recipe.read_text(encoding="utf-8"))["data"]["resolution"])
    return default_resolution(folder)
