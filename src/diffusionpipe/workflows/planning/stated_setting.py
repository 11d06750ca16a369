"""A training that options state, as the planner asks about it."""

from diffusionpipe.costs import Cluster, Profile
from diffusionpipe.costs.graph import is_kept_narrow
from diffusionpipe.errors import ConfigError
from diffusionpipe.holding import Workload, plain_states
from diffusionpipe.holding.state import in_bfloat16, widened_bytes
from diffusionpipe.holding.workload import has_plain_states, state_of_optimizer
from diffusionpipe.planner.pricing.setting import Setting

WIDTHS = {"float32": 4, "bfloat16": 2}
"""Type in which gradients of weights in bfloat16 can be summed -> bytes of a number."""


def check_gradients(gradients: str | None, *, rounds: bool) -> None:
    """Check the type that the option --gradients names; None, without the option, passes.

    `rounds`: whether trained weights are kept in bfloat16; else the option has no effect.

    Raises:
        ConfigError: it is unknown or without effect.
    """
    if gradients is None:
        return
    if gradients not in WIDTHS:
        raise ConfigError(f"--gradients {gradients}: use float32 or bfloat16, or leave it out")
    if not rounds:
        raise ConfigError(
            f"--gradients {gradients}: weights are float32, and their gradients too; give --weights bfloat16, or leave "
            "it out"
        )


def stated_setting(
    profile: Profile,
    cluster: Cluster,
    batch: int,
    *,
    checkpoint: tuple[str, ...],
    has_ema: bool,
    optimizer: str,
    gradients: str | None = None,
) -> Setting:
    """The planner's setting for a training that the command line states.

    Parameters are as wide as the profile has them. `optimizer` is the name of a class of torch.optim, or the path of
    any other. `gradients`: the type in which gradients of weights in bfloat16 are summed, a key of `WIDTHS`; None:
    float32.

    Raises:
        ConfigError: there is no such optimizer, or its states cannot be counted; `gradients` without such weights.
    """
    rounds = profile.precision == "bfloat16" and any(map(is_kept_narrow, profile.graph.parameters))
    check_gradients(gradients, rounds=rounds)
    width = 8 if profile.precision == "float64" else 4
    is_plain, once = has_plain_states(optimizer), 0
    numbers = state_of_optimizer(optimizer) if is_plain else 0
    states = plain_states(parameter=width, gradient=width, optimizer=width * numbers, ema=width if has_ema else 0)
    if not is_plain:
        # Imported only here: torch takes seconds, and other optimizers need no trial.
        from diffusionpipe.trainer.model.optimizer_states import stated_states, with_optimizer

        state, once = stated_states(optimizer, {}, profile.graph, is_wide=width == 8)
        states = with_optimizer(state, states)
    update = 0
    if rounds:
        summed = WIDTHS[gradients or "float32"]
        states = in_bfloat16(states, gradient=summed, has_errors=False)
        update = widened_bytes(profile.graph.parameters, gradient=summed)
    workload = Workload(batch=batch, states=states, once=once, update=update, checkpointed=checkpoint)
    return Setting(profile=profile, cluster=cluster, workload=workload)
