"""The time of the update, the work between two iterations: clipping, the optimizer's step, the average."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from diffusionpipe.costs import ModelGraph
from diffusionpipe.profiler.clock import Clock, middle
from diffusionpipe.profiler.passes import Agree, alone
from diffusionpipe.units import Bytes, Seconds

LIMIT: Bytes = 2**28
"""The most bytes of the parameters that are updated to measure the time; more take longer in proportion."""

CACHES: Bytes = 2**26
"""The bytes that are written before an update, so that parameters are not in a CPU's caches, as after an iteration."""

Update = Callable[[], object]
MakeUpdate = Callable[[Mapping[str, nn.Parameter]], Update]
"""A function (parameters with gradients, by canonical name) -> a function that updates them all once."""


def time_update(
    model: ModelGraph, make_update: MakeUpdate, device: torch.device, *, repeats: int = 5, agree: Agree = alone
) -> Seconds:
    """The seconds that an update takes for each element of the trained parameters; 0 without trained parameters.

    It is measured on parameters of the model's shapes, for large models on a part of them. `make_update`: makes the
    function that updates them. `agree` keeps ranks that measure at the same time in step.
    """
    parameters: dict[str, nn.Parameter] = {}
    held: Bytes = 0
    for spec in model.parameters:
        if spec.is_trainable and (not parameters or held + spec.num_bytes <= LIMIT):  # at least one, however large
            dtype = getattr(torch, spec.dtype)
            parameters[spec.name] = nn.Parameter(torch.full(spec.shape, 0.01, dtype=dtype, device=device))
            parameters[spec.name].grad = torch.full(spec.shape, 0.01, dtype=dtype, device=device)
            held += spec.num_bytes
    if not parameters:
        return 0.0
    update, clock = make_update(parameters), Clock(device)
    update()  # makes the optimizer's state
    elsewhere = torch.ones(CACHES // 4 if device.type == "cpu" else 0)
    times = []
    for _ in range(repeats):
        agree(0.0)
        elsewhere.neg_()  # pushes the parameters out of the processor's caches
        times.append(clock.time(update)[1])
    return agree(middle(times)) / sum(parameter.numel() for parameter in parameters.values())
