"""[data.patches]: training on patches of pictures."""

from diffusionpipe.trainer.recipe.section import ProperFraction, Section


class PatchesSection(Section):
    """[data.patches]: training on patches of pictures."""

    share_whole: ProperFraction = 0.5
    """The share of steps on whole pictures; the others have patches of a half of their side, or also of a quarter where
    the model has no autoencoder."""
