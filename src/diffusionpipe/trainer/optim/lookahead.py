"""Weights as they may be some steps later, if the optimizer continues in its present direction.

    w[t] = w[v] + (rate[v] + ... + rate[t - 1]) direction

Chen et al., "Efficient and Robust Parallel DNN Training through Model Parallelism on Multi-GPU Platform" (SpecTrain),
2018, https://arxiv.org/abs/1809.02839, for momentum; Guan et al., "XPipe: Efficient Pipeline Model Parallelism for
Multi-GPU DNN Training", 2019, https://arxiv.org/abs/1911.04610, for Adam. Here each step has its own rate.

    SGD with momentum   direction = -buffer
    Adam                direction = -m / (sqrt(v) + eps), with m and v without their bias
    AdamW               that, and -weight_decay w
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def predict(optimizer: torch.optim.Optimizer | None, rates: Sequence[Mapping[str, float]]) -> None:
    """Moves the parameters along the direction of the last step, as far as the steps to come would at their rates.

    `rates`: for each step to come, the learning rate of each group. Parameters that have made no step stay as they are.
    """
    for group in optimizer.param_groups if optimizer is not None else ():
        assert optimizer is not None
        # One direction for all steps to come, each with its own rate.
        distance = sum(rate[group["group"]] for rate in rates)
        sign = 1.0 if group.get("maximize") else -1.0
        for parameter in group["params"]:
            ahead = _step_of(group, optimizer.state.get(parameter, {}))
            if ahead is None:
                continue
            if group.get("decoupled_weight_decay"):
                parameter.mul_(1.0 - distance * group["weight_decay"])
            parameter.add_(ahead, alpha=sign * distance)


def _step_of(group: Mapping[str, Any], state: Mapping[str, Tensor | None]) -> Tensor | None:
    """The last step of a parameter, for a rate of 1 and towards higher losses; None if it has made no step.

    `group` and `state`: the parameter's group and state in torch's optimizer.
    """
    if "momentum" in group:
        return state.get("momentum_buffer")
    mean, square, step = state.get("exp_avg"), state.get("exp_avg_sq"), state.get("step")
    if mean is None or square is None or step is None:
        return None
    largest = state.get("max_exp_avg_sq")
    first, second = (1.0 - beta ** float(step) for beta in group["betas"])
    root = (square if largest is None else largest).sqrt().div_(second**0.5)
    return mean.div(first).div_(root.add_(group["eps"]))
