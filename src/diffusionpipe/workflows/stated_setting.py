"""A training that options state, as the planner asks about it."""

from diffusionpipe.costs import Cluster, Profile
from diffusionpipe.holding import Workload, plain_states
from diffusionpipe.holding.workload import state_of_optimizer
from diffusionpipe.planner.pricing.setting import Setting


def stated_setting(
    profile: Profile, cluster: Cluster, batch: int, *, checkpoint: tuple[str, ...], has_ema: bool, optimizer: str
) -> Setting:
    """A training that is stated on the command line; parameters are as wide as the profile has them."""
    width = 8 if profile.precision == "float64" else 4
    workload = Workload(
        batch=batch,
        states=plain_states(
            parameter=width,
            gradient=width,
            optimizer=width * state_of_optimizer(optimizer),
            ema=width if has_ema else 0,
        ),
        checkpointed=checkpoint,
    )
    return Setting(profile=profile, cluster=cluster, workload=workload)
