"""A run says what it is at its start, and at its end where the time went: for terminals and for pipes."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kit.descriptions import described
from kit.screen_files import assert_screen
from kit.tiny_models import tiny_stable_diffusion
from kit.tiny_runs import recipe_of
from rich.console import Console

from diffusionpipe.cli.text.run_text import ConsoleWords, end_line, end_table, start_block, start_lines
from diffusionpipe.costs.files import write_profile
from diffusionpipe.costs.loading import JobDataWorkers, added_by, exactly
from diffusionpipe.ir import Sharded
from diffusionpipe.ir.versions import Versions
from diffusionpipe.ir.words import short_count
from diffusionpipe.planner import Layout, build_plan, plan_from_profile, predicted_period, predicted_timeline
from diffusionpipe.runtime.machine.error_file import note_of
from diffusionpipe.trainer.recipe import RecipePrecision
from diffusionpipe.trainer.setup.start import Start
from diffusionpipe.workflows.training.expectation import Expectation, expectation_of, unmeasured
from diffusionpipe.workflows.training.run_facts import count_parameters, facts_of, parts_of, shape_of
from diffusionpipe.workflows.training.run_report import RunReport, median_step

EXPECTED = Expectation(iteration=0.461, update=0.016, memory=(3 * 2**30, 2**30 + 2**29), has_activations=True)
WORKERS = JobDataWorkers(machines=("a", "a"), cores=(2, 2), batches=(exactly(0.001),) * 2, workers=1)
MEASURED = {"step": 0.61, "iteration": 0.48, "update": 0.1, "data": 0.03}


@pytest.fixture(scope="module")
def model():
    return described(tiny_stable_diffusion(torch.float32))


@pytest.fixture(scope="module")
def start(model):
    layout = Layout(batch=8, stages=2, microbatches=4, schedule="1f1b", replicas=(1, 1))
    return start_of(model, layout, ("EPYC, 1 thread",) * 2)


def start_of(model, layout, devices):
    recipe = recipe_of(Path("models/sd"), Path("data/birds"), Path("runs/birds"), training={"batch": layout.batch})
    return Start(
        recipe=recipe,
        model=model,
        plan=build_plan(model, layout),
        hosts=("here",) * len(devices),
        devices=devices,
        samples=200,
        conditions=0,
        held_out=20,
        step=0,
        checkpoint=None,
    )


def on_terminal(renderable, width):
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    console.print(renderable)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 160])
def test_a_terminal_shows_a_block_and_at_the_end_a_table(start, width):
    assert_screen(f"train_start_{width}", on_terminal(start_block(facts_of(start), EXPECTED), width))
    assert_screen(f"train_end_{width}", on_terminal(end_table(MEASURED, EXPECTED, 13.1), width))


def test_a_pipe_gets_lines(start):
    assert_screen("train_start_pipe", "\n".join(start_lines(facts_of(start), EXPECTED)))
    assert_screen("train_end_pipe", end_line(MEASURED, EXPECTED, 13.1))


def test_what_is_not_known_is_said_to_be_unknown(start):
    unknown = expectation_of(start)
    assert unknown.step is None
    assert not unknown.has_activations
    block = on_terminal(start_block(facts_of(start), unknown), 160)
    assert "time unknown: the layers were not measured" in block
    assert "activations unknown" in block
    lines = list(start_lines(facts_of(start), unknown))
    assert "predicted_step_s=unknown reason=layers_not_measured" in lines
    assert sum("activations=unknown" in line for line in lines) == 2


def test_memory_of_unmeasured_layers_is_that_of_their_weights_gradients_and_optimizer(start):
    held = expectation_of(start).memory
    trained = count_parameters(start.model, trained=True)
    frozen = count_parameters(start.model, trained=False)
    # float32: weight, gradient, two of AdamW and the average; each rank has all that is frozen.
    assert sum(held) == 20 * trained + 2 * 4 * frozen


def test_conditioning_pictures_are_no_samples(start):
    steered = replace(start, conditions=200)
    assert "data=data/birds samples=200 conditioning_pictures=200 validation_samples=20" in list(
        start_lines(facts_of(steered), EXPECTED)
    )
    assert "200 samples in data/birds, each with a conditioning picture" in on_terminal(
        start_block(facts_of(steered), EXPECTED), 160
    )


def test_a_resumed_run_says_from_what(start):
    resumed = replace(start, step=3, checkpoint=Path("runs/birds/checkpoints/step-00000003"))
    assert "steps 4 to 6, from runs/birds/checkpoints/step-00000003" in on_terminal(
        start_block(facts_of(resumed), EXPECTED), 160
    )
    assert list(start_lines(facts_of(resumed), EXPECTED))[-1] == (
        "steps=6 from_step=3 resumed=runs/birds/checkpoints/step-00000003"
    )


def test_a_run_without_a_flush_says_which_weights_it_reads(model, start):
    layout = Layout(batch=8, stages=2, microbatches=4, schedule="1f1b", replicas=(1, 1), versions=Versions.STASHED)
    recipe = start.recipe.model_copy(
        update={"pipeline": start.recipe.pipeline.model_copy(update={"versions": Versions.STASHED})}
    )
    endless = replace(start, plan=build_plan(model, layout), recipe=recipe)
    assert "not filled, no flush, weights stashed" in on_terminal(start_block(facts_of(endless), EXPECTED), 160)
    assert any("microbatches=4 versions=stashed" in line for line in start_lines(facts_of(endless), EXPECTED))


def test_what_data_workers_take_while_ranks_compute_is_part_of_a_step(model, start, tmp_path):
    profile = unmeasured(model, "float32")
    write_profile(profile, tmp_path / "profile.json")
    plan = plan_from_profile(profile, Layout(batch=8, stages=2, microbatches=4))
    own = {"pipeline": start.recipe.pipeline.model_copy(update={"fill": True})}
    recipe = start.recipe.model_copy(update=own | {"run": start.recipe.run.model_copy(update={"folder": tmp_path})})
    alone = replace(start, plan=plan, recipe=recipe)
    plain, expected = expectation_of(alone), expectation_of(replace(alone, loading=WORKERS))
    bubble = predicted_timeline(profile, plan).bubble
    assert 0.1 < bubble < 0.9
    assert plain.loading is None
    assert expected.loading == added_by(WORKERS, iteration=plain.iteration, bubble=bubble, copies=1)
    least, usual, most = expected.loading.least, expected.loading.usual, expected.loading.most
    assert least < usual < most
    assert expected.step == pytest.approx(plain.step + usual)
    line = f"predicted_loading_s={usual:.4f} predicted_least_loading_s={least:.4f} predicted_most_loading_s={most:.4f}"
    assert any(line in shown for shown in start_lines(facts_of(alone), expected))
    words = f"data workers about {usual * 1000:.1f} ms ({least * 1000:.1f} to {most * 1000:.1f})"
    assert words in " ".join(on_terminal(start_block(facts_of(alone), expected), 200).split())


def test_a_filled_run_without_a_flush_expects_a_period_and_the_rows_of_all_batches_in_flight(model, start, tmp_path):
    profile = unmeasured(model, "float32")
    write_profile(profile, tmp_path / "profile.json")
    layout = Layout(batch=8, stages=2, microbatches=4, replicas=(1, 2), versions=Versions.STASHED)
    own = {"pipeline": start.recipe.pipeline.model_copy(update={"versions": Versions.STASHED, "fill": True})}
    recipe = start.recipe.model_copy(update=own | {"run": start.recipe.run.model_copy(update={"folder": tmp_path})})
    filled = replace(start, plan=plan_from_profile(profile, layout), recipe=recipe)
    expected = expectation_of(filled)
    assert expected.update is None
    assert expected.step == predicted_period(profile, filled.plan) > 0
    loading = added_by(WORKERS, iteration=expected.step, bubble=0.0, copies=1)
    assert expectation_of(replace(filled, loading=WORKERS)).step == expected.step + loading.usual
    assert len(expected.memory) == 3
    assert "batch 8, filled, no flush, weights stashed" in on_terminal(start_block(facts_of(filled), expected), 160)
    assert any("versions=stashed" in line and "filled=True" in line for line in start_lines(facts_of(filled), expected))


def test_without_a_flush_every_forward_in_flight_has_narrow_copies_of_its_own(model, start, tmp_path):
    """Of two ranks the first runs one forward ahead."""
    layout = Layout(batch=8, stages=2, microbatches=4, replicas=(1, 1), versions=Versions.STASHED)
    own = {
        "pipeline": start.recipe.pipeline.model_copy(update={"versions": Versions.STASHED, "fill": True}),
        "training": start.recipe.training.model_copy(update={"precision": RecipePrecision.BFLOAT16}),
        "run": start.recipe.run.model_copy(update={"folder": tmp_path}),
    }
    profile = unmeasured(model, "bfloat16")
    begun = replace(start, plan=plan_from_profile(profile, layout), recipe=start.recipe.model_copy(update=own))

    def memory(copies):
        layers = tuple(replace(layer, copies=copies) for layer in profile.layers)
        write_profile(replace(profile, layers=layers), tmp_path / "profile.json")
        return expectation_of(begun).memory

    added = [more - less for more, less in zip(memory(2**21), memory(2**20), strict=True)]
    first, second, _ = begun.plan.blocks
    assert added == [2 * len(first) * 2**20, len(second) * 2**20]


def test_many_workers_show_the_least_and_the_most_memory(start):
    many = replace(EXPECTED, memory=tuple(2**30 * (n + 1) for n in range(9)))
    assert "1.0 GiB to 9.0 GiB, the most on rank 8" in on_terminal(start_block(facts_of(start), many), 160)


@pytest.mark.parametrize(
    ("sizes", "name", "ranks"),
    [
        ({"stages": 1, "data_parallel": 2}, "data parallel", [(0, 1)]),
        ({"stages": 1, "data_parallel": 2, "sharded": Sharded.ALL, "buckets": 0}, "sharded data parallel", [(0, 1)]),
        ({"stages": 1}, "one device", [(0,)]),
        ({"stages": 2, "replicas": (2, 1)}, "1f1b", [(0, 1), (2,)]),
        ({"stages": 2, "replicas": (1, 1), "data_parallel": 2}, "1f1b", [(0, 2), (1, 3)]),
        ({"stages": 2, "replicas": (1, 1), "buckets": 2}, "1f1b", [(0,), (1,)]),
        ({"stages": 2, "schedule": "zb-v"}, "zb-v", [(0,), (1,), (1,), (0,)]),
    ],
)
def test_stages_are_named_with_all_ranks_that_hold_them(model, sizes, name, ranks):
    wanted = {"batch": 8, "microbatches": 4 if sizes["stages"] > 1 else 1, "schedule": "1f1b"} | sizes
    wanted.setdefault("replicas", (1,) * sizes["stages"])
    plan = build_plan(model, Layout(**wanted))
    parts = parts_of(plan, model)
    assert shape_of(plan).name == name
    assert [part.ranks for part in parts] == ranks
    assert [layer for part in parts for layer in part.layers] == list(model.backbone_layers)
    assert sum(part.parameters for part in parts) == count_parameters(model, trained=True)


def test_the_median_step_leaves_out_the_first_one_of_the_process():
    rows = [
        {"step": step, "step_s": seconds, "iteration_s": seconds / 2, "update_s": 0.0, "data_s": seconds / 2}
        for step, seconds in enumerate([9.0, 50.0, 1.0, 2.0, 3.0], start=1)
    ]
    rows.append({"step": 5, "validation_loss": 1.0})
    assert median_step(rows, after=1) == {"step": 2.0, "iteration": 1.0, "update": 0.0, "data": 1.0}
    assert median_step(rows[:1], after=0)["step"] == 9.0
    assert median_step([], after=0) == {}


@pytest.mark.parametrize(
    ("number", "text"), [(950, "950"), (15_240, "15.2k"), (999_960, "1M"), (859_520_964, "860M"), (2.567e9, "2.57B")]
)
def test_large_numbers_have_three_digits(number, text):
    assert short_count(number) == text


def test_an_error_about_memory_gets_what_the_plan_predicts_for_its_rank(start):
    report = RunReport(ConsoleWords(Console(file=io.StringIO())), rank=1)
    report.start(start)
    full, other = torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("shapes differ")
    report.explain(full)
    report.explain(other)
    size = expectation_of(start).memory[1] / 2**30
    (note,) = full.__notes__
    assert note.startswith(f"The plan predicts a peak of {size:.2f} GiB for this rank without activations")
    assert note in note_of(full).message
    assert not hasattr(other, "__notes__")
