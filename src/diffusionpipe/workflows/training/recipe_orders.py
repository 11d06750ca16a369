"""The schedule that a recipe takes from a file of orders."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffusionpipe.ir import Schedule
    from diffusionpipe.trainer.recipe import PipelineSection


def orders_of(pipeline: "PipelineSection", num_ranks: int) -> "Schedule | None":
    """The schedule in the file `pipeline.orders` for this number of ranks; None if the recipe names a schedule instead.

    Raises:
        ConfigError: the file cannot be read, has other sizes, or no model can train with it.
        ScheduleError: its orders are illegal.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.schedules.files.order_file import read_orders, untrainable
    from diffusionpipe.trainer.recipe import replicas_of_stages

    if pipeline.orders is None:
        return None
    path, replicas = Path(pipeline.orders), replicas_of_stages(pipeline, num_ranks)
    names = ("the number of stages on these ranks", "pipeline.microbatches")
    schedule = read_orders(path, len(replicas), pipeline.sizes.microbatches, names=names)
    if problems := list(untrainable(schedule)):
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems))
    return schedule
