"""FLUX.2 [klein] (Black Forest Labs, 2026, https://bfl.ai/blog/flux2-klein-towards-interactive-visual-intelligence)."""

from functools import partial

from diffusionpipe.models.base.family import Prompt, question
from diffusionpipe.models.families.described import family
from diffusionpipe.models.families.flux2_forward import flux2

FAMILY = family(
    flux2(
        kind="Qwen3ForCausalLM",
        prompt=Prompt(length=512, side=None, chat=partial(question, is_thinking=False)),
        layers=(9, 18, 27),
        guidance=4.0,
    )
)
