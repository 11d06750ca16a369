"""diffusers' and transformers' classes from their configurations, with parameters on the meta device."""

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from diffusionpipe.errors import ModelError

_OF_TRANSFORMERS = {
    "CLIPTextModel": "CLIPTextConfig",
    "CLIPTextModelWithProjection": "CLIPTextConfig",
    "T5EncoderModel": "T5Config",
    "UMT5EncoderModel": "UMT5Config",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2_5_VLConfig",
    "Gemma2Model": "Gemma2Config",
    "Qwen3Model": "Qwen3Config",
    "Qwen3VLModel": "Qwen3VLConfig",
    "Qwen3ForCausalLM": "Qwen3Config",
    "Mistral3ForConditionalGeneration": "Mistral3Config",
    "LlamaModel": "LlamaConfig",
}
_EAGER = ("Gemma2Model",)
"""Classes whose scores are capped, which transformers computes with its own attention alone, as its default."""
_MAX_LAYERS = 512
_SWITCHES = {
    "addition_embed_type_num_heads": "addition_embed_type",
    "clip_sample_range": "clip_sample",
    "dynamic_thresholding_ratio": "thresholding",
    "sample_max_value": "thresholding",
}
"""Setting -> another setting; the first one is not read where the other one is off."""


def module_on_meta(kind: str, config: Mapping[str, Any], *, source: object) -> nn.Module:
    """A module of class `kind` (diffusers or transformers), made of its configuration, with meta parameters.

    Buffers are real: those that are not stored among the weights, such as position tables, are computed by the
    constructors. `source`: the origin of the configuration, which errors name.

    Raises ModelError if the configuration makes no such module.
    """
    import accelerate
    import diffusers
    import transformers

    _check_counts(config, source)
    is_of_transformers = kind in _OF_TRANSFORMERS
    check_nulls(getattr(transformers, _OF_TRANSFORMERS[kind]) if is_of_transformers else getattr(diffusers, kind),
                config, source=source)  # fmt: skip
    module: Any
    try:
        with accelerate.init_empty_weights(include_buffers=False), _EmptyOnMeta():
            if kind in _OF_TRANSFORMERS:
                settings = getattr(transformers, _OF_TRANSFORMERS[kind]).from_dict(dict(config))
                settings._attn_implementation = "eager" if kind in _EAGER else "sdpa"
                module = getattr(transformers, kind)(settings)
            else:
                module = getattr(diffusers, kind).from_config(dict(config))
        if kind in _OF_TRANSFORMERS:
            module.tie_weights()  # accelerate makes a new meta parameter at every place that a tied one stands
    except Exception as error:  # the libraries' constructors raise whatever a wrong value leads to
        reason = f"{type(error).__name__}: {error}"
        raise ModelError(f"{source} is not the configuration of a {kind} ({reason}); get the model again") from error
    assert isinstance(module, nn.Module)
    return module


def check_nulls(kind: type, config: Mapping[str, Any], *, source: object) -> None:
    """Check that a configuration has no nulls for settings that the class `kind` cannot do without.

    These are settings whose default is a value, and whose type does not allow None. A null in place of yes or no counts
    as no. `source`: the origin of the configuration, which errors name.

    Raises:
        ModelError: the message names all such settings.
    """
    parameters = signature(kind).parameters
    needed = {
        name: parameters[name].default
        for name, value in config.items()
        if value is None and name in parameters and _is_needed(parameters[name]) and _is_on(name, config)
    }
    if needed:
        listed = ", ".join(needed)
        defaults = ", ".join(f"{name} {default!r}" for name, default in needed.items())
        raise ModelError(
            f"{source}: {listed} {'are' if len(needed) > 1 else 'is'} null, but {kind.__name__} needs a value there; "
            f"get the model again, or set what it was trained with (the default is {defaults})"
        )


def _is_on(name: str, config: Mapping[str, Any]) -> bool:
    return name not in _SWITCHES or bool(config.get(_SWITCHES[name]))


def _is_needed(parameter: Parameter) -> bool:
    may_be_null = any(word in str(parameter.annotation) for word in ("None", "Optional"))
    is_value = isinstance(parameter.default, int | float | str | tuple | list) and not isinstance(
        parameter.default, bool
    )
    return is_value and (not may_be_null or parameter.name.endswith("_eps"))  # transformers' types are wide for these


def _check_counts(config: Mapping[str, Any], source: object) -> None:
    """Check that no number of layers is above `_MAX_LAYERS`, which would take minutes to construct.

    Raises ModelError if one is.
    """
    for key, value in config.items():
        counts = value if isinstance(value, list | tuple) else [value]
        if "layers" in key and any(isinstance(count, int) and count > _MAX_LAYERS for count in counts):
            raise ModelError(f"{source}: {key} is {str(value)[:40]}; at most {_MAX_LAYERS} layers are supported")


class _EmptyOnMeta(TorchFunctionMode):
    """Within its block, `torch.empty` without a device makes tensors on the meta device, which take no memory.

    accelerate moves every parameter to the meta device after it was made. For a T5-XXL that would ask the system for
    19 GB, one matrix after the other, which a process that keeps its freed memory never gives back.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """The result of the call `func`, for `torch.empty` without a device on the meta device."""
        options = dict(kwargs or {})
        if func is torch.empty:
            options["device"] = options.get("device") or "meta"
        return func(*args, **options)
