"""The names that a denoiser's authors gave its layers, from diffusers' converters of their files.

A converter is run on numbered tensors: from the numbers in its result follows which original layer, and which of its
rows, each layer of diffusers came from. Some converters ask for the names that they know. Others rename what they are
given; for these the table here proposes original names, and the converter decides what becomes of each. Widths that
are written into a converter (3,072 in FLUX.1's) give only the order of the parts; their rows are the model's own.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class OriginalRows:
    """A layer of diffusers, whose outputs are some rows of one of the authors' layers."""

    module: str
    """The name of the layer in diffusers, e.g. "transformer_blocks.0.attn.to_q"."""
    rows: int
    """The number of outputs of the layer in diffusers, which are rows of the original one."""
    is_swapped: bool = False
    """Whether its two halves are exchanged in the original layer, as scale and shift of some last norms are."""


@dataclass(frozen=True, slots=True)
class OriginalLayer:
    """A layer under the name that the model's authors gave it, and the layers of diffusers that it joins, in order."""

    name: str
    """The name of the original layer without ".weight", e.g. "double_blocks.0.img_attn.qkv"."""
    parts: tuple[OriginalRows, ...]
    """The layers of diffusers that it joins, in the order of its rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Converter:
    name: str
    """The name of the function, in diffusers.loaders.single_file_utils."""
    rows: int = 12
    """The number of rows of each numbered tensor: the sum of the function's own widths, if it has some."""
    prefix: str = ""
    """The prefix without which the function ignores a name."""
    renames: tuple[tuple[str, str], ...] = ()
    """(pattern in diffusers' names, text that replaces it in the original ones), applied one after the other."""
    counted: tuple[tuple[str, str], ...] = ()
    """(form of the names by which the function counts blocks, name of these blocks in diffusers)."""


_FLUX_ROWS = 3 * 3072 + 12288
_CONVERTERS: Mapping[str, _Converter] = {
    "UNet2DConditionModel": _Converter(
        name="convert_ldm_unet_checkpoint",
        prefix="model.diffusion_model.",
        renames=(
            (r"^time_embedding\.linear_1$", "time_embed.0"),
            (r"^time_embedding\.linear_2$", "time_embed.2"),
            (r"^add_embedding\.linear_1$", "label_emb.0.0"),
            (r"^add_embedding\.linear_2$", "label_emb.0.2"),
            (r"^conv_in$", "input_blocks.0.0"),
            (r"^conv_out$", "out.2"),
            (r"^mid_block\.resnets\.0", "middle_block.0"),
            (r"^mid_block\.attentions\.0", "middle_block.1"),
            (r"^mid_block\.resnets\.1", "middle_block.2"),
            (r"\.conv1$", ".in_layers.2"),
            (r"\.conv2$", ".out_layers.3"),
            (r"\.time_emb_proj$", ".emb_layers.1"),
            (r"\.conv_shortcut$", ".skip_connection"),
            (r"^((?:input|output)_blocks\.\d+\.0|middle_block\.\d)\.norm1$", r"\1.in_layers.0"),
            (r"^((?:input|output)_blocks\.\d+\.0|middle_block\.\d)\.norm2$", r"\1.out_layers.0"),
            (r"^conv_norm_out$", "out.0"),
        ),
    ),
    "AutoencoderKL": _Converter(
        name="convert_ldm_vae_checkpoint",
        prefix="first_stage_model.",
        renames=(
            (r"_blocks\.(\d+)\.resnets\.", r".\1.block."),
            (r"down_blocks\.(\d+)\.downsamplers\.0", r"down.\1.downsample"),
            (r"up_blocks\.(\d+)\.upsamplers\.0", r"up.\1.upsample"),
            (r"mid_block\.resnets\.0", "mid.block_1"),
            (r"mid_block\.resnets\.1", "mid.block_2"),
            (r"mid_block\.attentions\.0", "mid.attn_1"),
            (r"\.group_norm$", ".norm"),
            (r"\.to_([qkv])$", r".\1"),
            (r"\.to_out\.0$", ".proj_out"),
            (r"\.conv_shortcut$", ".nin_shortcut"),
            (r"\.conv_norm_out$", ".norm_out"),
        ),
    ),
    "SD3Transformer2DModel": _Converter(
        name="convert_sd3_transformer_checkpoint_to_diffusers",
        counted=(
            ("joint_blocks.{}.attn2.", "transformer_blocks"),
            ("joint_blocks.{}.attn.ln_q", "transformer_blocks"),
        ),
    ),
    "FluxTransformer2DModel": _Converter(
        name="convert_flux_transformer_checkpoint_to_diffusers",
        rows=_FLUX_ROWS,
        counted=(
            ("double_blocks.{}.", "transformer_blocks"),
            ("single_blocks.{}.", "single_transformer_blocks"),
            ("guidance", "time_text_embed"),
        ),
    ),
    "ChromaTransformer2DModel": _Converter(
        name="convert_chroma_transformer_checkpoint_to_diffusers",
        rows=_FLUX_ROWS,
        counted=(
            ("double_blocks.{}.", "transformer_blocks"),
            ("single_blocks.{}.", "single_transformer_blocks"),
            ("distilled_guidance_layer.layers.{}.", "distilled_guidance_layer.layers"),
        ),
    ),
    "AuraFlowTransformer2DModel": _Converter(
        name="convert_auraflow_transformer_checkpoint_to_diffusers",
        counted=(
            ("double_layers.{}.", "joint_transformer_blocks"),
            ("single_layers.{}.", "single_transformer_blocks"),
        ),
    ),
    "Flux2Transformer2DModel": _Converter(
        name="convert_flux2_transformer_checkpoint_to_diffusers",
        renames=(
            (r"^single_transformer_blocks(.*)\.attn\.to_qkv_mlp_proj$", r"single_blocks\1.linear1"),
            (r"^single_transformer_blocks(.*)\.attn\.to_out$", r"single_blocks\1.linear2"),
            (r"^transformer_blocks", "double_blocks"),
            (r"attn\.to_[qkv]$", "img_attn.qkv"),
            (r"attn\.add_[qkv]_proj$", "txt_attn.qkv"),
            (r"attn\.to_out\.0$", "img_attn.proj"),
            (r"attn\.to_add_out$", "txt_attn.proj"),
            (r"ff\.linear_in$", "img_mlp.0"),
            (r"ff\.linear_out$", "img_mlp.2"),
            (r"ff_context\.linear_in$", "txt_mlp.0"),
            (r"ff_context\.linear_out$", "txt_mlp.2"),
            (r"^x_embedder$", "img_in"),
            (r"^context_embedder$", "txt_in"),
            (r"^time_guidance_embed\.timestep_embedder\.linear_1$", "time_in.in_layer"),
            (r"^time_guidance_embed\.timestep_embedder\.linear_2$", "time_in.out_layer"),
            (r"^time_guidance_embed\.guidance_embedder\.linear_1$", "guidance_in.in_layer"),
            (r"^time_guidance_embed\.guidance_embedder\.linear_2$", "guidance_in.out_layer"),
            (r"(_stream_modulation.*)\.linear$", r"\1.lin"),
            (r"^norm_out\.linear$", "final_layer.adaLN_modulation.1"),
            (r"^proj_out$", "final_layer.linear"),
        ),
    ),
    "WanTransformer3DModel": _Converter(
        name="convert_wan_transformer_to_diffusers",
        renames=(
            (r"\.attn1\.", ".self_attn."),
            (r"\.attn2\.", ".cross_attn."),
            (r"\.to_([qkv])$", r".\1"),
            (r"\.to_out\.0$", ".o"),
            (r"\.add_([kv])_proj$", r".\1_img"),
            (r"^(blocks\..*)\.ffn\.net\.0\.proj$", r"\1.ffn.0"),
            (r"^(blocks\..*)\.ffn\.net\.2$", r"\1.ffn.2"),
            (r"^condition_embedder\.time_embedder\.linear_1$", "time_embedding.0"),
            (r"^condition_embedder\.time_embedder\.linear_2$", "time_embedding.2"),
            (r"^condition_embedder\.text_embedder\.linear_1$", "text_embedding.0"),
            (r"^condition_embedder\.text_embedder\.linear_2$", "text_embedding.2"),
            (r"^condition_embedder\.time_proj$", "time_projection.1"),
            (r"^condition_embedder\.image_embedder\.ff\.net\.0\.proj$", "img_emb.proj.1"),
            (r"^condition_embedder\.image_embedder\.ff\.net\.2$", "img_emb.proj.3"),
            (r"^proj_out$", "head.head"),
        ),
    ),
    "LTXVideoTransformer3DModel": _Converter(
        name="convert_ltx_transformer_checkpoint_to_diffusers",
        renames=((r"^proj_in$", "patchify_proj"), (r"^time_embed\.", "adaln_single.")),
    ),
    "ZImageTransformer2DModel": _Converter(
        name="convert_z_image_transformer_checkpoint_to_diffusers",
        renames=(
            (r"\.attention\.to_[qkv]$", ".attention.qkv"),
            (r"\.attention\.to_out\.0$", ".attention.out"),
            (r"^all_(final_layer|x_embedder)\.2-1", r"\1"),
        ),
    ),
    "HunyuanVideoTransformer3DModel": _Converter(
        name="convert_hunyuan_video_transformer_to_diffusers",
        rows=_FLUX_ROWS,
        renames=(
            (r"^context_embedder\.token_refiner\.refiner_blocks(.*)\.attn\.to_[qkv]$", r"context_embedder\1.qkv"),
            (r"^context_embedder\.token_refiner\.refiner_blocks", "context_embedder"),
            (r"^context_embedder\.(\d+)\.qkv$", r"txt_in.individual_token_refiner.blocks.\1.self_attn_qkv"),
            (
                r"^context_embedder\.(\d+)\.attn\.to_out\.0$",
                r"txt_in.individual_token_refiner.blocks.\1.self_attn_proj",
            ),
            (r"^context_embedder\.(\d+)\.ff\.net\.0\.proj$", r"txt_in.individual_token_refiner.blocks.\1.mlp.fc1"),
            (r"^context_embedder\.(\d+)\.ff\.net\.2$", r"txt_in.individual_token_refiner.blocks.\1.mlp.fc2"),
            (
                r"^context_embedder\.(\d+)\.norm_out\.linear$",
                r"txt_in.individual_token_refiner.blocks.\1.adaLN_modulation.1",
            ),
            (r"^single_transformer_blocks(.*)\.(attn\.to_[qkv]|proj_mlp)$", r"single_blocks\1.linear1"),
            (r"^single_transformer_blocks(.*)\.proj_out$", r"single_blocks\1.linear2"),
            (r"^single_transformer_blocks(.*)\.norm\.linear$", r"single_blocks\1.modulation.linear"),
            (r"^transformer_blocks", "double_blocks"),
            (r"attn\.to_[qkv]$", "img_attn_qkv"),
            (r"attn\.add_[qkv]_proj$", "txt_attn_qkv"),
            (r"attn\.to_out\.0$", "img_attn_proj"),
            (r"attn\.to_add_out$", "txt_attn_proj"),
            (r"\.norm1\.linear$", ".img_mod.linear"),
            (r"\.norm1_context\.linear$", ".txt_mod.linear"),
            (r"\.ff\.net\.0\.proj$", ".img_mlp.fc1"),
            (r"\.ff\.net\.2$", ".img_mlp.fc2"),
            (r"\.ff_context\.net\.0\.proj$", ".txt_mlp.fc1"),
            (r"\.ff_context\.net\.2$", ".txt_mlp.fc2"),
            (r"^norm_out\.linear$", "final_layer.adaLN_modulation.1"),
            (r"^proj_out$", "final_layer.linear"),
        ),
    ),
}
"""Class of a component -> its converter. Other denoisers have their authors' names in diffusers too."""


class _Numbered(dict[str, Tensor]):
    """Original name -> tensor whose rows are numbered through all tensors; a missing one is made when it is read."""

    def __init__(self, names: Collection[str], rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.names: list[str] = []
        # Names that are proposed get their numbers first; others when the converter asks for them.
        for name in names:
            self.__missing__(name)

    def __missing__(self, name: str) -> Tensor:
        start = len(self.names) * self.rows
        self.names.append(name)
        made = self[name] = torch.arange(start, start + self.rows, dtype=torch.int32)
        return made

    def pop(self, name: str, *_: Any) -> Tensor:
        tensor = self[name]
        del self[name]
        return tensor


def layer_sizes(module: nn.Module) -> dict[str, int]:
    """Name -> number of outputs of each linear layer and convolution of a component, with adapters or without."""
    sizes = {}
    for name, part in module.named_modules():
        if ".lora_" in name or name.endswith(".base_layer"):
            continue
        layer = getattr(part, "base_layer", part)
        # Not the weight's shape: a sharded weight has none while nothing computes with it.
        if isinstance(layer, nn.Linear):
            sizes[name] = layer.out_features
        elif isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            sizes[name] = layer.out_channels
    return sizes


def original_layers(denoiser: nn.Module) -> tuple[OriginalLayer, ...]:
    """The denoiser's linear layers and convolutions under the names of its authors, joined as they join them.

    Layers that diffusers' converter does not make, such as those that only diffusers has, are left out.
    """
    sizes = layer_sizes(denoiser)
    converter = _CONVERTERS.get(type(denoiser).__name__)
    if converter is None:
        return tuple(OriginalLayer(name, (OriginalRows(name, rows),)) for name, rows in sizes.items())
    library_module: Any = denoiser
    found: dict[str, list[tuple[int, OriginalRows]]] = {}
    for module, original, start, is_swapped in _converted(converter, sizes, dict(library_module.config)):
        found.setdefault(original, []).append((start, OriginalRows(module, sizes[module], is_swapped)))
    # The parts of an original layer in the order of their rows.
    return tuple(
        OriginalLayer(name, tuple(part for _, part in sorted(parts, key=lambda one: one[0])))
        for name, parts in found.items()
    )


def _converted(
    converter: _Converter, sizes: Mapping[str, int], config: Mapping[str, Any]
) -> Iterator[tuple[str, str, int, bool]]:
    """(name, original layer's name, first row there, whether halves swap) of each layer that the converter makes.

    `sizes`: names of diffusers' layers -> their numbers of outputs. `config`: the component's configuration.
    """
    for name, original, rows in _tensors(converter, sizes, config):
        module = name.removesuffix(_WEIGHT)
        if name.endswith(_WEIGHT) and module in sizes:
            # Rows that run backwards in halves mean that scale and shift changed places.
            yield module, original.removesuffix(_WEIGHT), int(rows.min()), bool(rows[0] > rows[-1])


def original_tensors(kind: str, modules: Collection[str], config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Each tensor of the authors' file -> the names of diffusers' tensors that it joins, from first to last row.

    `modules` are the names of all modules of a component of class `kind` that hold tensors. The result may also name
    tensors that the component does not have.
    """
    found: dict[str, list[tuple[int, str]]] = {}
    for name, original, rows in _tensors(_CONVERTERS[kind], modules, config):
        found.setdefault(original, []).append((int(rows.min()), name))
    return {original: [name for _, name in sorted(parts)] for original, parts in found.items()}


def _tensors(
    converter: _Converter, modules: Collection[str], config: Mapping[str, Any]
) -> Iterator[tuple[str, str, Tensor]]:
    """(name, original tensor's name, numbers of its rows there) of each tensor that the converter makes."""
    import diffusers.loaders.single_file_utils as converters

    numbered = _Numbered(_proposed(converter, modules, config), converter.rows)
    convert = getattr(converters, converter.name)
    for name, numbers in convert(numbered, config=config).items():
        if numbers is not None:
            original = numbered.names[int(numbers[0]) // converter.rows]
            yield name, original.removeprefix(converter.prefix), numbers % converter.rows


def _proposed(converter: _Converter, sizes: Collection[str], config: Mapping[str, Any]) -> list[str]:
    """The original names of tensors that the converter is given, each once, proposed from diffusers' names `sizes`."""
    names = []
    for pattern, blocks in converter.counted:
        # The converter counts blocks from 0 to the highest that it finds.
        numbers = [int(n.removeprefix(f"{blocks}.").partition(".")[0]) for n in sizes if _is_block(n, blocks)]
        names += [pattern.format(number) for number in range(max(numbers, default=0) + 1)]
    if converter.renames:
        level = config.get("layers_per_block")
        for module in sizes:
            name = _block_of_unet(module, level, sizes) if isinstance(level, int) else module
            if found := re.match(r"decoder\.up_blocks\.(\d+)(\..*)", name):  # a VAE's authors count from its end
                name = f"decoder.up_blocks.{len(config['up_block_types']) - 1 - int(found[1])}{found[2]}"
            for before, after in converter.renames:
                name = re.sub(before, after, name)
            names += [f"{converter.prefix}{name}{end}" for end in (_WEIGHT, ".bias")]
    return list(dict.fromkeys(names))


def _is_block(name: str, blocks: str) -> bool:
    return re.match(rf"{re.escape(blocks)}\.\d+\.", name) is not None


def _block_of_unet(name: str, level_layers: int, names: Collection[str]) -> str:
    """The name of a U-Net's module with its authors' number of the block; they count blocks through all levels.

    `level_layers`: the number of residual blocks of a level. `names`: of all modules.
    """
    found = re.match(r"(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.*)", name)
    if found is None:
        return name
    side, level, kind, number, rest = found[1], int(found[2]), found[3], int(found[4]), found[5]
    # A level has `level_layers` residual blocks and a downsampling; on the way up it has one residual block more.
    first = (level_layers + 1) * level
    match kind:
        case "downsamplers":
            return f"input_blocks.{first + level_layers + 1}.0.op"
        case "upsamplers":
            has_attention = any(other.startswith(f"up_blocks.{level}.attentions.") for other in names)
            return f"output_blocks.{first + level_layers}.{'2' if has_attention else '1'}.conv"
    block = f"input_blocks.{first + number + 1}" if side == "down" else f"output_blocks.{first + number}"
    return f"{block}.{'0' if kind == 'resnets' else '1'}.{rest}"
