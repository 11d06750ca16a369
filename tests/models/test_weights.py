import json
import os

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from kit.tiny_models import (
    randomise_parameters,
    raw_inputs,
    tiny_dit,
    tiny_stable_diffusion,
    tiny_text_encoder,
    tiny_unet,
    tiny_vae,
)
from safetensors.torch import load_file, save_file
from torch import nn

from diffusionpipe.errors import ModelError
from diffusionpipe.models.cut.sequential import sequential_graph
from diffusionpipe.models.families.stable_diffusion import stable_diffusion_graph
from diffusionpipe.models.graphs.graph import layer_parameters, parameter_names
from diffusionpipe.models.graphs.run import run_layers
from diffusionpipe.models.objectives.objective import Objective, ObjectiveSettings
from diffusionpipe.models.parameters.stored import stored_weights
from diffusionpipe.models.parameters.weights import materialize

NOWHERE = {"text_encoder": None, "vae": None, "unet": None, "transformer": None, "model": None}


def _to_meta(graph):
    """The same graph with its parameters on the meta device."""
    for component in graph.components.values():
        for module in component.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad))
    return graph


def _fill(graph, layers=None, sources=NOWHERE, dtype=torch.float32, seed=0):
    names = [layer.name for layer in graph.layers] if layers is None else layers
    stored = {name: folder if folder is None else stored_weights(folder) for name, folder in sources.items()}
    materialize(graph, names, stored, device="cpu", dtype=dtype, seed=seed)
    return layer_parameters(graph, names)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Weights of all components as save_pretrained writes them."""
    path = tmp_path_factory.mktemp("model")
    for index, (name, component) in enumerate(_components().items()):
        randomise_parameters(component, seed=index)
        component.save_pretrained(path / name)
    return path


def _components():
    return {"text_encoder": tiny_text_encoder(), "vae": tiny_vae(), "unet": tiny_unet()}


def _sources(folder):
    return {name: folder / name for name in _components()}


def _meta_graph():
    with torch.device("meta"):
        unet = tiny_unet()
    components = {"text_encoder": tiny_text_encoder(), "vae": tiny_vae(), "unet": unet}
    return _to_meta(stable_diffusion_graph(components, objective=Objective(ObjectiveSettings(), {}), resolution=8))


def test_stored_weights_are_read_exactly(folder):
    graph = _meta_graph()
    read = _fill(graph, sources=_sources(folder))
    for name, parameter in read.items():
        component, _, key = name.partition(".")
        stored = load_file(stored_weights(folder / component).files[0])
        assert torch.equal(parameter, stored[key]), name
        assert parameter.requires_grad == (component == "unet")


def test_layers_filled_each_alone_run_like_the_whole(folder):
    """No layer uses a parameter or buffer that it does not name."""
    for graph, sources in ((_meta_graph(), _sources(folder)), (_to_meta(tiny_dit(torch.float32)), NOWHERE)):
        inputs = raw_inputs(graph, 2)
        _fill(graph, sources=sources)
        expected = run_layers(graph.layers, graph.components, inputs)
        for layer in _to_meta(graph).layers:
            _fill(graph, [layer.name], sources)
            written = run_layers([layer], graph.components, inputs | expected)
            assert all(torch.equal(tensor, expected[name]) for name, tensor in written.items())
            _to_meta(graph)


def test_only_the_tensors_of_the_layers_are_read(folder, monkeypatch):
    import safetensors

    read = []

    class Recorder:
        def __init__(self, *arguments, **keywords):
            self.file = original(*arguments, **keywords)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *error):
            self.file.__exit__(*error)

        def __getattr__(self, name):
            return getattr(self.file, name)

        def get_tensor(self, name):
            read.append(name)
            return self.file.get_tensor(name)

    original = safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", Recorder)
    graph = _meta_graph()
    _fill(graph, ["unet.conv_in", "objective.noise"], _sources(folder))
    assert sorted(read) == ["conv_in.bias", "conv_in.weight"]
    assert graph.components["unet"].conv_out.weight.is_meta


def test_half_precision_files_give_the_wanted_dtype(folder, tmp_path):
    half = UNet2DConditionModel.from_pretrained(folder / "unet").half()
    half.save_pretrained(tmp_path, variant="fp16")
    graph = _meta_graph()
    parameters = _fill(graph, ["unet.conv_in"], {"unet": tmp_path}, dtype=torch.float64)
    assert torch.equal(parameters["unet.conv_in.weight"], half.conv_in.weight.double())


def test_sharded_weights_are_read_by_their_index(folder, tmp_path):
    UNet2DConditionModel.from_pretrained(folder / "unet").save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(stored_weights(tmp_path).files) > 1
    whole, sharded = _meta_graph(), _meta_graph()
    names = [layer.name for layer in whole.layers if layer.component == "unet"]
    expected = _fill(whole, names, _sources(folder))
    assert all(torch.equal(p, expected[n]) for n, p in _fill(sharded, names, {"unet": tmp_path}).items())


def test_names_of_older_versions_are_understood(folder, tmp_path):
    text = load_file(folder / "text_encoder" / "model.safetensors")
    old_text = {f"text_model.{name}": tensor for name, tensor in text.items()}
    old_text["text_model.embeddings.position_ids"] = torch.arange(6)[None]
    vae = load_file(folder / "vae" / "diffusion_pytorch_model.safetensors")
    old_names = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}

    def old_name(name):
        for new, old in old_names.items():
            name = name.replace(f".{new}.", f".{old}.")
        return name

    (tmp_path / "text_encoder").mkdir()
    (tmp_path / "vae").mkdir()
    save_file(old_text, tmp_path / "text_encoder" / "model.safetensors")
    save_file({old_name(n): t for n, t in vae.items()}, tmp_path / "vae" / "diffusion_pytorch_model.safetensors")
    old, new = _meta_graph(), _meta_graph()
    expected = _fill(new, sources=_sources(folder))
    read = _fill(old, sources={**_sources(tmp_path), "unet": folder / "unet"})
    assert all(torch.equal(read[name], expected[name]) for name in expected)


def test_every_problem_of_a_file_is_told_at_once(folder, tmp_path):
    tensors = load_file(folder / "unet" / "diffusion_pytorch_model.safetensors")
    tensors["strange.weight"] = tensors.pop("conv_in.weight")
    tensors["conv_out.bias"] = torch.zeros(7)
    save_file(tensors, tmp_path / "model.safetensors")
    graph = _meta_graph()
    with pytest.raises(ModelError) as caught:
        _fill(graph, sources={**_sources(folder), "unet": tmp_path})
    (line,) = str(caught.value).splitlines()
    assert f"{tmp_path / 'model.safetensors'} does not fit {tmp_path / 'config.json'}" in line
    assert "1 tensor missing (unet.conv_in.weight)" in line
    assert "1 tensor unexpected (strange.weight)" in line
    assert "conv_out.bias has shape (7,), but the configuration says (4,)" in line
    assert all(p.is_meta for component in graph.components.values() for p in component.parameters())


def test_a_truncated_file_is_refused_by_name(folder, tmp_path):
    whole = (folder / "unet" / "diffusion_pytorch_model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        _fill(_meta_graph(), ["unet.conv_in"], {"unet": tmp_path})


def test_a_missing_shard_is_refused_by_name(tmp_path):
    index = {"weight_map": {"conv_in.weight": "gone.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"gone\.safetensors cannot be read"):
        _fill(_meta_graph(), ["unet.conv_in"], {"unet": tmp_path})


def test_bin_files_are_read(folder, tmp_path):
    stored = AutoencoderKL.from_pretrained(folder / "vae")
    stored.save_pretrained(tmp_path, safe_serialization=False)
    found = _fill(_meta_graph(), ["vae.encoder.conv_in"], {"vae": tmp_path})
    assert torch.equal(found["vae.encoder.conv_in.weight"], stored.encoder.conv_in.weight)


class _Planted:
    """Runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("is_old", [False, True])
def test_nothing_in_a_bin_file_is_executed(tmp_path, is_old):
    planted = {"conv_in.weight": _Planted(tmp_path / "executed")}
    torch.save(planted, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=not is_old)
    with pytest.raises(ModelError, match=r"pytorch_model\.bin cannot be read: it holds more than tensors"):
        _fill(_meta_graph(), ["unet.conv_in"], {"unet": tmp_path})
    assert not (tmp_path / "executed").exists()


def test_initial_values_do_not_depend_on_which_other_layers_are_here():
    whole = _fill(_to_meta(tiny_stable_diffusion(torch.float32)))
    graph = _to_meta(tiny_stable_diffusion(torch.float32))
    for layer in reversed(graph.layers):
        for name, parameter in _fill(graph, [layer.name]).items():
            assert torch.equal(parameter, whole[name]), name


def test_initial_values_depend_on_seed_and_name_alone():
    first = _fill(_to_meta(tiny_dit(torch.float32)))
    torch.manual_seed(123)
    again = _fill(_to_meta(tiny_dit(torch.float32)))
    other = _fill(_to_meta(tiny_dit(torch.float32)), seed=1)
    wide = _fill(_to_meta(tiny_dit(torch.float32)), dtype=torch.float64)
    name, twin = (f"transformer.transformer_blocks.{i}.attn1.to_q.weight" for i in (0, 1))
    assert torch.equal(first[name], again[name])
    assert torch.equal(first[name].double(), wide[name])
    assert not torch.equal(first[name], other[name])
    assert not torch.equal(first[name], first[twin])


def test_initial_values_have_the_distribution_of_the_constructors():
    ours = _fill(_to_meta(tiny_dit(torch.float32)))["transformer.proj_out_1.weight"]
    bound = ours.shape[1] ** -0.5  # nn.Linear draws uniformly within it
    assert bound * 0.9 < ours.abs().max() <= bound


def test_initialising_leaves_the_global_generator_as_it_was():
    graph = _to_meta(tiny_dit(torch.float32))
    before = torch.get_rng_state()
    _fill(graph)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_parameter_that_cannot_be_initialised_is_named():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

    module = nn.Sequential(nn.Linear(4, 4), Scale()).to("meta")
    graph = sequential_graph(module, inputs=(4,), target=(4,), loss=lambda p, t: (p - t).sum(1))
    with pytest.raises(ModelError, match=r"model\.1\.scale cannot be initialised: Scale has no reset_parameters"):
        _fill(graph)
    _fill(graph, ["model.0"])


def test_tied_parameters_stay_tied():
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    module[2].weight = module[0].weight
    graph = sequential_graph(module, inputs=(4,), target=(4,), loss=lambda p, t: (p - t).sum(1))
    parameters = _fill(graph, ["model.2"])
    assert list(parameters) == ["model.0.weight", "model.2.bias"]
    assert module[0].weight is module[2].weight
    assert module[0].bias.is_meta


def test_real_parameters_are_kept_and_only_moved():
    graph = tiny_dit(torch.float32)
    before = {name: (p, p.clone()) for name, p in layer_parameters(graph, [x.name for x in graph.layers]).items()}
    after = _fill(graph, dtype=torch.float64)
    assert all(after[name] is parameter for name, (parameter, _) in before.items())
    assert all(torch.equal(after[name], value.double()) for name, (_, value) in before.items())


def test_filling_more_layers_later_keeps_what_was_trained(folder):
    graph = _meta_graph()
    conv = _fill(graph, ["unet.conv_in"], _sources(folder))["unet.conv_in.weight"]
    conv.data += 1
    trained = conv.clone()
    both = _fill(graph, ["unet.conv_in", "unet.conv_out"], _sources(folder))
    assert both["unet.conv_in.weight"] is conv
    assert torch.equal(conv, trained)
    assert not both["unet.conv_out.weight"].is_meta


def test_a_computed_buffer_on_the_meta_device_is_refused_by_name():
    graph = tiny_dit(torch.float32)
    graph.components["transformer"].to("meta")
    with pytest.raises(ModelError, match=r"transformer\.pos_embed\.pos_embed has no value"):
        _fill(graph)


def test_buffers_of_models_take_the_dtype_and_noise_levels_do_not():
    graph = _to_meta(tiny_dit(torch.float32))
    _fill(graph, dtype=torch.bfloat16)
    assert graph.components["transformer"].pos_embed.pos_embed.dtype == torch.bfloat16
    assert graph.components["objective"].alphas_cumprod.dtype == torch.float32


def test_stored_buffers_are_read(tmp_path):
    torch.manual_seed(0)
    trained = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    trained(torch.randn(8, 4))
    save_file(trained.state_dict(), tmp_path / "model.safetensors")
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)).to("meta")
    graph = sequential_graph(module, inputs=(4,), target=(4,), loss=lambda p, t: (p - t).sum(1))
    _fill(graph, sources={"model": tmp_path})
    assert torch.equal(module[0].running_mean, trained[0].running_mean)
    assert module[0].num_batches_tracked == 1


def test_names_of_parameters_are_those_of_the_layers_here():
    graph = _meta_graph()
    assert parameter_names(graph, ["unet.conv_out"]) == (
        "unet.conv_norm_out.weight",
        "unet.conv_norm_out.bias",
        "unet.conv_out.weight",
        "unet.conv_out.bias",
    )
