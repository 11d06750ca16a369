"""Whether a plan fits in the memory of the devices that are to train by it."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diffusionpipe.costs import Device, Profile
    from diffusionpipe.ir import Plan
    from diffusionpipe.trainer.model.members import RecipeModels
    from diffusionpipe.units import Bytes

_COUNTED_FOR = "a100-80"
"""The known GPU for which bytes are counted. Layers keep the same bytes on all GPUs; only their times differ."""
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def check_plan_memory(
    plan: "Plan", opened: "RecipeModels", devices: "Sequence[Device]", *, cache: "Path | None" = None
) -> None:
    """Refuse the recipe's plan file if it does not fit in the memory of the ranks' devices.

    The bytes of the layers come from a profile in the run's folder or beside the plan. Without one they are counted on
    GPUs, and kept in the folder `cache` where there is one. On CPUs only memory that is used all the time is then
    compared: counting takes up to 40 s, and the memory of a CPU rank is no more than its share of the machine's.

    Raises:
        ConfigError: it does not fit; says which rank lacks how much, and the remedy.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.holding.memory import Trait
    from diffusionpipe.planner.search.proposal import predict
    from diffusionpipe.workflows.training.expectation import setting_of_plan, unmeasured

    recipe, profile = opened.recipe, _profile_of(plan, opened, devices[0].name, cache)
    known = profile or unmeasured(opened.model, recipe.training.precision.value)
    setting = setting_of_plan(recipe, plan, known)
    uses = predict(setting, plan.train, plan.blocks, plan.mesh).memory
    needs = [use.total if profile else use.having(Trait.COUNTED) for use in uses]
    if text := lack_of(plan, needs, [device.memory for device in devices]):
        raise ConfigError(
            f"pipeline.plan: {recipe.pipeline.plan_file}: {text}. Plan for these devices (diffusionpipe plan RECIPE "
            '--cluster NAME --out FILE, or pipeline.plan = "auto"), recompute layers '
            "(training.activation_checkpointing), or start more ranks"
        )


def lack_of(plan: "Plan", needs: "Sequence[Bytes]", memories: "Sequence[Bytes]") -> str:
    """A sentence that the plan does not fit, with the rank that lacks most; "" if it fits.

    `needs`: the memory of each worker at its peak; `memories`: the memory of each rank's device.
    """
    from diffusionpipe.planner.choosing.rows import unit_of

    # Every copy of the pipeline puts a worker's load on a device of its own.
    of_rank = [needs[plan.mesh.place(rank)[1]] for rank in range(plan.mesh.num_ranks)]
    rank = max(range(len(of_rank)), key=lambda one: of_rank[one] - memories[one])
    need, memory = of_rank[rank], memories[rank]
    if need <= memory:
        return ""
    unit, size = unit_of(need)
    return (
        f"the plan does not fit: rank {rank} needs {need / size:.1f} {unit} at its peak, and its device has "
        f"{memory / size:.1f} {unit}, {(need - memory) / size:.1f} {unit} less"
    )


def _profile_of(plan: "Plan", opened: "RecipeModels", device: str, cache: "Path | None") -> "Profile | None":
    """The first profile of this model and device beside the run or the plan file that suffices to check its memory.

    Without one it is a counted profile, kept in the folder `cache`; on a CPU it is None.
    """
    from diffusionpipe.costs.devices import device_rates
    from diffusionpipe.costs.files import read_profile
    from diffusionpipe.profiler import analytic_profile
    from diffusionpipe.workflows.planning.profile_cache import cached_profile
    from diffusionpipe.workflows.planning.stated_model import counted_key

    recipe = opened.recipe
    precision = recipe.training.precision.value
    for folder in (recipe.run.folder, Path(str(recipe.pipeline.plan_file)).parent):
        path = folder / "profile.json"
        if not path.is_file():
            continue
        profile = read_profile(path)
        # Only schedules that split backwards ask what is kept between both parts.
        says_enough = profile.counts_kept or not plan.train.splits_backwards
        if says_enough and profile.graph == opened.model and (profile.precision, profile.device) == (precision, device):
            return profile
    if opened.device == "cpu":
        return None
    key = counted_key(opened.model, precision, _SIZES, device_rates(_COUNTED_FOR))
    count = partial(
        analytic_profile, opened.graph, opened.model, device=_COUNTED_FOR, precision=precision, batch_sizes=_SIZES
    )
    # The caller's devices have this name; the bytes are the same.
    return replace(cached_profile(key, count, cache)[0], device=device)
