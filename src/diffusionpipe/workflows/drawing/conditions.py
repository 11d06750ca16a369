"""The pictures that steer a ControlNet in `diffusionpipe sample`: from --condition, or the run's validation."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffusionpipe.trainer.inference.conditions import SampleRequest


def steered(wish: "SampleRequest", run: Path, folder: Path, given: Sequence[Path], count: int) -> "SampleRequest":
    """The wish with a conditioning picture for each of its prompts, of which each is there `count` times.

    `folder`: the model's.

    Raises:
        ConfigError: there is no picture for each prompt, or the model is not a ControlNet.
        DataError: the run's validation data have no conditioning pictures.
    """
    from dataclasses import replace

    from diffusionpipe.errors import ConfigError
    from diffusionpipe.trainer.inference.conditions import is_steered, steering_pictures
    from diffusionpipe.workflows.drawing.run_recipe import validation_of

    if not is_steered(folder):
        if given:
            raise ConfigError(f"--condition: {folder} holds no ControlNet; leave it out")
        return wish
    num_prompts = len(wish.prompts) // count
    found, data = list(given) * num_prompts if len(given) == 1 else list(given), validation_of(run)
    if not found and data is not None:
        found = list(steering_pictures(data, num_prompts))
    if len(found) != num_prompts:
        raise ConfigError(
            f"a ControlNet draws from a conditioning picture for each prompt; there are {len(found)} for "
            f"{num_prompts}: give --condition once for each prompt, or once for all"
        )
    return replace(wish, conditions=tuple(path for path in found for _ in range(count)))
