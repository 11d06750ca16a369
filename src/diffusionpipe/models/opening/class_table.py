"""The transformer classes of diffusers that are planned without a folder, and how each is called.

Sizes, lengths of texts and cells come from diffusers' pipelines of the classes.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from diffusionpipe.models.base.family import Clip
from diffusionpipe.models.families.z_image_forward import predict as predict_z_image
from diffusionpipe.models.opening import minimax_h3
from diffusionpipe.models.opening.class_call import (
    ClassCall,
    Config,
    Grid,
    Made,
    Shape,
    Tensors,
    always,
    clip,
    frames_first,
    if_set,
    no_places,
    picture,
    places,
    sound,
    text_states,
    tokens,
    vector,
)
from diffusionpipe.models.parts.latents import latent_frames

_TEXT = {"encoder_hidden_states": text_states}
_SQUARE = Clip(width=1024, height=1024)
_SIZES = {name: always(2) for name in ("original_size", "target_size", "crop_coords")}
_FOURTHS = partial(latent_frames, 4)


def _kandinsky(config: Config, grid: Grid) -> tuple[int, ...]:
    return grid.frames, grid.height, grid.width, config["in_visual_dim"]


def _kandinsky_places(config: Config, grid: Grid, tensors: Tensors) -> list[Tensor]:
    sides = (grid.frames, grid.height, grid.width)
    return [torch.arange(side // patch) for side, patch in zip(sides, config["patch_size"], strict=True)]


def _layers_of_text(config: Config, grid: Grid) -> tuple[int, ...]:
    """The shape of a text's states from several layers of the encoder, (T, layers, D)."""
    length, width = text_states(config, grid)
    return length, config["num_text_layers"], width


def _before_picture(shape: Shape) -> Shape:
    """The `Shape` of an argument with a row for each token of the text and then of the picture.

    `shape`: its shape, of which all but the first dimension counts.
    """

    def longer(config: Config, grid: Grid) -> tuple[int, ...]:
        found = shape(config, grid)
        assert found is not None
        return (grid.text + grid.cells, *found[1:])

    return longer


def _with_condition(config: Config, grid: Grid, tensors: Tensors) -> Tensor:
    """The noisy latents, (B, C, F, H, W), with zeros in the further channels for a first frame that is given."""
    # `pad` counts axes from the last one, so the eighth number adds channels, (B, C, F, H, W).
    noisy = tensors["noisy"]
    return pad(noisy, (0,) * 7 + (config["in_channels"] - noisy.shape[1],))


def _out_clip(config: Config, grid: Grid) -> tuple[int, ...]:
    return config["out_channels"], grid.frames, grid.height, grid.width


def _each_frame(name: str) -> Made:
    """The function that makes times for each frame, (B, F), from the argument `name`, a time for each sample."""
    return lambda config, grid, tensors: tensors[name][:, None].expand(-1, grid.frames)


def _pixart_sizes(config: Config, grid: Grid, tensors: Tensors) -> dict[str, Tensor | None]:
    return {"resolution": tensors.get("picture"), "aspect_ratio": tensors.get("aspect")}


def _if_large(*shape: int) -> Shape:
    """The `Shape` of an argument that PixArt-Alpha reads for large pictures alone: this shape, or None."""

    def found(config: Config, grid: Grid) -> tuple[int, ...] | None:
        is_read = config.get("use_additional_conditions")
        return shape if is_read or (is_read is None and config["sample_size"] == 128) else None

    return found


def _turns_of_sound(config: Config, grid: Grid, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """(cosines, sines): rotary tables of angle 0, (tokens of the sound + 1, half of a head), for counting alone."""
    # Rotary tables of angle 0: their values do not matter here, only their size.
    shape = (grid.frames + 1, config["attention_head_dim"] // 2)
    return torch.ones(shape), torch.zeros(shape)


def _packed(**more: Any) -> ClassCall:
    """The `ClassCall` for latents as tokens of 16 x 16 pixels, with positions as arguments; `more`: other fields."""
    made = {
        "img_ids": lambda config, grid, tensors: places(config, grid),
        "txt_ids": lambda config, grid, tensors: no_places(config, grid),
    }
    settings: dict[str, Any] = {"latents": tokens, "size": _SQUARE, "pixels": 16, "patch": 1, "made": made}
    return ClassCall(**settings | more)


def _picture(**more: Any) -> ClassCall:
    settings: dict[str, Any] = {"latents": picture, "size": _SQUARE}
    return ClassCall(**settings | more)


def _clip(width: int, height: int, length: int, **more: Any) -> ClassCall:
    """The `ClassCall` for clips whose latents have a fourth of the frames.

    `width`, `height`, `length`: the default size, in pixels and frames. `more`: other fields.
    """
    size = Clip(width=width, height=height, frames=length)
    settings: dict[str, Any] = {"latents": clip, "size": size, "frames": _FOURTHS}
    return ClassCall(**settings | more)


def _sound(length: int, **more: Any) -> ClassCall:
    settings: dict[str, Any] = {"latents": sound, "size": Clip(width=1, height=1, frames=length), "pixels": 0}
    return ClassCall(**settings | more)


CLASSES: Mapping[str, ClassCall] = {
    "AceStepTransformer1DModel": _sound(
        1500,  # a minute
        latents=lambda config, grid: (grid.frames, config["audio_acoustic_hidden_dim"]),
        tensors={
            **_TEXT,
            "context_latents": lambda config, grid: (
                grid.frames,
                config["in_channels"] - config["audio_acoustic_hidden_dim"],
            ),
            "timestep_r": always(),
        },
    ),
    "AllegroTransformer3DModel": _clip(1280, 720, 88, frames=lambda frames: -(-frames // 4)),
    "AnyFlowTransformer3DModel": _clip(
        832,
        480,
        81,
        latents=frames_first,
        tensors={**_TEXT, "goal": always()},
        made={"timestep": _each_frame("timestep"), "r_timestep": _each_frame("goal")},
    ),
    "AuraFlowTransformer2DModel": _picture(size=Clip(width=512, height=512), text=256),
    "BriaTransformer2DModel": _packed(
        text=128,
        tensors={**_TEXT, "pooled_projections": vector("pooled_projection_dim"), "guidance": if_set("guidance_embeds")},
    ),
    "ChromaTransformer2DModel": _packed(
        tensors={**_TEXT, "attention_mask": lambda config, grid: (grid.text + grid.cells,)}
    ),
    "ChronoEditTransformer3DModel": _clip(832, 480, 81),
    "CogVideoXTransformer3DModel": _clip(720, 480, 49, latents=frames_first, text=226),
    "CogView3PlusTransformer2DModel": _picture(text=224, tensors={**_TEXT, **_SIZES}),
    "CogView4Transformer2DModel": _picture(text=1024, tensors={**_TEXT, **_SIZES}),
    "ConsisIDTransformer3DModel": _clip(720, 480, 49, latents=frames_first, text=226),
    "DiTTransformer2DModel": _picture(
        size=Clip(width=256, height=256), tensors={}, whole={"class_labels": always(), "timestep": always()}
    ),
    "ErnieImageTransformer2DModel": _picture(
        pixels=16, patch=1, tensors={"text_bth": text_states}, whole={"text_lens": always()}
    ),
    "Flux2Transformer2DModel": _packed(tensors={**_TEXT, "guidance": if_set("guidance_embeds")}),
    "Flux3Transformer2DModel": _packed(),
    "FluxTransformer2DModel": _packed(
        tensors={**_TEXT, "pooled_projections": vector("pooled_projection_dim"), "guidance": if_set("guidance_embeds")}
    ),
    "GlmImageTransformer2DModel": _picture(
        text=2048,
        tensors={**_TEXT, "target_size": always(2), "crop_coords": always(2)},
        whole=dict.fromkeys(("prior_token_id", "prior_token_drop"), lambda config, grid: (grid.cells // 4,)),
        made={"prior_token_drop": lambda config, grid, tensors: tensors["prior_token_drop"].bool()},
    ),
    "HunyuanImageTransformer2DModel": _picture(
        size=Clip(width=2048, height=2048), pixels=32, patch=1, text=1000, masks=("encoder_attention_mask",)
    ),
    "HunyuanVideoTransformer3DModel": _clip(
        1280,
        720,
        129,
        text=256,
        tensors={**_TEXT, "pooled_projections": vector("pooled_projection_dim"), "guidance": if_set("guidance_embeds")},
        masks=("encoder_attention_mask",),
    ),
    "Ideogram4Transformer2DModel": _packed(
        size=Clip(width=2048, height=2048),
        text=2048,
        latents=_before_picture(tokens),
        tensors={"encoder_hidden_states": _before_picture(text_states)},
        whole={
            "position_ids": _before_picture(always(0, 3)),
            "segment_ids": _before_picture(always(0)),
            "indicator": _before_picture(always(0)),
        },
        made={},
    ),
    "JoyImageEditTransformer3DModel": _clip(
        1024, 1024, 2, frames=int, text=2048
    ),  # the given picture and the drawn one
    "Kandinsky5Transformer3DModel": _clip(
        768,
        512,
        121,
        latents=_kandinsky,
        tensors={**_TEXT, "pooled_projections": vector("in_text_dim2")},
        made={
            "visual_rope_pos": _kandinsky_places,
            "text_rope_pos": lambda config, grid, tensors: torch.arange(grid.text),
        },
    ),
    "Krea2Transformer2DModel": _packed(
        tensors={"encoder_hidden_states": _layers_of_text},
        made={"position_ids": lambda config, grid, tensors: torch.cat([no_places(config, grid), places(config, grid)])},
    ),
    "LTXVideoTransformer3DModel": _clip(
        704,
        512,
        161,
        latents=tokens,
        pixels=32,
        patch=1,
        frames=partial(latent_frames, 8),
        text=128,
        masks=("encoder_attention_mask",),
        made={
            "num_frames": lambda config, grid, tensors: grid.frames,
            "height": lambda config, grid, tensors: grid.height,
            "width": lambda config, grid, tensors: grid.width,
        },
    ),
    "LongCatAudioDiTTransformer": _sound(
        351,  # half a minute
        latents=lambda config, grid: (grid.frames, config["latent_dim"]),
        tensors={**_TEXT, "latent_cond": lambda config, grid: (grid.frames, config["latent_dim"])},
        masks=("encoder_attention_mask",),
    ),
    "LongCatImageTransformer2DModel": _packed(),
    "Lumina2Transformer2DModel": _picture(text=256, masks=("encoder_attention_mask",)),
    "MiniMaxH3Transformer3DModel": _clip(
        1344,
        768,
        124,
        latents=minimax_h3.rows,
        pixels=32,
        patch=1,
        frames=minimax_h3.latent_frames,
        tensors={**_TEXT, "audio_hidden_states": minimax_h3.rows_of_sound},
        made=minimax_h3.MADE,
    ),
    "MochiTransformer3DModel": _clip(
        848, 480, 19, frames=partial(latent_frames, 6), text=256, masks=("encoder_attention_mask",)
    ),
    "MotifVideoTransformer3DModel": _clip(
        1280,
        736,
        121,
        latents=_out_clip,
        noisy="noisy",
        masks=("encoder_attention_mask",),
        made={"hidden_states": _with_condition},
    ),
    "OvisImageTransformer2DModel": _packed(text=256),
    "PRXTransformer2DModel": _picture(size=Clip(width=512, height=512), text=256, masks=("attention_mask",)),
    "PixArtTransformer2DModel": _picture(
        text=120,
        tensors={**_TEXT, "picture": _if_large(2), "aspect": _if_large(1)},
        masks=("encoder_attention_mask",),
        made={"added_cond_kwargs": _pixart_sizes},
    ),
    "PriorTransformer": ClassCall(
        latents=vector("embedding_dim"),
        size=Clip(width=1, height=1),
        pixels=0,
        tensors={
            "proj_embedding": vector("embedding_dim"),
            "encoder_hidden_states": lambda config, grid: (config["num_embeddings"], config["embedding_dim"]),
        },
    ),
    "QwenImageTransformer2DModel": _packed(
        masks=("encoder_hidden_states_mask",),
        made={"img_shapes": lambda config, grid, tensors: [(1, grid.height, grid.width)]},
    ),
    "SD3Transformer2DModel": _picture(
        text=333, tensors={**_TEXT, "pooled_projections": vector("pooled_projection_dim")}
    ),
    "SanaTransformer2DModel": _picture(pixels=32, patch=1, text=300, masks=("encoder_attention_mask",)),
    "SanaVideoTransformer3DModel": _clip(832, 480, 81, text=300, masks=("encoder_attention_mask",)),
    "SkyReelsV2Transformer3DModel": _clip(960, 544, 97),
    "StableAudioDiTModel": _sound(
        1024,
        text=128,
        tensors={
            **_TEXT,
            "global_hidden_states": lambda config, grid: (1, config["global_states_input_dim"]),
        },
        made={"rotary_embedding": _turns_of_sound},
    ),
    "WanTransformer3DModel": _clip(832, 480, 81),
    "WanVACETransformer3DModel": _clip(
        832,
        480,
        81,
        tensors={
            **_TEXT,
            "control_hidden_states": lambda config, grid: (
                config["vace_in_channels"],
                grid.frames,
                grid.height,
                grid.width,
            ),
        },
        made={"control_hidden_states_scale": lambda config, grid, tensors: torch.ones(len(config["vace_layers"]))},
    ),
    "ZImageTransformer2DModel": _picture(
        noisy="noisy",
        times="timesteps",
        tensors={"text_states": text_states},
        whole={"input_mask": lambda config, grid: (grid.text,)},
        predict=predict_z_image,
    ),
}
"""The call of each transformer class of diffusers, by the name of the class."""
