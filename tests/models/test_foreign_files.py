"""Model folders with a wrong value somewhere: each is refused by the name of the file, none by a traceback."""

import json
import os
import shutil

import pytest
from kit.tiny_runs import save_stable_diffusion

from diffusionpipe.errors import DiffusionPipeError, ModelError
from diffusionpipe.models.objectives.objective import Objective, ObjectiveSettings, Prediction
from diffusionpipe.models.opening.folder import build_graph, open_components, scheduler_config
from diffusionpipe.models.parameters.stored import stored_weights
from diffusionpipe.trainer.inference.conditions import open_tokenizer
from diffusionpipe.trainer.inference.denoise import Spacing, build_scheduler, set_times


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return save_stable_diffusion(tmp_path_factory.mktemp("model") / "sd")


@pytest.fixture
def folder(good, tmp_path):
    return shutil.copytree(good, tmp_path / "sd")


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refusal(act):
    with pytest.raises(DiffusionPipeError) as caught:
        act()
    return str(caught.value)


@pytest.mark.parametrize(
    ("component", "changes"),
    [
        ("unet", {"block_out_channels": 7}),
        ("unet", {"block_out_channels": [[]]}),
        ("unet", {"attention_head_dim": 0}),
        ("unet", {"norm_num_groups": 0}),
        ("unet", {"down_block_types": None}),
        ("unet", {"layers_per_block": 100_000}),
        ("text_encoder", {"num_hidden_layers": 100_000}),
        ("vae", {"norm_num_groups": "x"}),
        ("text_encoder", {"num_attention_heads": 0}),
        ("text_encoder", {"hidden_size": "wide"}),
        ("text_encoder", {"hidden_act": []}),
        ("text_encoder", {"num_hidden_layers": {"a": 1}}),
    ],
)
def test_a_wrong_value_in_a_components_configuration_is_refused_by_name(folder, component, changes):
    path = folder / component / "config.json"
    edit(path, **changes)
    assert str(path) in refusal(lambda: open_components(folder))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_train_timesteps": 0},
        {"num_train_timesteps": "many"},
        {"num_train_timesteps": 10**12},
        {"beta_start": "low"},
        {"beta_end": None},
        {"beta_start": 5.0, "beta_end": 9.0},
        {"beta_schedule": "wild"},
        {"trained_betas": [[1]]},
        {"trained_betas": [0.1]},
    ],
)
def test_a_scheduler_configuration_without_noise_levels_is_refused_by_name(folder, changes):
    edit(folder / "scheduler" / "scheduler_config.json", **changes)
    assert "scheduler_config.json" in refusal(lambda: Objective(ObjectiveSettings(), scheduler_config(folder)))


@pytest.mark.parametrize("changes", [{"shift": []}, {"shift_terminal": "x"}, {"num_train_timesteps": "x"}])
def test_a_wrong_shift_is_refused_by_name(changes):
    config = {"_class_name": "FlowMatchEulerDiscreteScheduler", **changes}
    flow = ObjectiveSettings(prediction=Prediction.FLOW_MATCHING, shift=None)
    assert "scheduler_config.json" in refusal(lambda: Objective(flow, config))


@pytest.mark.parametrize(
    "config", [{}, {"_class_name": None}, {"_class_name": "DDIMScheduler", "beta_schedule": "wild"}]
)
def test_a_configuration_that_makes_no_sampler_is_refused_by_name(config):
    assert "scheduler_config.json" in refusal(lambda: build_scheduler(config))


def test_more_steps_than_the_scheduler_has_are_refused():
    config = {"_class_name": "DDIMScheduler", "num_train_timesteps": 10}
    assert "10" in refusal(lambda: set_times(build_scheduler(config), config, 50, Spacing()))


@pytest.mark.parametrize(
    "index",
    [
        [],
        {"weight_map": []},
        {"weight_map": {}},
        {"weight_map": {"a": ["x"]}},
        {"weight_map": {"a": {}}},
        {"weight_map": {"a": "../../outside.safetensors"}},
        {"weight_map": {"a": "/etc/passwd"}},
        {"weight_map": {"a": ".."}},
        {"weight_map": {"a": ""}},
        {"weight_map": {"a": "missing.safetensors"}},
    ],
)
def test_an_index_that_does_not_name_files_beside_it_is_refused(tmp_path, index):
    path = tmp_path / "model.safetensors.index.json"
    (tmp_path.parent / "outside.safetensors").touch()
    path.write_text(json.dumps(index))
    assert str(path) in refusal(lambda: stored_weights(tmp_path))


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["FIFO", "device"])
def test_weights_that_would_be_waited_for_are_refused_at_once(tmp_path, make):
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    make(path)
    assert f"{path} cannot be read: it is not a regular file" in refusal(lambda: stored_weights(tmp_path))


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a": ' * 100_000, "\xff", "9" * 5000, "[]", '{"a": NaN'], ids=range(6)
)
def test_a_file_that_is_no_object_is_refused_by_name(folder, text):
    path = folder / "unet" / "config.json"
    path.write_text(text, encoding="latin-1")
    assert str(path) in refusal(lambda: open_components(folder))


@pytest.mark.parametrize("name", ["model_index.json", "unet/config.json"])
def test_a_fifo_is_refused_without_waiting_for_a_writer(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert name in refusal(lambda: build_graph(folder, objective=ObjectiveSettings(), resolution=16))


def test_a_damaged_tokenizer_is_refused_by_name(folder):
    (folder / "tokenizer" / "vocab.json").write_text('["a"]')
    for name in ("tokenizer.json", "merges.txt"):
        (folder / "tokenizer" / name).unlink(missing_ok=True)
    with pytest.raises(ModelError, match="tokenizer does not hold a CLIPTokenizer"):
        open_tokenizer(folder)
