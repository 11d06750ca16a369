"""[checkpoint]: when states are saved, and how many are kept."""

from diffusionpipe.trainer.recipe.section import Auto, Count, Maybe, Section


class CheckpointSection(Section):
    """[checkpoint]: saved states; one is always saved at the end."""

    every: Maybe[Count] = 1000
    """Steps between checkpoints; the run also saves one at the end."""
    keep: Count = 3
    """Number of newest checkpoints to keep; an older one also stays until the newest has given a finite loss."""
    asynchronous: Auto[bool] = None
    """Whether training continues while a checkpoint is written from a copy in host memory; `"auto"`: if every machine
    has memory for it."""
    adapters: bool = False
    """Whether the adapters of each checkpoint are also exported, to the run folder's `adapters/`, in `lora.formats`.
    They stay when the checkpoint goes."""
