"""Kept pictures, their origin, and `sample --like`, which draws them again bit for bit."""

import numpy as np
import pytest
from kit.tiny_runs import recipe_of, save_pictures, save_stable_diffusion, train_here
from PIL import Image

from diffusionpipe import cli
from diffusionpipe.trainer.data.randomness import normal
from diffusionpipe.trainer.inference.sample_file import read_origin, write_sample

pytestmark = pytest.mark.usefixtures("one_trace")

PROMPTS = ("a b", "c d e")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that has drawn after step 2, of which a checkpoint is kept, and after step 4, with which it ended."""
    folder = tmp_path_factory.mktemp("redraw")
    save_stable_diffusion(folder / "sd")
    save_pictures(folder / "data")
    drawn = {"every": 2, "steps": 2, "guidance": 3.0, "prompts": PROMPTS, "negative_prompt": "f", "seed": 7}
    sections = {"training": {"steps": 4}, "sampling": drawn, "checkpoint": {"every": 2, "keep": 2}}
    train_here(recipe_of(folder / "sd", folder / "data", folder / "run", **sections))
    return folder / "run"


def pixels(path):
    with Image.open(path) as image:
        return np.asarray(image)


def command(*words):
    with pytest.raises(SystemExit) as caught:
        cli.main([str(word) for word in words])
    return caught.value.code


def test_a_run_keeps_every_picture_with_what_drew_it(run):
    drawn = np.load(run / "samples/step-00000002.npy")
    kept = sorted((run / "samples/step-00000002").iterdir())
    assert [path.name for path in kept] == ["000-a-b.png", "001-c-d-e.png"]
    assert np.array_equal(np.stack([pixels(path) for path in kept]), drawn)
    with Image.open(kept[1]) as image:
        text = dict(image.text)
    assert text.pop("Software").startswith("DiffusionPipe ")
    assert '"_class_name": "DDIMScheduler"' in text.pop("scheduler")
    assert text.pop("model").endswith("/sd")
    assert text == {
        "prompt": "c d e", "negative_prompt": "f", "index": "1", "count": "2", "rows": "4", "resolution": "8",
        "precision": "float32", "training_step": "2", "weights": "average", "steps": "2", "guidance": "3.0",
        "unguided": "1.0", "seed": "7",
    }  # fmt: skip


@pytest.mark.parametrize("step", [2, 4])
def test_a_kept_picture_is_drawn_again_bit_for_bit(run, tmp_path, step):
    like = run / f"samples/step-{step:08d}/001-c-d-e.png"
    assert command("sample", run, "--like", like, "--out", tmp_path / "x.png", "--device", "cpu") == 0
    assert np.array_equal(pixels(tmp_path / "x.png"), pixels(like))
    assert pixels(like).std() > 0
    assert read_origin(tmp_path / "x.png") == read_origin(like)


def test_a_negative_prompt_draws_what_diffusers_draws(run):
    from diffusers import StableDiffusionPipeline

    pipeline = StableDiffusionPipeline.from_pretrained(run / "export")
    pipeline.set_progress_bar_config(disable=True)
    noise = normal(seed=7, purpose="sampling", step=0, positions=range(2), shape=(4, 4, 4))
    images = pipeline(
        list(PROMPTS), negative_prompt=["f", "f"], latents=noise, guidance_scale=3.0, num_inference_steps=2,
        output_type="np", height=8, width=8,
    ).images  # fmt: skip
    kept = np.stack([pixels(path) for path in sorted((run / "samples/step-00000004").iterdir())]).astype(int)
    assert np.abs(kept - (images * 255).round()).max() <= 1


def test_a_picture_of_another_origin_is_another_picture(run):
    one, other = (run / f"samples/step-{step:08d}/001-c-d-e.png" for step in (2, 4))
    assert not np.array_equal(pixels(one), pixels(other))


def test_sample_keeps_pictures_singly_and_draws_them_again(run, tmp_path, capfd):
    (tmp_path / "prompts.txt").write_text('a\n{"prompt": "b c", "negative_prompt": "d"}\n')
    words = ["--prompts", tmp_path / "prompts.txt", "--negative", "e", "--steps", "2", "--guidance", "3", "--seed", "5"]
    assert command("sample", run, *words, "--keep", tmp_path / "kept", "--out", tmp_path / "grid.png") == 0
    assert capfd.readouterr().out.splitlines() == [
        f"2 pictures in {tmp_path}/grid.png, and each as a file in {tmp_path}/kept"
    ]
    kept = sorted((tmp_path / "kept").iterdir())
    assert [path.name for path in kept] == ["000-a.png", "001-b-c.png"]
    assert [read_origin(path).negative_prompt for path in kept] == ["e", "d"]
    assert command("sample", run, "--like", kept[1], "--out", tmp_path / "x.png") == 0
    assert np.array_equal(pixels(tmp_path / "x.png"), pixels(kept[1]))


def test_negative_prompts_and_seeds_change_pictures(run, tmp_path):
    base = ["sample", run, "--prompt", "a", "--steps", "1", "--guidance", "3", "--out", tmp_path / "grid.png"]
    changes = {"plain": [], "negative": ["--negative", "c d"], "seed": ["--seed", "1"], "empty": ["--negative", ""]}
    for name, words in changes.items():
        assert command(*base, *words, "--keep", tmp_path / name) == 0
    found = {name: pixels(tmp_path / name / "000-a.png") for name in changes}
    assert np.array_equal(found["plain"], found["empty"])
    assert not np.array_equal(found["plain"], found["negative"])
    assert not np.array_equal(found["plain"], found["seed"])


def test_weights_that_are_gone_are_named_with_those_that_are_kept(run, tmp_path, capsys):
    from dataclasses import replace

    like = run / "samples/step-00000002/000-a-b.png"
    write_sample(pixels(like), replace(read_origin(like), training_step=3), tmp_path / "old.png")
    assert command("sample", run, "--like", tmp_path / "old.png") == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "no longer has the weights of step 3" in message
    assert "2, 4" in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--like", "{grid}"], "does not say how it was drawn"),
        (["--like", "gone.png"], "gone.png cannot be read"),
        (["--like", "{like}", "--steps", "3", "--negative", "a"], "leave out --steps, --negative"),
        (["--prompt", "a", "--negative", "b", "--guidance", "1"], "no effect without guidance"),
        (["--label", "1", "--negative", "b"], "--negative is for models with text"),
        (["--prompts", "gone.txt"], "there is no file of prompts gone.txt"),
    ],
)
def test_sample_refuses_what_has_no_effect_or_no_origin(run, tmp_path, capsys, words, message):
    Image.new("RGB", (8, 8)).save(tmp_path / "grid.png")
    like = run / "samples/step-00000002/000-a-b.png"
    filled = [word.format(grid=tmp_path / "grid.png", like=like) for word in words]
    assert command("sample", run, *filled, "--out", tmp_path / "x.png") == 2
    assert message in " ".join(capsys.readouterr().err.split())
