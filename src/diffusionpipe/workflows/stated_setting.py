"""A training that options state, as the planner asks about it."""

from diffusionpipe.costs import Cluster, Profile
from diffusionpipe.holding import Workload, plain_states
from diffusionpipe.holding.workload import has_plain_states, state_of_optimizer
from diffusionpipe.planner.pricing.setting import Setting


def stated_setting(
    profile: Profile, cluster: Cluster, batch: int, *, checkpoint: tuple[str, ...], has_ema: bool, optimizer: str
) -> Setting:
    """A training that is stated on the command line; parameters are as wide as the profile has them.

    `optimizer` is the name of a class of torch.optim, or the path of any other.

    Raises:
        ConfigError: there is no such optimizer, or its states cannot be counted.
    """
    width = 8 if profile.precision == "float64" else 4
    is_plain, once = has_plain_states(optimizer), 0
    numbers = state_of_optimizer(optimizer) if is_plain else 0
    states = plain_states(parameter=width, gradient=width, optimizer=width * numbers, ema=width if has_ema else 0)
    if not is_plain:
        # Imported only here: torch takes seconds, and other optimizers need no trial.
        from diffusionpipe.trainer.model.optimizer_states import stated_states, with_optimizer

        state, once = stated_states(optimizer, {}, profile.graph, is_wide=width == 8)
        states = with_optimizer(state, states)
    workload = Workload(batch=batch, states=states, once=once, checkpointed=checkpoint)
    return Setting(profile=profile, cluster=cluster, workload=workload)
