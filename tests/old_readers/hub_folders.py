"""Tiny models in folders as the hub has them: written file by file, with the names that earlier versions gave."""

import json
from collections.abc import Mapping
from inspect import Parameter, signature
from pathlib import Path
from struct import pack
from typing import Any

import torch
from diffusers import ConfigMixin, DiffusionPipeline, SchedulerMixin
from safetensors.torch import save_file
from torch import Tensor, nn

Config = dict[str, Any]

_CLIP = ("CLIPTextModel", "CLIPTextModelWithProjection")
_LATER = ("dtype", "layer_types", "rope_parameters", "_name_or_path", "transformers_version", "architectures")
"""Keys of transformers 5 that earlier configurations do not have, or have otherwise."""
_MARKS = ("bos_token_id", "eos_token_id", "pad_token_id")
_PIECES = {"<pad>": 3, "</s>": 3, "<unk>": 2}
"""Kinds of pieces in a file of sentencepiece: 1 for text, 2 for the unknown, 3 for marks."""
_DIFFUSERS = "0.30.0"
_TRANSFORMERS = "4.44.2"


def write_folder(pipeline: DiffusionPipeline, folder: Path, *, is_fast: bool = False) -> Path:
    """Writes every file of a pipeline's folder; `is_fast`: its T5 has the file of the fast tokenizer, too."""
    index: Config = {"_class_name": type(pipeline).__name__, "_diffusers_version": _DIFFUSERS}
    for name, value in pipeline.config.items():
        part = getattr(pipeline, name, None)
        if name.startswith("_") or (isinstance(value, tuple) and value == (None, None)):
            continue
        if part is None or not (isinstance(value, tuple) and isinstance(value[0], str)):
            index |= {name: value} if value != _default(type(pipeline), name) else {}
            continue
        (folder / name).mkdir(parents=True)
        index[name] = _write_part(part, folder / name, is_fast)
    for name in ("safety_checker", "feature_extractor"):
        if name in signature(type(pipeline).__init__).parameters:
            index[name] = [None, None]
    _write(folder / "model_index.json", index)
    return folder


def _write_part(part: Any, folder: Path, is_fast: bool) -> list[str]:
    """Writes a component; returns its entry in model_index.json."""
    kind = type(part).__name__
    if isinstance(part, SchedulerMixin):
        _write(folder / "scheduler_config.json", _config_of_diffusers(part))
    elif isinstance(part, nn.Module) and isinstance(part, ConfigMixin):
        _write(folder / "config.json", _config_of_diffusers(part))
        _save(part.state_dict(), folder / "diffusion_pytorch_model.safetensors")
    elif isinstance(part, nn.Module):
        _write(folder / "config.json", _config_of_transformers(part.config.to_dict()) | {"architectures": [kind]})
        _save(_old_names(kind, part), folder / "model.safetensors")
        return ["transformers", kind]
    else:
        return ["transformers", _write_tokenizer(part, folder, is_fast)]
    return ["diffusers", kind]


def _config_of_diffusers(part: Any) -> Config:
    """The values that differ from the class's own; a version of that time knows no later ones."""
    own = {
        name: value
        for name, value in part.config.items()
        if not name.startswith("_") and value != _default(type(part), name)
    }
    return {"_class_name": type(part).__name__, "_diffusers_version": _DIFFUSERS, **own}


def _default(kind: type, name: str) -> object:
    parameter = signature(kind.__init__).parameters.get(name)
    return Parameter.empty if parameter is None else parameter.default


def _config_of_transformers(config: Mapping[str, Any]) -> Config:
    """A configuration as version 4 wrote it."""
    old = {name: value for name, value in config.items() if name not in _LATER}
    marks = {name: value for name, value in old.items() if name in _MARKS and isinstance(value, int)}
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size", 0))
    old |= {name: None for name, value in marks.items() if value >= size}  # a tiny vocabulary has no such marks
    old = {
        name: _config_of_transformers(value) if name.endswith("_config") and isinstance(value, dict) else value
        for name, value in old.items()
    }
    rope = dict(config.get("rope_parameters") or {})
    if rope:
        old["rope_theta"] = rope.pop("rope_theta", 10000.0)
        is_plain = rope == {"rope_type": "default"}
        old["rope_scaling"] = None if is_plain else {**rope, "type": "mrope" if "mrope_section" in rope else "default"}
    return old | {"torch_dtype": "float32", "transformers_version": _TRANSFORMERS}


def _old_names(kind: str, part: nn.Module) -> dict[str, Tensor]:
    """The tensors of a text encoder by the names that published files have."""
    stored = {_old_name(kind, name): tensor for name, tensor in part.state_dict().items()}
    if kind in _CLIP:
        length = part.config.max_position_embeddings
        stored["text_model.embeddings.position_ids"] = torch.arange(length)[None]
    if kind in ("T5EncoderModel", "UMT5EncoderModel"):
        del stored["encoder.embed_tokens.weight"]  # shared.weight is the same
    return stored


def _old_name(kind: str, name: str) -> str:
    if kind in _CLIP:
        return name if name.startswith(("text_model.", "text_projection.")) else f"text_model.{name}"
    if kind == "Qwen3Model":
        return f"model.{name}"
    if kind == "Qwen2_5_VLForConditionalGeneration":
        return name.replace("model.visual.", "visual.", 1).replace("model.language_model.", "model.", 1)
    if kind == "Mistral3ForConditionalGeneration":
        moved = name.replace("model.language_model.", "language_model.model.", 1)
        return moved.replace("lm_head.", "language_model.lm_head.", 1).removeprefix("model.")
    return name


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_tokenizer(tokenizer: Any, folder: Path, is_fast: bool) -> str:
    """Writes the files of a tokenizer; returns the class that model_index.json names."""
    kind = type(tokenizer).__name__
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    marks = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    added = {
        str(token["id"]): {name: value for name, value in token.items() if name != "id"}
        for token in content["added_tokens"]
    }
    further = [token["content"] for token in content["added_tokens"] if token["content"] not in marks.values()]
    config: Config = {"tokenizer_class": kind, "model_max_length": tokenizer.model_max_length, **marks}
    config |= {"added_tokens_decoder": added, "clean_up_tokenization_spaces": False}
    config |= {"padding_side": tokenizer.padding_side, "additional_special_tokens": further}
    if tokenizer.chat_template is not None:
        config["chat_template"] = tokenizer.chat_template
    if kind == "T5Tokenizer":
        config |= {"extra_ids": 0, "legacy": True}
        (folder / "spiece.model").write_bytes(_sentencepiece(content["model"]["vocab"]))
    if kind == "GemmaTokenizer":
        config |= {"add_bos_token": True, "add_eos_token": False}
        content["post_processor"] = _with_first_mark(tokenizer.bos_token, tokenizer.bos_token_id)
    if kind == "GemmaTokenizer" or (kind == "T5Tokenizer" and is_fast):
        kind = f"{kind}Fast"  # as the published index says
        (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    elif kind != "T5Tokenizer":
        config |= {"do_lower_case": True, "errors": "replace", "add_prefix_space": False}
        (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
        vocabulary = content["model"]["vocab"]
        _write(folder / "vocab.json", vocabulary)
    _write(folder / "tokenizer_config.json", config)
    _write(folder / "special_tokens_map.json", marks)
    return kind


def _with_first_mark(mark: str, number: int) -> Config:
    """The part of a tokenizer's file that puts a mark before every text."""
    first = [{"SpecialToken": {"id": mark, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [{"SpecialToken": {"id": mark, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}]
    marks = {mark: {"id": mark, "ids": [number], "tokens": [mark]}}
    return {"type": "TemplateProcessing", "single": first, "pair": first + pair, "special_tokens": marks}


def _sentencepiece(vocabulary: list[tuple[str, float]]) -> bytes:
    """A file of sentencepiece with these pieces and their scores, a unigram model.

    A message is a row of fields: number and kind in a byte, and the value.
    """
    unknown = [piece for piece, _ in vocabulary].index("<unk>")
    model = b"".join(
        _field(1, _field(1, piece.encode()) + b"\x15" + pack("<f", score) + _number(3, _PIECES.get(piece, 1)))
        for piece, score in vocabulary
    )
    marks = _number(40, unknown) + _number(41, 2**64 - 1) + _number(42, 1) + _number(43, 0)
    trainer = _number(3, 1) + _number(4, len(vocabulary)) + marks
    normalizer = _field(1, b"identity") + _number(3, 1) + _number(4, 1) + _number(5, 1)
    return model + _field(2, trainer) + _field(3, normalizer)


def _field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first, a mark on all but the last."""
    rest = []
    while value > 127:
        rest.append(value & 127 | 128)
        value >>= 7
    return bytes([*rest, value])
