import pytest
import torch
from kit.descriptions import described
from kit.tiny_described import flux2_transformer
from kit.tiny_models import raw_inputs, tiny_controlled, tiny_dit, tiny_flux, tiny_sd3, tiny_sdxl, tiny_stable_diffusion
from safetensors.torch import save_file

from diffusionpipe.errors import ModelError
from diffusionpipe.models.graphs.graph import layer_parameters
from diffusionpipe.models.graphs.run import run_layers
from diffusionpipe.models.opening.folder import weight_sources
from diffusionpipe.models.parameters.lora import ATTENTION, LoraSettings, add_lora
from diffusionpipe.models.parameters.lora_file import load_adapters
from diffusionpipe.models.parameters.lora_read import ADAPTERS
from diffusionpipe.models.parameters.lora_targets import Breadth
from diffusionpipe.models.parameters.stored import stored_weights
from diffusionpipe.models.parameters.weights import materialize

pytest.importorskip("peft")
MODELS = {
    "Stable Diffusion": (tiny_stable_diffusion, "unet"),
    "SDXL": (tiny_sdxl, "unet"),
    "Stable Diffusion 3": (tiny_sd3, "transformer"),
    "FLUX": (tiny_flux, "transformer"),
}
every_model = pytest.mark.parametrize(("tiny", "trained"), MODELS.values(), ids=MODELS)


def _with_lora(tiny, trained, **settings):
    """The graph before and after; adapters are real."""
    plain, graph = tiny(), tiny()
    add_lora(graph.components, trained, LoraSettings(rank=2, **settings))
    _fill(graph)
    return plain, graph


def _fill(graph, seed=0):
    names = [layer.name for layer in graph.layers]
    materialize(graph, names, {}, device="cpu", dtype=torch.float64, seed=seed)
    return layer_parameters(graph, names)


@every_model
def test_new_adapters_do_not_change_the_loss(tiny, trained):
    plain, graph = _with_lora(tiny, trained)
    inputs = raw_inputs(plain, 2)
    losses = [run_layers(g.layers, g.components, inputs, targets=["loss"])["loss"] for g in (plain, graph)]
    assert torch.allclose(*losses, rtol=1e-13, atol=0)


@every_model
def test_only_adapters_are_trained_and_they_get_gradients(tiny, trained):
    _, graph = _with_lora(tiny, trained)
    run_layers(graph.layers, graph.components, raw_inputs(graph, 2), targets=["loss"])["loss"].sum().backward()
    parameters = dict(graph.components[trained].named_parameters())
    trainable = {name for name, p in parameters.items() if p.requires_grad}
    assert trainable == {name for name in parameters if ".lora_A." in name or ".lora_B." in name}
    assert {name for name, p in parameters.items() if p.grad is not None} == trainable
    assert all(parameters[name].grad.abs().max() > 0 for name in trainable if ".lora_B." in name)


@every_model
def test_weight_gradients_are_planned_for_adapters_alone(tiny, trained):
    _, graph = _with_lora(tiny, trained)
    model = described(graph)
    written = run_layers(graph.layers, graph.components, raw_inputs(graph, 2))
    needed = {name for name, tensor in written.items() if tensor.requires_grad}
    assert {t.name for t in model.tensors if t.needs_gradient} == needed
    trainable = {p.name for p in model.parameters if p.is_trainable}
    with_weights = [layer for layer in model.layers if trainable.intersection(layer.parameters)]
    assert with_weights
    assert all(".attn" in p or ".attentions" in p for layer in with_weights for p in trainable & {*layer.parameters})


def test_layers_before_the_first_adapter_are_frozen():
    _, graph = _with_lora(tiny_flux, "transformer")
    frozen = described(graph).frozen_layers
    assert {"transformer.x_embedder", "transformer.context_embedder", "transformer.time_text_embed"} <= {*frozen}
    assert "transformer.transformer_blocks.0" not in frozen


def test_alpha_scales_what_adapters_add():
    losses = []
    for alpha in (2.0, 4.0, None):
        _, graph = _with_lora(tiny_sd3, "transformer", alpha=alpha)
        parameters = dict(graph.components["transformer"].named_parameters())
        with torch.no_grad():
            for name, parameter in parameters.items():
                if ".lora_B." in name:
                    parameter.fill_(0.5 if alpha == 2.0 else 0.25)
        losses.append(run_layers(graph.layers, graph.components, raw_inputs(graph, 2), targets=["loss"])["loss"])
    assert torch.allclose(losses[0], losses[1], rtol=1e-12)
    assert not torch.allclose(losses[0], losses[2], rtol=1e-6)


def test_adapters_start_as_a_function_of_seed_and_name():
    values = []
    for seed, noise in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(noise)
        graph = tiny_sd3()
        add_lora(graph.components, "transformer", LoraSettings(rank=2))
        values.append({name: p.clone() for name, p in _fill(graph, seed).items() if ".lora_A." in name})
    assert all(torch.equal(values[0][name], values[1][name]) for name in values[0])
    assert not any(torch.equal(values[0][name], values[2][name]) for name in values[0])


def test_weights_of_the_model_without_adapters_are_read(tmp_path):
    stored, graph = tiny_sd3(torch.float32), tiny_sd3(torch.float32)
    for name, component in stored.components.items():
        if name != "objective":
            component.save_pretrained(tmp_path / name)
    add_lora(graph.components, "transformer", LoraSettings(rank=2))
    for component in graph.components.values():
        for module in component.modules():
            for parameter_name, parameter in module._parameters.items():
                if parameter is not None:
                    meta = torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
                    module._parameters[parameter_name] = meta
    names = [layer.name for layer in graph.layers if layer.component == "transformer"]
    materialize(
        graph,
        names,
        {"transformer": stored_weights(tmp_path / "transformer")},
        device="cpu",
        dtype=torch.float32,
        seed=0,
    )
    before = dict(stored.components["transformer"].named_parameters())
    for name, parameter in graph.components["transformer"].named_parameters():
        if ".lora_B." in name:
            assert parameter.abs().max() == 0
        elif ".lora_A." not in name:
            assert torch.equal(parameter, before[name.replace(".base_layer", "")]), name


def test_the_global_generator_stays_as_it_was():
    graph = tiny_flux()
    before = torch.get_rng_state()
    add_lora(graph.components, "transformer", LoraSettings())
    _fill(graph)
    assert torch.equal(torch.get_rng_state(), before)


def test_fused_layers_of_single_stream_attention_get_adapters_beside_the_others():
    transformer = flux2_transformer(guidance_embeds=False)
    add_lora({"transformer": transformer}, "transformer", LoraSettings(rank=2))
    names = {name.partition(".lora_A")[0] for name, _ in transformer.named_parameters() if ".lora_A." in name}
    double = {f"transformer_blocks.0.attn.{name}" for name in ATTENTION}
    single = {f"single_transformer_blocks.{i}.attn.{name}" for i in (0, 1) for name in ("to_qkv_mlp_proj", "to_out")}
    assert names == double | single


def test_what_nobody_reads_gets_no_adapter():
    transformer = tiny_sd3().components["transformer"]
    unread = "transformer_blocks.1.attn.to_k"
    transformer.get_submodule(unread).requires_grad_(False)  # as `cut` leaves what nobody reads
    with pytest.raises(ModelError, match=f"nothing depends on what {unread} of transformer give"):
        add_lora({"transformer": transformer}, "transformer", LoraSettings(target_modules=(unread,)))
    expected = {name for name, _ in transformer.named_modules() if name.endswith((".to_q", ".to_k"))} - {unread}
    add_lora({"transformer": transformer}, "transformer", LoraSettings(rank=2, target_modules=("to_q", "to_k")))
    adapted = {name.partition(".lora_A.")[0] for name, _ in transformer.named_parameters() if ".lora_A." in name}
    assert adapted == expected


def _random_adapters(unet, names, rank=2):
    """A file's tensors for linear layers; `names` are those of the two matrices for ends of the layers' names."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, linear in unet.named_modules():
        if name.endswith(tuple(names)):
            first, second = names[name.rpartition(".")[2]]
            tensors[f"unet.{name}.{first}.weight"] = torch.randn(rank, linear.in_features, generator=generator)
            tensors[f"unet.{name}.{second}.weight"] = torch.randn(linear.out_features, rank, generator=generator)
    return tensors


def _loaded(tensors, folder):
    """The second matrices of a U-Net that reads a file of these tensors."""
    unet = tiny_stable_diffusion().components["unet"]
    save_file(tensors, folder / ADAPTERS)
    load_adapters(unet, folder, "unet")
    return {name.partition(".lora_B.")[0]: p for name, p in unet.named_parameters() if ".lora_B." in name}


def test_names_of_both_kinds_and_alphas_are_read(tmp_path):
    unet = tiny_stable_diffusion().components["unet"]
    plain = _random_adapters(unet, {"to_k": ("lora_A", "lora_B"), "to_q": ("lora_A", "lora_B")})
    expected = _loaded(plain, tmp_path)
    assert len(expected) == len(plain) // 2
    mixed = _random_adapters(unet, {"to_k": ("lora_A", "lora_B"), "to_q": ("lora.down", "lora.up")})
    found = _loaded(mixed | {f"unet.{name}.alpha": torch.tensor(6.0) for name in expected}, tmp_path)
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], 3 * matrix) for name, matrix in expected.items())


def test_adapters_for_which_the_model_has_no_layer_are_refused(tmp_path):
    tensors = _random_adapters(tiny_stable_diffusion().components["unet"], {"to_k": ("lora_A", "lora_B")})
    more = {name.replace("down_blocks.0", "down_blocks.7"): tensor.clone() for name, tensor in tensors.items()}
    with pytest.raises(ModelError, match=r"do not fit unet: 2 names are of no layer .*down_blocks.7.*; was it"):
        _loaded(tensors | more, tmp_path)


def test_a_target_that_names_nothing_is_refused():
    with pytest.raises(ModelError, match="transformer has no modules named to_w"):
        add_lora(tiny_flux().components, "transformer", LoraSettings(target_modules=("to_q", "to_w")))


@pytest.mark.parametrize(
    ("tiny", "trained", "kind"),
    [(tiny_dit, "transformer", "DiTTransformer2DModel"), (tiny_controlled, "controlnet", "ControlNetModel")],
)
def test_a_class_without_adapters_is_refused(tiny, trained, kind):
    with pytest.raises(ModelError, match=f"{trained} is a {kind}, for which diffusers cannot load adapters"):
        add_lora(tiny().components, trained, LoraSettings())


def test_adapters_beside_random_weights_are_refused(tmp_path):
    graph = tiny_sd3()
    for name in ("vae", "text_encoder", "text_encoder_2", "text_encoder_3"):
        graph.components[name].save_pretrained(tmp_path / name)
    assert weight_sources(tmp_path, graph, from_scratch=True)["transformer"] is None
    add_lora(graph.components, "transformer", LoraSettings(rank=2))
    with pytest.raises(
        ModelError,
        match=r"transformer has no weights \(there is no such folder\), and adapters need pretrained weights",
    ):
        weight_sources(tmp_path, graph)


def _adapted_layers(component, name, **settings):
    component.requires_grad_(True)  # all of it is read
    add_lora({name: component}, name, LoraSettings(rank=2, **settings))
    return {n.partition(".lora_A")[0]: p.shape[0] for n, p in component.named_parameters() if ".lora_A." in n}


@pytest.mark.parametrize(
    ("breadth", "kinds"), [(Breadth.LINEAR, (torch.nn.Linear,)), (Breadth.ALL, (torch.nn.Linear, torch.nn.Conv2d))]
)
def test_a_word_stands_for_all_layers_of_its_kinds_but_the_excluded_ones(breadth, kinds):
    unet = tiny_stable_diffusion().components["unet"]
    named = {n for n, module in unet.named_modules() if isinstance(module, kinds)}
    expected = {n for n in named if not n.endswith((".linear_1", ".to_out.0"))}
    assert expected < named
    assert set(_adapted_layers(unet, "unet", target_modules=breadth, exclude=("linear_1", "to_out.0"))) == expected


def test_attention_of_text_encoders_has_other_names_and_exact_ends_give_ranks():
    components = tiny_flux().components
    found = _adapted_layers(
        components["text_encoder"], "text_encoder", rank_pattern={"q_proj": 3, "1.self_attn.q_proj": 1}
    )
    ends = ("q_proj", "k_proj", "v_proj", "out_proj")
    layers = {f"encoder.layers.{i}.self_attn.{end}": 2 for i in (0, 1) for end in ends}
    assert found == layers | {"encoder.layers.0.self_attn.q_proj": 3, "encoder.layers.1.self_attn.q_proj": 1}
    found = _adapted_layers(components["text_encoder_2"], "text_encoder_2", target_modules=Breadth.LINEAR)
    linear = {n for n, m in components["text_encoder_2"].named_modules() if isinstance(m, torch.nn.Linear)}
    assert set(found) == {name.removesuffix(".base_layer") for name in linear if ".lora_" not in name}


@pytest.mark.parametrize(("is_stabilized", "factor"), [(False, 6 / 4), (True, 6 / 2)])
def test_other_ranks_and_stabilised_ones_have_the_scale_of_the_usual_rank(is_stabilized, factor):
    unet = tiny_stable_diffusion().components["unet"]
    settings = LoraSettings(rank=4, alpha=6.0, rank_pattern={"to_k": 2}, rank_stabilized=is_stabilized)
    add_lora({"unet": unet}, "unet", settings)
    scales = [module.scaling["default"] for module in unet.modules() if hasattr(module, "scaling")]
    assert scales == pytest.approx([factor] * len(scales), rel=1e-14)
    assert settings.scale == pytest.approx(factor, rel=1e-14)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"exclude": ("ff.net.2",)}, "unet has no layers with adapters named ff.net.2"),
        (
            {"rank_pattern": {"ff.net.2": 1}},
            "no layer with an adapter has a name that ends as in rank_pattern: ff.net.2",
        ),
        ({"exclude": ATTENTION}, "unet would have no adapter, because lora.exclude leaves none of its layers"),
        ({"target_modules": Breadth.ALL, "rank": 8}, r"larger than unet.conv_\S+, whose .* or name it in lora.exclude"),
    ],
)
def test_settings_that_leave_no_effect_are_refused(settings, message):
    unet = tiny_stable_diffusion().components["unet"]
    with pytest.raises(ModelError, match=message):
        add_lora({"unet": unet}, "unet", LoraSettings(**{"rank": 2} | settings))


def test_norms_of_dora_start_as_those_of_the_weights_and_change_no_loss():
    plain, graph = _with_lora(tiny_flux, "transformer", dora=True)
    inputs = raw_inputs(plain, 2)
    losses = [run_layers(g.layers, g.components, inputs, targets=["loss"])["loss"] for g in (plain, graph)]
    assert torch.allclose(*losses, rtol=1e-13, atol=0)
    weights = dict(plain.components["transformer"].named_parameters())
    norms = {n: p for n, p in graph.components["transformer"].named_parameters() if ".lora_magnitude_vector." in n}
    assert norms
    for name, norm in norms.items():
        rows = weights[name.partition(".lora_")[0] + ".weight"].pow(2).sum(1).sqrt()
        assert torch.allclose(norm, rows, rtol=1e-14, atol=0)


def test_a_rank_that_is_larger_than_a_layer_is_refused():
    with pytest.raises(ModelError, match=r"rank 17 is larger than transformer\.\S+, whose smaller side is 16"):
        add_lora(tiny_flux().components, "transformer", LoraSettings(rank=17))
    add_lora(tiny_flux().components, "transformer", LoraSettings(rank=16))


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"rank": 0}, "rank 0"), ({"alpha": -1.0}, "alpha -1.0"), ({"target_modules": ()}, "no target")],
)
def test_settings_without_sense_are_refused(settings, named):
    with pytest.raises(ModelError, match=named):
        LoraSettings(**settings)
