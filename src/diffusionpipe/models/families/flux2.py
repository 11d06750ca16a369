"""FLUX.2 [dev] (Black Forest Labs, 2025, https://bfl.ai/blog/flux-2)."""

from typing import Any

from diffusionpipe.models.base.family import Prompt
from diffusionpipe.models.families.described import family
from diffusionpipe.models.families.flux2_forward import flux2


def _instructed(caption: str) -> dict[str, Any]:
    from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE

    # As diffusers does: the processor counts these marks and would look for pictures.
    said = {"system": SYSTEM_MESSAGE, "user": caption.replace("[IMG]", "")}
    messages = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in said.items()]
    return {"conversation": messages, "add_generation_prompt": False}


FAMILY = family(
    flux2(
        kind="Mistral3ForConditionalGeneration",
        prompt=Prompt(length=512, side=None, chat=_instructed, adds_marks=False),
        layers=(10, 20, 30),
        guidance=1.0,
        embedded_guidance=4.0,
    )
)
