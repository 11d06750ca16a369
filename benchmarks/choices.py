"""What every choice of the planner must be: no slower than a layout beside it that was simulated, near-ties apart."""

from diffusionpipe.planner.choosing.chosen import Choice
from diffusionpipe.planner.choosing.near_ties import NEAR_TIE


def checked(choice: Choice) -> Choice:
    """The choice; an assertion fails if one of its finalists fits and is faster by more than a near-tie."""
    fitting = [proposal.step for _, proposal in choice.search.finalists if proposal.overflow <= 0]
    fastest = min([choice.fastest.step, *fitting])
    assert choice.step <= fastest * (1 + NEAR_TIE), f"{choice.sizes} takes {choice.step} s, another layout {fastest} s"
    return choice
