"""Makes settings whose copies divide the states of the optimizer, if these are worth a search."""

from collections.abc import Iterator
from dataclasses import replace

from diffusionpipe.ir import Sharded
from diffusionpipe.planner.pricing.setting import Setting

WORTH = 64
"""States in parts are searched if they save more than 1 / 64 of the smallest device's memory. More would cost searches,
less would lose time even where memory is ample, because each copy updates its part alone."""


def owned(setting: Setting, copies: int) -> Setting:
    """The setting whose layouts all have `copies` data-parallel copies, which hold the optimizer's states in parts."""
    given = replace(setting.given, data_parallel=copies, sharded=Sharded.OPTIMIZER)
    return replace(setting, given=given, owners=copies, whole=setting.whole or setting)


def settings_with_owners(setting: Setting) -> Iterator[Setting]:
    """The setting with the optimizer's states in parts over each possible number of copies, most copies first.

    If states in parts are not given, numbers that save less than a 64th of the smallest device's memory are left out.
    Nothing if another way of sharding is given.
    """
    given, ranks = setting.given, setting.cluster.num_ranks
    if given.sharded not in (None, Sharded.OPTIMIZER):
        return
    held = setting.table.held(0, len(setting.table.names))
    smallest = min(device.memory for device in setting.cluster.devices)
    for copies in range(ranks, 1, -1):
        if ranks % copies or not given.allows(units=ranks // copies, data_parallel=copies):
            continue
        saved = held.on_device - held.in_parts(copies).on_device
        if given.sharded is not None or WORTH * saved > smallest:
            yield owned(setting, copies)
