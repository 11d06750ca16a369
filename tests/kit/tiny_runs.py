"""Tiny trainings: complete diffusers folders, pictures, recipes, and the run of a recipe on one rank of a job."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import torch
from diffusers import DDIMScheduler, DiTPipeline, StableDiffusionPipeline
from kit.cuts import traced_once
from kit.descriptions import described
from kit.tiny_models import NUM_CLASSES, randomise_parameters, tiny_text_encoder, tiny_transformer, tiny_unet, tiny_vae
from PIL import Image
from torch import Tensor
from transformers import CLIPTokenizer

from diffusionpipe.ir.data_survey import Line
from diffusionpipe.models.graphs.graph import canonical_names
from diffusionpipe.profiler import links, measure_links, measured, passes, profile_job, together, waking
from diffusionpipe.runtime.job.membership import membership
from diffusionpipe.runtime.job.process_group import Job, joined
from diffusionpipe.trainer.checkpoints.checkpoint import read
from diffusionpipe.trainer.checkpoints.tensor_files import stored_tensors
from diffusionpipe.trainer.course import run as run_module
from diffusionpipe.trainer.course.caching import JudgeCache
from diffusionpipe.trainer.course.run_samples import sampling_settings
from diffusionpipe.trainer.course.run_state import Hooks
from diffusionpipe.trainer.course.traced import TracedSteps
from diffusionpipe.trainer.inference.cascade_drawing import draw_in_session
from diffusionpipe.trainer.inference.conditions import SampleRequest
from diffusionpipe.trainer.inference.drawing import Picture
from diffusionpipe.trainer.model import members
from diffusionpipe.trainer.recipe import Recipe
from diffusionpipe.trainer.reporting.metrics import read_metrics
from diffusionpipe.trainer.setup import job_cluster, job_profile
from diffusionpipe.trainer.setup.job_profile import ProfileCache
from diffusionpipe.trainer.setup.planning import Planning
from diffusionpipe.trainer.setup.session import open_session
from diffusionpipe.trainer.setup.start import Start
from diffusionpipe.trainer.step import loop, spikes, stopping
from diffusionpipe.trainer.step.loop import Stepper
from diffusionpipe.trainer.step.step_result import StepResult
from diffusionpipe.trainer.step.windows import WindowStepper
from diffusionpipe.workflows.training.run_check import RunCheck

RESOLUTION = 8


def save_stable_diffusion(folder: Path, **scheduler: object) -> Path:
    """A Stable Diffusion as diffusers saves it."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {word: number for number, word in enumerate(words)}
    end = vocabulary["<|endoftext|>"]
    tokenizer = CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=6)
    text_encoder = tiny_text_encoder(
        vocab_size=len(words), bos_token_id=end - 1, eos_token_id=end, pad_token_id=end, max_position_embeddings=6
    )
    parts = {"vae": tiny_vae(), "text_encoder": text_encoder, "unet": tiny_unet()}
    for seed, part in enumerate(parts.values()):
        randomise_parameters(part, seed)
    pipeline = StableDiffusionPipeline(
        **parts,
        tokenizer=tokenizer,
        scheduler=DDIMScheduler(clip_sample=False, steps_offset=1, **scheduler),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(folder)
    return folder


def save_dit(folder: Path, vae_levels: int = 2) -> Path:
    """A class-conditional DiT as diffusers saves it; its VAE halves pictures once less often than it has levels."""
    vae = tiny_vae(
        block_out_channels=(*(4,) * (vae_levels - 1), 8),
        down_block_types=("DownEncoderBlock2D",) * vae_levels,
        up_block_types=("UpDecoderBlock2D",) * vae_levels,
    )
    parts = {"vae": vae, "transformer": tiny_transformer()}
    for seed, part in enumerate(parts.values()):
        randomise_parameters(part, seed)
    DiTPipeline(**parts, scheduler=DDIMScheduler(clip_sample=False)).save_pretrained(folder)
    return folder


def save_pictures(folder: Path, count: int = 20, seed: int = 0, resolution: int = RESOLUTION) -> Path:
    """Random pictures with captions and labels."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    lines = []
    for number in range(count):
        name = f"{number:03d}.png"
        Image.fromarray(random.integers(0, 256, (resolution, resolution, 3), dtype=np.uint8)).save(folder / name)
        label = number % NUM_CLASSES
        lines.append(json.dumps({"file_name": name, "text": "abcdefgh"[label], "label": label}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def recipe_of(model: Path, data: Path, folder: Path, /, **sections: Mapping[str, object]) -> Recipe:
    """A recipe of 6 steps of 4 samples; `sections` override its keys, e.g. training={"steps": 3}."""
    base: dict[str, dict[str, object]] = {
        "model": {"path": str(model)},
        "data": {"train": str(data), "resolution": RESOLUTION, "workers": 0},
        "training": {"steps": 6, "batch": 4, "ema_decay": 0.9, "precision": "float32"},
        "optimizer": {"learning_rate": 0.01},
        "pipeline": {"microbatches": 2, "encode_chunk": 2},
        "run": {"folder": str(folder)},
    }
    for name, section in sections.items():
        base[name] = base.get(name, {}) | dict(section)
    return Recipe.model_validate(base)


def save_array(pictures: Sequence[Picture], captions: Sequence[str], path: Path) -> None:
    """In place of the captioned grid: the pictures themselves, (pictures, H, W, 3); none where their sizes differ."""
    if len({picture.shape for picture in pictures}) == 1:
        np.save(path.with_suffix(".npy"), np.stack(pictures))


def train(
    job: Job,
    recipe: Recipe,
    resume: str | None = None,
    at: Mapping[int, Callable[[Job, Recipe], None]] | None = None,
    calm: int = 1,
    profiles: ProfileCache | None = None,
    check: RunCheck | None = None,
    announce: Callable[[Start], None] | None = None,
    tell_data: Callable[[Sequence[Line]], None] | None = None,
    judge_cache: JudgeCache | None = None,
    exports: bool = True,
    saves: bool = True,
) -> int:
    """The run of a recipe on this rank; `at` are things that happen while a step is under way, by steps then done.

    A tiny run takes a fourth of its time to export and a third to save. `exports`: False for a test that reads no
    export, `saves`: False for one that reads neither checkpoint nor timeline nor export.
    `calm`: steps without clipping after which the next are post-validated, where the recipe wants that. `profiles`:
    where profiles of other runs are. `check`: who corrects the prediction. `announce`: who hears what the run is,
    `tell_data`: what its data are. `judge_cache`: who says what a cache is worth.
    """
    from diffusionpipe.planner.unequal.cutting import cutting_of
    from diffusionpipe.workflows.training.plan_memory import check_plan_memory
    from diffusionpipe.workflows.training.run_plan import make_plan

    hooks = Hooks(
        make_plan=make_plan,
        make_cutting=cutting_of,
        check_plan=check_plan_memory,
        save_grid=save_array,
        profiles=profiles,
        judge=check,
        announce=announce,
        tell_data=tell_data,
        judge_cache=judge_cache,
    )
    with (
        mock.patch.object(stopping, "_LOOK", 0.0),
        mock.patch.object(loop, "UNCLIPPED_STEPS_BEFORE_OPTIMISM", calm),
        mock.patch.object(run_module, "Stepper", _interrupted(Stepper, job, recipe, at)),
        mock.patch.object(run_module, "WindowStepper", _interrupted(WindowStepper, job, recipe, at)),
        mock.patch.object(members, "describe", described),
        traced_once(),
        measured_briefly(),
        ExitStack() as left_out,
    ):
        for name in (() if exports else ("_export",)) + (() if saves else ("_save", "_finish")):
            left_out.enter_context(mock.patch.object(run_module, name, return_value=None))
        return run_module.run(recipe, job, hooks, resume=resume)


@contextmanager
def measured_briefly() -> Iterator[None]:
    """Layers are measured once, links by small messages: what they take decides neither losses nor pictures."""
    links_once = partial(measure_links, repeats=1)
    with (
        mock.patch.multiple(links, MESSAGE_SIZES=(64, 2**16), SUM_SIZES=(64, 2**18), BESIDE=0),
        mock.patch.object(job_cluster, "HOST_COPY", 2**16),
        mock.patch.object(job_profile, "profile_job", partial(profile_job, repeats=1)),
        mock.patch.object(passes, "ENOUGH", 0.0),
        mock.patch.multiple(waking, REPEATS=1, MOST_REPEATS=1),
        mock.patch.object(measured, "MOST_SWEEPS", 1),
        mock.patch.object(together, "measure_links", links_once),
        mock.patch.object(job_cluster, "measure_links", links_once),
    ):
        yield


_Kind = TypeVar("_Kind", Stepper, WindowStepper)


def train_started_apart(job: Job, recipe: Recipe, seconds: float) -> int:
    """The run of a recipe in whose traced steps rank 0 begins that much later than it leaves the barrier."""
    begin = TracedSteps.begin

    def late(traced: TracedSteps) -> None:
        begin(traced)
        time.sleep(seconds if job.membership.rank == 0 else 0.0)

    with mock.patch.object(TracedSteps, "begin", late):
        return train(job, recipe)


def _interrupted(
    kind: type[_Kind], job: Job, recipe: Recipe, at: Mapping[int, Callable[[Job, Recipe], None]] | None
) -> type[_Kind]:
    class InterruptedStepper(kind):
        def step(self, step: int, inputs: dict[str, Tensor]) -> list[StepResult]:
            if at and step + 1 in at:
                at[step + 1](job, recipe)
            return super().step(step, inputs)

    return InterruptedStepper


def train_with_many_spikes(job: Job, recipe: Recipe, resume: str | None = None) -> int:
    """The run of a recipe where, after two steps, values about the median are spikes."""
    with mock.patch.multiple(spikes, LEAST=2, DEVIATIONS=-1.0, FACTOR=0.98):
        return train(job, recipe, resume)


def terminate_the_last_rank(job: Job, recipe: Recipe) -> None:
    """As a scheduler of a cluster does."""
    if job.membership.rank == job.membership.world_size - 1:
        os.kill(os.getpid(), signal.SIGTERM)


def kill(job: Job, recipe: Recipe) -> None:
    """As a machine that fails does, on every rank that gets here."""
    os.kill(os.getpid(), signal.SIGKILL)


def ask_to_save(job: Job, recipe: Recipe) -> None:
    """As a person does."""
    (recipe.run.folder / "save").touch()


def ask_to_save_and_quit(job: Job, recipe: Recipe) -> None:
    """As a person does."""
    (recipe.run.folder / "save_quit").touch()


def opened_here(recipe: Recipe) -> members.RecipeModels:
    """The models of a recipe as `build_model` opens them; those that are alike are described and traced once."""
    with mock.patch.object(members, "describe", described), traced_once():
        return members.build_model(recipe, "cpu")


def train_here(recipe: Recipe, resume: str | None = None, **options: Any) -> int:
    """The same as the only rank, in this process."""
    with joined(membership({}), device="cpu") as job:
        return train(job, recipe, resume, **options)


def draw_untrained(job: Job, recipe: Recipe) -> list[Picture] | None:
    """What the recipe would draw before its first step, on the rank that shows it."""
    from diffusionpipe.planner.unequal.cutting import cutting_of
    from diffusionpipe.workflows.training.run_plan import make_plan

    session = open_session(recipe, job, Planning(make_plan=make_plan, make_cutting=cutting_of))
    wish = SampleRequest(prompts=recipe.sampling.prompts, labels=recipe.sampling.labels)
    drawn = draw_in_session(session, wish, [sampling_settings(member) for member in session.members])
    return None if drawn is None else drawn[-1]


def ask_to_draw(job: Job, recipe: Recipe) -> None:
    """As a person does."""
    (recipe.run.folder / "draw").touch()


def losses_of(folder: Path, key: str = "loss") -> dict[int, float]:
    """Step -> value of a metric; no step may stand twice."""
    rows = [row for row in read_metrics(folder) if key in row]
    found: dict[int, Any] = {int(row["step"] or 0): row[key] for row in rows}
    assert len(found) == len(rows), f"{key} of a step stands twice"
    return found


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    """Everything in a checkpoint."""
    tensors = {name: torch.empty_like(t, device="cpu") for name, t in stored_tensors(checkpoint).items()}
    read(checkpoint, tensors)
    return tensors


def held_numbers(job: Job, recipe: Recipe) -> tuple[int, int, int]:
    """Before the first step: trained numbers that this rank holds, that it updates, and of the whole model."""
    from diffusionpipe.planner.unequal.cutting import cutting_of
    from diffusionpipe.workflows.training.run_plan import make_plan

    session = open_session(recipe, job, Planning(make_plan=make_plan, make_cutting=cutting_of))
    names = [p.name for p in session.model.parameters if p.is_trainable]
    known = {name: p for p, name in canonical_names(session.graph.components).items()}
    held = sum(known[name].numel() for name in names if known[name].untyped_storage().size())
    updated = sum(p.numel() for p in session.worker.parameters.values())
    return held, updated, sum(known[name].numel() for name in names)
