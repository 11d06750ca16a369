"""Lower learning rates for stages whose forwards read old weights, until they fade to the usual ones.

    rate[k] / max(1, staleness)^(1 - min(1, k / K))        k: step, K: steps of the fading

Yang et al., "PipeMare: Asynchronous Pipeline Parallel DNN Training", MLSys 2021, section 3.1 (technique 1),
https://arxiv.org/abs/1910.05124. There the staleness follows from stage and micro-batches; here it is the mean of those
that the window's forwards have.
"""

from collections.abc import Mapping

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Op, Schedule
from diffusionpipe.ir.versions import staleness_of


def factor_at(step: int, staleness: float, num_steps: int) -> float:
    """The factor of the learning rate of update `step`, counted from 0; 1 from update `num_steps` on.

    `staleness`: the mean age in steps of the weights that a stage's forwards read. `num_steps`: steps of the fading.

    >>> [factor_at(step, 4.0, 4) for step in (0, 2, 4)]
    [0.25, 0.5, 1.0]
    """
    factor: float = max(1.0, staleness) ** (min(1.0, step / num_steps) - 1.0)
    return factor


def fading_staleness(by_staleness: int | None, window: Schedule) -> Mapping[int, float]:
    """The mean age in steps of the weights that each block's forwards read in a window, by block.

    {} where `by_staleness` is None: the learning rates do not depend on the age then.

    Raises:
        ConfigError: the rates depend on it, but no stage reads weights that are older than one step in the mean.
    """
    if by_staleness is None:
        return {}
    table = staleness_of(window)
    found = {
        window.placement.stages[stage].weights: sum(row) / len(row) for (stage, op), row in table.items() if op is Op.F
    }
    if max(found.values(), default=0.0) <= 1.0:
        raise ConfigError(
            "learning_rate.by_staleness changes nothing here: on average no stage reads weights that are more than one "
            "step old; remove it, or use fewer micro-batches, which make weights older"
        )
    return found
