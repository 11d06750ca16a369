import json
import subprocess
import sys
from dataclasses import replace

import pytest
from kit.screen_files import assert_screen
from planner import synthetic

from diffusionpipe.cli import main
from diffusionpipe.costs.decoding import Decoding
from diffusionpipe.costs.files import read_profile, write_cluster, write_profile
from diffusionpipe.ir.files import read_plan
from diffusionpipe.planner.pricing.stage_costs import update_time
from diffusionpipe.timing.legal import check


@pytest.fixture
def files(tmp_path):
    profile, cluster = tmp_path / "profile.json", tmp_path / "cluster.json"
    write_profile(synthetic.chain([0.01] * 6, parameters=[10**6] * 6, frozen=0.01), profile)
    write_cluster(synthetic.cluster(2), cluster)
    return tmp_path


def run(*arguments) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main([str(argument) for argument in arguments])
    code = exit_info.value.code
    return 0 if code is None else code


def plan_of(files, *more, batch=8):
    names = files / "profile.json", files / "cluster.json"
    stated = () if "--draw" in more else ("--all", "--checkpoint", "none")
    return run("plan", "--profile", names[0], "--cluster", names[1], "--batch", batch, *stated, *more)


def test_the_table_names_every_alternative_and_ends_with_the_verdict_and_the_band(files, capsys):
    assert plan_of(files) == 0
    shown = capsys.readouterr().out
    for words in ("samples", "idle", "ZeRO-3 / FSDP", "GPipe", "1F1B + SPP", "fullest device, MiB: optimizer"):
        assert words in shown
    verdict, band = shown.strip().split("\n\n")[-2:]
    assert verdict.startswith("Use ")
    assert band.startswith("band: ")


def test_the_update_is_a_part_of_the_step_that_is_shown_where_the_profile_knows_it(files, capsys, monkeypatch):
    assert plan_of(files, "--out", files / "plan.json") == 0
    shown = capsys.readouterr().out
    assert "update" not in shown.split("step:")[0]
    assert "step: an iteration; the profile has no update time" in shown
    profile = replace(read_profile(files / "profile.json"), update=1e-9)
    write_profile(profile, files / "profile.json")
    monkeypatch.setenv("COLUMNS", "100")
    assert plan_of(files, "--out", files / "plan.json") == 0
    shown = capsys.readouterr().out
    assert "update" in shown.split("step:")[0]
    assert "step: an iteration and the update after it" in shown
    names = files / "profile.json", files / "cluster.json"
    assert run("plan", "show", files / "plan.json", "--profile", names[0], "--cluster", names[1]) == 0
    plan = read_plan(files / "plan.json")
    update = update_time(plan.train, plan.blocks, profile, plan.mesh)
    assert update > 1e-3
    assert f"then update {update * 1e3:.1f} ms" in capsys.readouterr().out


def test_the_plan_file_is_legal_and_encodes_ahead(files):
    assert plan_of(files, "--fill", "--out", files / "plan.json") == 0
    plan = read_plan(files / "plan.json")
    check(plan.train)
    assert plan.batch == 8
    assert plan.mesh.num_ranks == 2
    assert plan.prologue is not None


def test_without_fill_every_batch_is_encoded_first(files):
    assert plan_of(files, "--no-fill", "--out", files / "plan.json") == 0
    assert read_plan(files / "plan.json").prologue is None


def test_the_same_question_gives_the_same_plan_file(files):
    for name in ("one.json", "two.json"):
        assert plan_of(files, "--out", files / name) == 0
    assert (files / "one.json").read_text() == (files / "two.json").read_text()


def test_checkpointed_layers_stand_in_the_plan(files):
    assert plan_of(files, "--checkpoint", "layer[12]", "--out", files / "plan.json") == 0
    assert set(read_plan(files / "plan.json").checkpointed) == {"layer1", "layer2"}


def test_drawing_is_predicted_in_place_of_a_plan(files, capsys):
    write_profile(synthetic.drawn(), files / "profile.json")
    assert plan_of(files, "--draw", 28) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "drawing: 8 pictures at a time on synthetic, 2 devices, as sample --ranks 2 does: " in shown
    assert "then 28 steps of" in shown
    assert "decoding is not counted, because the profile does not say what the VAE takes" in shown
    assert "rank encoders weights tensors decoder peak of" in shown
    assert "samples" not in shown


@pytest.mark.parametrize(
    ("room", "says"),
    [(4, "each as a whole"), (2, "tile by tile"), (0.9, "a decoder of 1.00 GiB, and has 0.84 GiB; one")],
)
def test_decoding_is_part_of_drawing_whole_by_tiles_or_refused(files, capsys, room, says):
    decoding = Decoding(weights=0, whole=3 * 2**30, tiled=2**30, picture=0, latents=0)
    write_profile(replace(synthetic.drawn(), decoding=decoding), files / "profile.json")
    write_cluster(synthetic.cluster(2, memory=room), files / "cluster.json")
    status = plan_of(files, "--draw", 28)
    shown = capsys.readouterr()
    assert says in " ".join((shown.out + shown.err).split())
    assert status == (2 if room < 1 else 0)


def test_drawing_that_does_not_fit_names_the_rank_and_what_would_help(files, capsys):
    write_profile(synthetic.drawn(), files / "profile.json")
    write_cluster(synthetic.cluster(2, memory=0.1), files / "cluster.json")
    assert plan_of(files, "--draw", 28) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "drawing does not fit: rank 0 lacks 0.54 GiB. It would hold encoders of 0.63 GiB" in shown
    assert "use devices with more memory, or a smaller --batch" in shown


def test_drawing_has_throughput_and_latency_with_their_band_on_the_screen_and_in_a_file(files, capsys):
    profile = synthetic.drawn()
    write_profile(replace(profile, source="analytic"), files / "profile.json")
    write_cluster(synthetic.cluster(2), files / "cluster.json")
    assert plan_of(files, "--draw", 28, "--out", files / "drawing.json") == 0
    # 8 rows: texts of 4 s each on both ranks; a step is 9 halves of 8 layers of 1 s, and links take next to nothing
    latency = 8 * 4.0 + 28 * (8 + 1) * 4.0
    screen = capsys.readouterr().out
    assert_screen("drawing_80", screen)
    shown = " ".join(screen.split())
    assert f"{latency / 8:.1f} s a picture, {latency:.1f} s until all are there" in shown
    low, high = 0.75 * latency, 1.25 * latency
    assert f"layer times 25% shorter or longer {low / 8:.1f} to {high / 8:.1f} s a picture, {low:.1f} to" in shown
    kept = json.loads((files / "drawing.json").read_text())
    assert (kept["format"], kept["steps"], kept["drawing"]["pictures"]) == ("diffusionpipe-drawing", 28, 8)
    assert kept["latency"] == pytest.approx(latency, rel=1e-2)
    assert kept["band"]["a_picture"] == pytest.approx([low / 8, high / 8], rel=1e-2)
    write_profile(replace(profile, source="measured"), files / "profile.json")
    assert plan_of(files, "--draw", 28) == 0
    assert "band:" not in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--ema", "--fill", ("--compare", "all"), ("--optimizer", "SGD")])
def test_options_of_training_are_refused_for_drawing(files, capsys, option):
    name, *value = [option] if isinstance(option, str) else option
    assert plan_of(files, "--draw", 28, name, *(files / one if "." in one else one for one in value)) == 2
    assert f"{name}" in capsys.readouterr().err


def test_a_model_that_fits_nowhere_is_refused_with_numbers_and_help(files, capsys):
    write_cluster(synthetic.cluster(2, memory=0.01), files / "cluster.json")
    assert plan_of(files) == 2
    shown = capsys.readouterr().err
    assert "No layout fits" in shown
    assert "more than worker 0 has" in shown
    assert "These changes would fit " in shown


def test_a_batch_that_nothing_divides_is_refused_with_one_that_works(files, capsys):
    write_cluster(synthetic.cluster(7), files / "cluster.json")
    assert plan_of(files, batch=1) == 2  # six layers, and no replicas of one sample
    assert "e.g. 7" in capsys.readouterr().err


def test_an_unknown_cluster_is_refused(files, capsys):
    assert run("plan", "--profile", files / "profile.json", "--cluster", "nowhere", "--batch", 8) == 2
    assert "nowhere" in capsys.readouterr().err


def memory_of(shown: str) -> dict[str, str]:
    """What the fullest device holds, in GiB."""
    parts = " ".join(shown.partition("fullest device, GiB: ")[2].partition(";")[0].split())
    return dict(item.rsplit(" ", 1) for item in parts.split(", "))


def test_the_optimizer_is_known_by_its_name(files, capsys):
    write_profile(synthetic.chain([0.01] * 6, parameters=[10**8] * 6, frozen=0.01), files / "profile.json")
    held = {}
    for name in ("AdamW", "RMSprop", "SGD"):
        assert plan_of(files, "--optimizer", name) == 0
        held[name] = memory_of(capsys.readouterr().out)
    assert float(held["AdamW"]["optimizer"]) == pytest.approx(2 * float(held["RMSprop"]["optimizer"]), abs=0.02)
    assert "optimizer" not in held["SGD"]
    assert plan_of(files, "--optimizer", "Adamw") == 2
    assert "did you mean AdamW?" in capsys.readouterr().err


def test_a_profile_of_a_device_that_the_cluster_has_not_is_refused(files, capsys):
    assert run("plan", "--profile", files / "profile.json", "--cluster", "h100x8", "--batch", 8) == 2
    assert "this profile was made on synthetic, but the cluster h100x8 has NVIDIA H100" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0.0", "-0.01", "null"], ids=["zero", "negative", "missing"])
def test_a_profile_with_a_wrong_time_is_refused_with_its_layer(files, capsys, value):
    text = (files / "profile.json").read_text()
    (files / "profile.json").write_text(text.replace("0.01,", f"{value},", 1))
    assert plan_of(files) == 2
    assert "profile.json: not a valid diffusionpipe-profile" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        ("--profile", "there is no recipe and no --profile or --model; give a recipe"),
        ("--cluster", "--cluster: this option is missing"),
    ],
)
def test_without_a_recipe_all_must_be_said(files, capsys, left_out, message):
    options = {"--profile": files / "profile.json", "--cluster": files / "cluster.json", "--batch": 8}
    words = [word for option, value in options.items() if option != left_out for word in (option, value)]
    assert run("plan", *words) == 2
    assert message in capsys.readouterr().err


def test_planning_imports_no_torch(files):
    code = (
        "import sys\n"
        "from diffusionpipe.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'diffusers', 'transformers', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    arguments = [
        "plan",
        "--profile",
        "profile.json",
        "--cluster",
        "cluster.json",
        "--batch",
        "8",
        "--out",
        "p.json",
        "--all",
    ]
    subprocess.run([sys.executable, "-c", code, *arguments], cwd=files, check=True, capture_output=True)


def test_a_profile_of_before_split_backwards_were_counted_plans_whole_ones_and_warns_once(tmp_path, capsys):
    profile = synthetic.chain([0.01] * 8, parameters=[3 * 10**7] * 8)
    write_profile(profile, tmp_path / "profile.json")
    write_cluster(synthetic.cluster(4, intra_gb=1.0), tmp_path / "cluster.json")
    out = tmp_path / "plan.json"
    assert plan_of(tmp_path, "--out", out) == 0
    assert read_plan(out).train.splits_backwards
    assert "warning" not in capsys.readouterr().err
    older = replace(profile, layers=tuple(replace(layer, kept=(), kept_reads=()) for layer in profile.layers))
    write_profile(older, tmp_path / "profile.json")
    assert plan_of(tmp_path, "--out", out) == 0
    assert not read_plan(out).train.splits_backwards
    printed = capsys.readouterr().err
    assert printed.count("warning") == 1
    assert "no schedule that splits the backward is tried" in printed
    assert f"diffusionpipe profile RECIPE --out {tmp_path / 'profile.json'}" in printed
