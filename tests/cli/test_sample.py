"""`diffusionpipe sample` with wrong options, and with a run folder that somebody has changed: one line each."""

from contextlib import suppress

import pytest
from kit.screen_files import assert_screen, masked
from kit.tiny_runs import save_stable_diffusion

from diffusionpipe import cli
from diffusionpipe.errors import ConfigError
from diffusionpipe.runtime.job.membership import Membership
from diffusionpipe.workflows.drawing.memory import named_shortage

pytestmark = pytest.mark.usefixtures("one_trace")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_stable_diffusion(tmp_path_factory.mktemp("model") / "sd")


@pytest.fixture
def say(capsys, tmp_path):
    def said(folder, *words):
        arguments = ["sample", folder, "--prompt", "a", "--steps", 1, "--out", tmp_path / "grid.png", *words]
        with pytest.raises(SystemExit) as caught:
            cli.main([str(word) for word in arguments])
        assert caught.value.code == 2
        return " ".join(capsys.readouterr().err.split())

    return said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--device", "tpu"), "there is no device 'tpu'; choose auto, cpu or cuda"),
        (("--seed", 10**30), "--seed"),
        (("--guidance", "inf"), "--guidance"),
        (("--count", 10**9), "--count"),
        (("--count", 9_000, "--prompt", "b"), "18,000 pictures are asked for; draw at most 10,000"),
        (("--resolution", 10**400), "--resolution"),
        (("--precision", "float16"), "--precision float16: pictures are drawn in float32 or bfloat16"),
        (("--ranks", 0), "--ranks"),
        (("--ranks", 40), "40 ranks cannot share the "),
        (("--ranks", 2, "--resolution", 100_000), "use a smaller --resolution"),
        (("--resolution", 100_000), "use a smaller --resolution"),
    ],
)
def test_an_impossible_wish_is_refused_before_the_model_is_loaded(model, say, words, says):
    assert says in say(model, *words)


def test_a_gpu_that_is_not_there_is_refused(model, say, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "torch finds no CUDA device here; choose --device cpu" in say(model, "--device", "cuda")


def test_ranks_get_the_options_of_the_command_and_draw_what_one_process_draws(model, tmp_path, monkeypatch):
    commands = []

    def draw_in_place(command, *, ranks, log_folder, environ):
        commands.append(command)
        with monkeypatch.context() as patch:
            for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
                patch.setenv(name, str(value))
            patch.setattr("diffusionpipe.runtime.job.membership.membership", lambda _: Membership())
            cli.main(command[3:])
        return 0

    monkeypatch.setattr("diffusionpipe.trainer.launching.launch.launch", draw_in_place)
    words = ["sample", str(model), "--prompt", "-a", "--prompt", "b", "--steps", "2", "--resolution", "16", "--device"]
    pictures = []
    for options in (["--ranks", "1"], []):
        out = tmp_path / f"{len(options)}.png"
        with suppress(SystemExit):
            cli.main([*words, "cpu", "--out", str(out), *options])
        pictures.append(out.read_bytes())
    assert commands[0][3:][-2:] == ["--", str(model)]
    assert {"--prompt=-a", "--prompt=b", "--steps=2"} <= set(commands[0])
    assert not any(word.startswith("--ranks") for word in commands[0])
    assert pictures[0] == pictures[1]


def test_the_screen_of_a_pipe_is_the_kept_one(model, tmp_path, capsys):
    out = tmp_path / "owls.png"
    with suppress(SystemExit):
        cli.main(f"sample {model} --prompt a --count 2 --steps 2 --resolution 16 --device cpu --out {out}".split())
    written = capsys.readouterr()
    text = masked(written.err + written.out, {str(tmp_path): ".", str(model): "models/sd", r"[0-9.]+ s\b": "# s"})
    assert_screen("sample_pipe", text)


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        (b"", "data.resolution must be a whole number of at least 1; correct it, or give --resolution"),
        (b"[data]\nresolution = -3", "data.resolution must be a whole number of at least 1"),
        (b"[data]\nresolution = 1e400", "data.resolution must be a whole number of at least 1"),
        (b"data = 3", "data.resolution must be a whole number of at least 1"),
        (b'[sampling]\nsteps = "x"', "sampling.steps: Input should be a valid integer"),
        (b"sampling = 3", "sampling: Input should be"),
        (b"[", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"x = " + b"[" * 5000, "it is nested too deeply"),
        (b"[data]\nresolution = " + b"9" * 5000, "cannot be read"),
    ],
)
def test_a_damaged_recipe_in_a_runs_folder_is_refused_by_name(model, tmp_path, say, recipe, says):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "export").symlink_to(model)
    (tmp_path / "run" / "recipe.toml").write_bytes(recipe)
    said = say(tmp_path / "run")
    assert f"{tmp_path}/run/recipe.toml: " in said
    assert says in said


def test_a_lack_of_memory_says_what_to_change():
    says = r"out of memory .*tried to allocate 9 bytes.*; use a smaller --count or a smaller --resolution"
    with pytest.raises(ConfigError, match=says), named_shortage():
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
    with pytest.raises(RuntimeError, match="something else"), named_shortage():
        raise RuntimeError("something else")
