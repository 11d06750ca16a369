"""Names of adapters in other programs' files, against tables from the rules of these programs."""

import re
from dataclasses import replace

import pytest
import torch
from diffusers import StableDiffusionPipeline
from kit.tiny_described import aura_flow, chroma, flux2, hunyuan_video, ltx, qwen_image, wan, z_image
from kit.tiny_models import (
    tiny_flux_transformer,
    tiny_projected_text_encoder,
    tiny_sd3_transformer,
    tiny_sdxl_unet,
    tiny_t5,
    tiny_text_encoder,
    tiny_unet,
)

from diffusionpipe.errors import ModelError
from diffusionpipe.models.parameters.adapter_names import (
    Adapter,
    OriginalRows,
    from_foreign,
    joined,
    layer_sizes,
    separated,
    to_foreign,
)

ATTENTION = r"\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out|to_qkv_mlp_proj|to_out)$"
FEED_FORWARD = r"\.(ff|ffn|ff_context|img_mlp|txt_mlp|feed_forward|proj_mlp|proj_out)\b"


def _thirds(image, text):
    """q, k and v of both streams of a joint block, as thirds of a layer."""
    names = [("to_q", image, 0), ("to_k", image, 1), ("to_v", image, 2)]
    return [*names, ("add_q_proj", text, 0), ("add_k_proj", text, 1), ("add_v_proj", text, 2)]


SINGLE = [("attn.to_q", "linear1", 0), ("attn.to_k", "linear1", 1), ("attn.to_v", "linear1", 2)]
SINGLE += [("proj_mlp", "linear1", 3), ("proj_out", "linear2", 0)]
FLUX_DOUBLE = [(f"attn.{a}", b, c) for a, b, c in _thirds("img_attn.qkv", "txt_attn.qkv")]
FLUX_DOUBLE += [("attn.to_out.0", "img_attn.proj", 0), ("attn.to_add_out", "txt_attn.proj", 0)]
FLUX_FF = [("ff.net.0.proj", "img_mlp.0", 0), ("ff.net.2", "img_mlp.2", 0)]
FLUX_FF += [("ff_context.net.0.proj", "txt_mlp.0", 0), ("ff_context.net.2", "txt_mlp.2", 0)]
FLUX2_FF = [("ff.linear_in", "img_mlp.0", 0), ("ff.linear_out", "img_mlp.2", 0)]
FLUX2_FF += [("ff_context.linear_in", "txt_mlp.0", 0), ("ff_context.linear_out", "txt_mlp.2", 0)]
FLUX2_SINGLE = [("attn.to_qkv_mlp_proj", "linear1", 0), ("attn.to_out", "linear2", 0)]
HUNYUAN = [(f"attn.{a}", b, c) for a, b, c in _thirds("img_attn_qkv", "txt_attn_qkv")]
HUNYUAN += [("attn.to_out.0", "img_attn_proj", 0), ("attn.to_add_out", "txt_attn_proj", 0)]
HUNYUAN += [("ff.net.0.proj", "img_mlp.fc1", 0), ("ff.net.2", "img_mlp.fc2", 0)]
HUNYUAN += [("ff_context.net.0.proj", "txt_mlp.fc1", 0), ("ff_context.net.2", "txt_mlp.fc2", 0)]
REFINER = [("attn.to_q", "self_attn_qkv", 0), ("attn.to_k", "self_attn_qkv", 1), ("attn.to_v", "self_attn_qkv", 2)]
REFINER += [("attn.to_out.0", "self_attn_proj", 0), ("ff.net.0.proj", "mlp.fc1", 0), ("ff.net.2", "mlp.fc2", 0)]
SD3 = [(f"attn.{a}", b, c) for a, b, c in _thirds("x_block.attn.qkv", "context_block.attn.qkv")]
SD3 += [("attn.to_out.0", "x_block.attn.proj", 0), ("attn.to_add_out", "context_block.attn.proj", 0)]
SD3 += [("ff.net.0.proj", "x_block.mlp.fc1", 0), ("ff.net.2", "x_block.mlp.fc2", 0)]
SD3 += [("ff_context.net.0.proj", "context_block.mlp.fc1", 0), ("ff_context.net.2", "context_block.mlp.fc2", 0)]
WAN = [(f"attn1.to_{n}", f"self_attn.{n}", 0) for n in "qkv"] + [("attn1.to_out.0", "self_attn.o", 0)]
WAN += [(f"attn2.to_{n}", f"cross_attn.{n}", 0) for n in "qkv"] + [("attn2.to_out.0", "cross_attn.o", 0)]
WAN += [("ffn.net.0.proj", "ffn.0", 0), ("ffn.net.2", "ffn.2", 0)]
BLOCKS = {
    "StableDiffusion3Pipeline": [("transformer_blocks", "joint_blocks", SD3)],
    "FluxPipeline": [
        ("transformer_blocks", "double_blocks", FLUX_DOUBLE + FLUX_FF),
        ("single_transformer_blocks", "single_blocks", SINGLE),
    ],
    "ChromaPipeline": [
        ("transformer_blocks", "double_blocks", FLUX_DOUBLE + FLUX_FF),
        ("single_transformer_blocks", "single_blocks", SINGLE),
    ],
    "Flux2Pipeline": [
        ("transformer_blocks", "double_blocks", FLUX_DOUBLE + FLUX2_FF),
        ("single_transformer_blocks", "single_blocks", FLUX2_SINGLE),
    ],
    "HunyuanVideoPipeline": [
        ("transformer_blocks", "double_blocks", HUNYUAN),
        ("single_transformer_blocks", "single_blocks", SINGLE),
        ("context_embedder.token_refiner.refiner_blocks", "txt_in.individual_token_refiner.blocks", REFINER),
    ],
    "WanPipeline": [("blocks", "blocks", WAN)],
}
"""Blocks in diffusers, the authors' blocks, and of each layer its name in both and the part of the latter."""
DENOISERS = {
    "StableDiffusionPipeline": tiny_unet,
    "StableDiffusionPipeline 2": lambda: tiny_unet(use_linear_projection=True, attention_head_dim=(1, 2)),
    "StableDiffusionXLPipeline": tiny_sdxl_unet,
    "StableDiffusion3Pipeline": tiny_sd3_transformer,
    "FluxPipeline": tiny_flux_transformer,
    "Flux2Pipeline": lambda: flux2().transformer,
    "ChromaPipeline": lambda: chroma().transformer,
    "QwenImagePipeline": lambda: qwen_image().transformer,
    "WanPipeline": lambda: wan().transformer,
    "LTXPipeline": lambda: ltx().transformer,
    "HunyuanVideoPipeline": lambda: hunyuan_video().transformer,
    "ZImagePipeline": lambda: z_image().transformer,
    "AuraFlowPipeline": lambda: aura_flow().transformer,
}
DOTTED = {
    "LTXPipeline": "diffusion_model.",
    "HunyuanVideoPipeline": "diffusion_model.",
    "ZImagePipeline": "diffusion_model.",
    "AuraFlowPipeline": "transformer.",
}
every_pipeline = pytest.mark.parametrize(
    ("make", "pipeline"), [(make, name.partition(" ")[0]) for name, make in DENOISERS.items()], ids=DENOISERS
)


def _component(pipeline):
    return "unet" if "StableDiffusion" in pipeline and "3" not in pipeline else "transformer"


def _adapters(module, names, *, rank=2, scale=1.5):
    """Random adapters for these layers."""
    made, generator = {}, torch.Generator().manual_seed(0)
    for name in names:
        weight = module.get_submodule(name).weight
        down = torch.randn(rank, *weight.shape[1:], generator=generator)
        up = torch.randn(weight.shape[0], rank, *(1 for _ in weight.shape[2:]), generator=generator)
        made[name] = Adapter(down=down, up=up, scale=scale)
    return made


def _targets(module):
    return [n for n in layer_sizes(module) if re.search(ATTENTION, n) or ("." in n and re.search(FEED_FORWARD, n))]


def _table(pipeline, module, names):
    """Name in the file without what stands for the matrix, and the first row, of each layer, from the rules."""
    sizes = layer_sizes(module)
    table = {}
    for name in names:
        original, part, block = name, 0, name
        for before, after, layers in BLOCKS.get(pipeline, ()):
            found = re.fullmatch(rf"{re.escape(before)}\.(\d+)\.(.*)", name)
            if found:
                ((ours, theirs, part),) = [one for one in layers if one[0] == found[2]]
                original = f"{after}.{found[1]}.{theirs}"
                block = name.removesuffix(ours)
        width = 0 if not part else sizes[next(n for n in (f"{block}attn.to_q", f"{block}to_q") if n in sizes)]
        prefix = DOTTED.get(pipeline)
        stem = prefix + original if prefix else "lora_unet_" + original.replace(".", "_")
        table[name] = stem, part * width
    return table


def _product(tensors, stem):
    """What a reader adds to the layer: up * down * alpha / rank, in float64."""
    kohya = f"{stem}.lora_down.weight" in tensors
    down, up = (tensors[f"{stem}.lora_{end}.weight"] for end in (("down", "up") if kohya else "AB"))
    alpha = tensors[f"{stem}.alpha"].item() if kohya else down.shape[0]
    return up.flatten(1).double() @ down.flatten(1).double() * alpha / down.shape[0]


@every_pipeline
def test_every_name_is_in_the_table_of_the_rules_and_its_product_is_ours(make, pipeline):
    module, component = make(), _component(pipeline)
    adapters = _adapters(module, _targets(module))
    written = to_foreign({component: adapters}, {component: module}, pipeline=pipeline)
    table = _table(pipeline, module, adapters)
    ends = (".lora_A.weight", ".lora_B.weight")
    ends = ends if pipeline in DOTTED else (".lora_down.weight", ".lora_up.weight", ".alpha")
    assert set(written) == {stem + end for stem, _ in table.values() for end in ends}
    rows = dict.fromkeys((stem for stem, _ in table.values()), 0)
    for name, (stem, first) in table.items():
        adapter = adapters[name]
        ours = adapter.up.flatten(1).double() @ adapter.down.flatten(1).double() * adapter.scale
        theirs = _product(written, stem)[first : first + len(ours)]
        assert (theirs - ours).abs().max() <= 1e-6 * ours.abs().max(), name
        rows[stem] += len(ours)
    assert all(len(_product(written, stem)) == count for stem, count in rows.items())  # no row belongs to nobody


@every_pipeline
def test_all_layers_are_read_as_they_were_written(make, pipeline):
    module, component = make(), _component(pipeline)
    only = {"HunyuanVideoPipeline": r"transformer_blocks|refiner_blocks", "ZImagePipeline": r"layers|refiner"}
    only["WanPipeline"] = r"blocks|condition_embedder|proj_out"
    names = [name for name in layer_sizes(module) if re.match(f".*({only.get(pipeline, '')})", name)]
    adapters = _adapters(module, names)
    written = to_foreign({component: adapters}, {component: module}, pipeline=pipeline)
    read = from_foreign(written, {component: module}, pipeline=pipeline)[component]
    assert read.keys() == adapters.keys()
    for name, adapter in adapters.items():
        assert torch.equal(read[name].down, adapter.down), name
        assert torch.allclose(read[name].up * read[name].scale, adapter.up * adapter.scale, rtol=1e-6), name


def test_a_layer_of_which_some_parts_have_adapters_has_zero_rows_for_the_others():
    module = tiny_flux_transformer()
    block = "single_transformer_blocks.0."
    adapters = _adapters(module, [f"{block}attn.to_q", f"{block}attn.to_v"])
    written = to_foreign({"transformer": adapters}, {"transformer": module}, pipeline="FluxPipeline")
    product = _product(written, "lora_unet_single_blocks_0_linear1")
    assert product.shape[0] == 3 * 16 + 64
    assert product[16:32].abs().max() == product[48:].abs().max() == 0
    read = from_foreign(written, {"transformer": module}, pipeline="FluxPipeline")["transformer"]
    assert read.keys() == adapters.keys()
    assert read[f"{block}attn.to_v"].rank == 2


def test_parts_of_several_scales_have_them_multiplied_in():
    module = tiny_sd3_transformer()
    q, k = (f"transformer_blocks.0.attn.to_{n}" for n in "qk")
    adapters = _adapters(module, [q], scale=0.5) | _adapters(module, [k], rank=3, scale=3.0)
    written = to_foreign({"transformer": adapters}, {"transformer": module}, pipeline="StableDiffusion3Pipeline")
    product = _product(written, "lora_unet_joint_blocks_0_x_block_attn_qkv")
    for row, name in ((0, q), (8, k)):
        ours = adapters[name].up.double() @ adapters[name].down.double() * adapters[name].scale
        assert torch.allclose(product[row : row + 8], ours, rtol=1e-6, atol=1e-9)


def test_wan_without_its_feed_forwards_keeps_the_dots():
    module = wan().transformer
    adapters = _adapters(module, [n for n in layer_sizes(module) if ".attn" in n])
    written = to_foreign({"transformer": adapters}, {"transformer": module}, pipeline="WanPipeline")
    assert {name.partition(".blocks.")[0] for name in written} == {"diffusion_model"}
    assert "diffusion_model.blocks.2.cross_attn.o.lora_B.weight" in written


def test_text_encoders_have_text_model_in_their_names_and_an_out_proj():
    clip, t5 = tiny_text_encoder(), tiny_t5()
    first = next(name for name in layer_sizes(clip) if name.endswith("self_attn.q_proj"))
    adapters = {"text_encoder": _adapters(clip, [first]), "text_encoder_2": _adapters(t5, [*layer_sizes(t5)][:1])}
    modules = {"text_encoder": clip, "text_encoder_2": t5}
    written = to_foreign(adapters, modules, pipeline="FluxPipeline")
    stems = {name.partition(".")[0] for name in written}
    start = "lora_te1_text_model_encoder_layers_0_self_attn_"
    assert stems == {f"{start}q_proj", f"{start}out_proj", "lora_te3_encoder_block_0_layer_0_SelfAttention_q"}
    assert _product(written, f"{start}out_proj").abs().max() == 0
    read = from_foreign(written, modules, pipeline="FluxPipeline")
    assert torch.equal(read["text_encoder"][first].up, adapters["text_encoder"][first].up)


@pytest.mark.parametrize(
    ("pipeline", "prefixes"),
    [
        ("StableDiffusionPipeline", ["lora_te_"]),
        ("StableDiffusionXLPipeline", ["lora_te1_", "lora_te2_"]),
        ("StableDiffusion3Pipeline", ["lora_te1_", "lora_te2_", "lora_te3_"]),
        ("FluxPipeline", ["lora_te1_", "lora_te3_"]),
    ],
)
def test_each_text_encoder_has_the_prefix_that_readers_look_for(pipeline, prefixes):
    encoders = [tiny_t5() if prefix == "lora_te3_" else tiny_projected_text_encoder() for prefix in prefixes]
    components = [f"text_encoder{f'_{number}' if number > 1 else ''}" for number in range(1, len(prefixes) + 1)]
    modules = dict(zip(components, encoders, strict=True))
    names = {name: [n for n in layer_sizes(encoder) if "embed" not in n] for name, encoder in modules.items()}
    adapters = {name: _adapters(encoder, names[name]) for name, encoder in modules.items()}
    written = {name.partition(".")[0] for name in to_foreign(adapters, modules, pipeline=pipeline)}
    clip = [f"self_attn_{n}" for n in ("q_proj", "k_proj", "v_proj", "out_proj")] + ["mlp_fc1", "mlp_fc2"]
    expected = set()
    for prefix, encoder in zip(prefixes, encoders, strict=True):
        layers = range(encoder.config.num_hidden_layers)
        if prefix != "lora_te3_":
            expected |= {f"{prefix}text_model_encoder_layers_{layer}_{n}" for layer in layers for n in clip}
            expected.add(f"{prefix}text_projection")
            continue
        gated = any(name.endswith("wi_0") for name in layer_sizes(encoder))
        dense = ("wi_0", "wi_1", "wo") if gated else ("wi", "wo")
        own = [f"0_SelfAttention_{n}" for n in "qkvo"] + [f"1_DenseReluDense_{n}" for n in dense]
        expected |= {f"{prefix}encoder_block_{layer}_layer_{n}" for layer in layers for n in own}
    assert written == expected


def test_layers_without_a_name_there_are_refused_by_name():
    module = hunyuan_video().transformer
    adapters = _adapters(module, ["time_text_embed.timestep_embedder.linear_1"])
    with pytest.raises(ModelError, match=r"no name for transformer\.time_text_embed\.timestep_embedder\.linear_1"):
        to_foreign({"transformer": adapters}, {"transformer": module}, pipeline="HunyuanVideoPipeline")
    with pytest.raises(ModelError, match=r"reads no adapters of SanaPipeline: remove .* StableDiffusionXL, "):
        to_foreign({"transformer": adapters}, {"transformer": module}, pipeline="SanaPipeline")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["lora_unet_no_such_layer.lora_up.weight"], "1 name is of no layer"),
        (["lora_unet_mid_block_attentions_0_proj_in.hada_w1_a"], "it holds adapters of LoHa"),
        (["lora_unet_mid_block_attentions_0_proj_in.lora_up.weight"], "one matrix of two"),
    ],
)
def test_a_file_of_another_kind_is_refused_with_its_names(names, message):
    with pytest.raises(ModelError, match=message):
        from_foreign(
            {name: torch.ones(2, 2) for name in names}, {"unet": tiny_unet()}, pipeline="StableDiffusionPipeline"
        )


def test_an_adapter_of_another_size_is_refused_with_both_sizes():
    module = tiny_unet()
    name = "lora_unet_mid_block_attentions_0_proj_in"
    tensors = {f"{name}.lora_up.weight": torch.ones(320, 2), f"{name}.lora_down.weight": torch.ones(2, 320)}
    with pytest.raises(ModelError, match=r"1 of 1 adapters .*proj_in \(320, 320\), here \(16, 16"):
        from_foreign(tensors, {"unet": module}, pipeline="StableDiffusionPipeline")


@pytest.mark.parametrize(
    ("name", "original"),
    [
        (
            "up_blocks.1.attentions.0.transformer_blocks.0.attn1.to_out.0",
            "output_blocks.{}.1.transformer_blocks.0.attn1.to_out.0",
        ),
        ("up_blocks.1.resnets.0.conv1", "output_blocks.{}.0.in_layers.2"),
    ],
)
def test_a_unet_is_read_under_each_usual_name(name, original):
    """Kohya's scripts train SDXL under its authors' names, which count the blocks of all levels."""
    module = tiny_sdxl_unet()
    (adapter,) = _adapters(module, [name]).values()
    original = original.format(module.config.layers_per_block + 1)  # the first of the second level
    stems = [f"unet.{name}", f"base_model.model.{name}", name, f"lora_unet_{name.replace('.', '_')}"]
    stems += [f"lora_unet_{original.replace('.', '_')}", f"diffusion_model.{original}"]
    for stem in stems:
        tensors = {f"{stem}.lora_up.weight": adapter.up, f"{stem}.lora_down.weight": adapter.down}
        tensors[f"{stem}.alpha"] = torch.tensor(1.0)
        read = from_foreign(tensors, {"unet": module}, pipeline="StableDiffusionXLPipeline")["unet"]
        assert list(read) == [name]
        assert read[name].scale == 0.5


def _of_ranks(layer, *ranks):
    """Random adapters of the layers `layer.0`, `layer.1` ... of 4 outputs and 5 inputs."""
    generator = torch.Generator().manual_seed(sum(ranks))
    return {
        f"{layer}.{number}": Adapter(
            down=torch.randn(rank, 5, generator=generator), up=torch.randn(4, rank, generator=generator), scale=0.5
        )
        for number, rank in enumerate(ranks)
    }


@pytest.mark.parametrize("ranks", [(2, 2, 2), (1, 3, 2), (3, 1), (1, 1, 4)])
def test_parts_of_any_ranks_are_taken_apart_as_they_were_joined(ranks):
    adapters = _of_ranks("q", *ranks)
    parts = [OriginalRows(name, 4) for name in adapters]
    found = separated(parts, joined(parts, adapters))
    assert found.keys() == adapters.keys()
    for name, adapter in adapters.items():
        assert torch.equal(found[name].down, adapter.down)
        assert torch.equal(found[name].up, adapter.up)


def test_magnitudes_are_taken_apart_in_the_order_of_their_rows():
    """In DoRA each row has a magnitude: where halves of rows change places, theirs do too."""
    adapters = _of_ranks("q", 2, 2)
    parts = [OriginalRows("q.0", 4, is_swapped=True), OriginalRows("q.1", 4)]
    whole = replace(joined(parts, adapters), magnitude=torch.arange(8.0).reshape(1, 8))
    found = separated(parts, whole)
    assert torch.equal(found["q.0"].up, adapters["q.0"].up)
    assert found["q.0"].magnitude.tolist() == [2, 3, 0, 1]
    assert found["q.1"].magnitude.tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize(("ranks", "dead"), [((2, 2, 2), 1), ((1, 3, 2), 0), ((1, 3, 2), 2)])
def test_a_part_that_adds_nothing_is_taken_apart_by_the_ranks_that_are_expected(ranks, dead):
    adapters = _of_ranks("q", *ranks)
    adapters[f"q.{dead}"].up.zero_()
    parts = [OriginalRows(name, 4) for name in adapters]
    expected = {name: adapter.rank for name, adapter in adapters.items()}
    found = separated(parts, joined(parts, adapters), expected)
    assert {name: adapter.rank for name, adapter in found.items()} == expected
    assert all(torch.equal(found[name].down, adapter.down) for name, adapter in adapters.items())
    other = separated(parts, joined(parts, adapters), {name: rank + 1 for name, rank in expected.items()})
    for name, adapter in other.items():  # as if nothing were expected: no product changes
        torch.testing.assert_close(adapter.up @ adapter.down, adapters[name].up @ adapters[name].down)


def test_diffusers_gives_each_layer_its_product_where_ranks_and_scales_differ():
    """Of several alphas its reader overlooks some of attention, in U-Nets and in CLIP."""
    modules = {"unet": tiny_unet(), "text_encoder": tiny_text_encoder()}
    ranks = {"to_q": 2, "to_k": 4, "q_proj": 2, "k_proj": 4, "fc1": 1, "ff.net.2": 3}
    generator, adapters = torch.Generator().manual_seed(0), {}
    for component, module in modules.items():
        for name, layer in module.named_modules():
            rank = next((rank for end, rank in ranks.items() if name.endswith(f".{end}")), None)
            if rank is not None:
                down = torch.randn(rank, layer.in_features, generator=generator)
                up = torch.randn(layer.out_features, rank, generator=generator)
                scale = 2.0 if name.endswith("to_k") else 1.0
                adapters.setdefault(component, {})[name] = Adapter(down=down, up=up, scale=scale)
    tensors = to_foreign(adapters, modules, pipeline="StableDiffusionPipeline")
    reader = StableDiffusionPipeline
    state, alphas = reader.lora_state_dict(dict(tensors), unet_config=modules["unet"].config)
    reader.load_lora_into_unet(state, alphas, modules["unet"])
    reader.load_lora_into_text_encoder(state, alphas, modules["text_encoder"], prefix="text_encoder")
    found = 0
    for component, module in modules.items():
        layers = dict(module.named_modules())
        for name, adapter in adapters[component].items():
            (key,) = layers[name].lora_A
            product = layers[name].scaling[key] * layers[name].lora_B[key].weight @ layers[name].lora_A[key].weight
            assert torch.allclose(product, adapter.scale * adapter.up @ adapter.down, rtol=1e-5, atol=1e-5), name
            found += 1
    assert found == sum(map(len, adapters.values()))


@pytest.mark.parametrize(
    ("make", "pipeline"),
    [
        (tiny_unet, "StableDiffusionPipeline"),
        (tiny_flux_transformer, "FluxPipeline"),
        (tiny_sd3_transformer, "StableDiffusion3Pipeline"),
        (lambda: wan().transformer, "WanPipeline"),
        (lambda: z_image().transformer, "ZImagePipeline"),
    ],
)
def test_whole_differences_of_dora_are_what_peft_adds_row_by_row(make, pipeline):
    """peft itself merges the adapters; convolutions, joined rows and names included."""
    peft = pytest.importorskip("peft")
    module, component = make(), _component(pipeline)
    names = _targets(module)
    torch.manual_seed(0)
    adapters = {
        name: replace(one, magnitude=torch.rand(one.up.shape[0]) + 0.5)
        for name, one in _adapters(module, names, scale=1.0).items()
    }
    old = {name: module.get_submodule(name).weight.detach().clone() for name in names}
    written = to_foreign(
        {component: adapters},
        {component: module},
        pipeline=pipeline,
        weights=lambda asked, layers: {name: old[name] for name in layers if asked == component},
    )
    whole = peft.inject_adapter_in_model(
        peft.LoraConfig(r=2, lora_alpha=2, target_modules=names, use_dora=True), module
    )
    table = _table(pipeline, module, names)
    end = ".diff"
    assert set(written) == {stem + end for stem, _ in table.values()}
    for name, (stem, first) in table.items():
        layer, adapter = whole.get_submodule(name), adapters[name]
        layer.lora_A["default"].weight.data, layer.lora_B["default"].weight.data = adapter.down, adapter.up
        norms = layer.lora_magnitude_vector["default"].weight
        norms.data = adapter.magnitude.reshape(norms.shape)
        layer.merge()
        added = layer.get_base_layer().weight.detach() - old[name]
        found = written[stem + end][first : first + len(added)]
        assert found.dtype is torch.float32
        assert (found - added).abs().max() <= 1e-5 * added.abs().max(), name
    with pytest.raises(ModelError, match=r"it holds whole differences of weights .*diffusers' format beside it"):
        from_foreign(written, {component: module}, pipeline=pipeline)
    with pytest.raises(ModelError, match=r"lora\.dora_as_difference"):
        to_foreign({component: adapters}, {component: module}, pipeline=pipeline)
