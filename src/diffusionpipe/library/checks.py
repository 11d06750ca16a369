"""Whether a plan is one of this model, and can be run as it is."""

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Plan
from diffusionpipe.library.models import Model


def check_plan(model: Model, plan: Plan) -> None:
    """Check that the plan is for the model's layers and that the library can run it.

    Raises:
        ConfigError: the plan is for other layers, or trains without a flush.
    """
    own = [layer.name for layer in model.graph.layers]
    planned = [name for block in plan.blocks for name in block]
    if sorted(own) != sorted(planned):
        of_plan, of_model = (sorted(set(a) - set(b)) for a, b in ((planned, own), (own, planned)))
        extra = [f"only the plan has {of_plan[0]}"] if of_plan else []
        extra += [f"only the model has {of_model[0]}"] if of_model else []
        raise ConfigError(
            f"the plan is for {len(planned)} layers and the model has {len(own)}: {', '.join(extra)}; profile and plan "
            "this model"
        )
    if plan.train.lead:
        raise ConfigError("the plan trains without a flush, which dp.run does not do; make a plan with dp.plan")


def check_ranks(plan: Plan, started: int) -> None:
    """Check that as many processes were started as the plan has ranks.

    Raises:
        ConfigError: there are more or fewer.
    """
    if started != plan.mesh.num_ranks:
        raise ConfigError(
            f"the plan is for {plan.mesh.num_ranks} ranks, but {started} were started; start "
            f"{plan.mesh.num_ranks} with torchrun, or plan for a cluster of {started} devices"
        )
