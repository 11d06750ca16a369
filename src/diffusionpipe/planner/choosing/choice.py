"""Chooses a plan and explains it, or says why there is none and which changes help."""

from dataclasses import replace

from diffusionpipe.errors import ConfigError
from diffusionpipe.planner.choosing.advice import nothing_fits, recomputed
from diffusionpipe.planner.choosing.asking import IN_WORDS, Asking
from diffusionpipe.planner.choosing.chosen import Choice
from diffusionpipe.planner.choosing.explain import Comparison
from diffusionpipe.planner.choosing.fewer import as_remedy, fewer_devices, least_of, remark_on
from diffusionpipe.planner.choosing.leaner import is_full, leanest, warning
from diffusionpipe.planner.choosing.near_ties import NEAR_TIE
from diffusionpipe.planner.choosing.recomputation import best_way
from diffusionpipe.planner.pricing.given import check_given
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.search import uncuttable


def choose(
    setting: Setting, *, fill: bool | None = None, asking: Asking = IN_WORDS, may_recompute: bool = False
) -> Choice:
    """The fastest plan that fits in memory and keeps to `setting.given`, or a near-tie of it (see `near_ties`).

    `fill` says whether frozen work of the next batch runs in the bubbles of this one; None tries both. A model without
    frozen layers has nothing to fill with. Whether the frozen part is kept in host memory is the planner's choice too,
    unless it is given. With `may_recompute` it also chooses between recomputing all layers and none. `asking` words
    the ways to other plans in the error.

    Raises:
        ConfigError: the sizes do not fit each other, or nothing fits in memory; it says by how much, and which changes
            help.
    """
    check_given(
        setting.given,
        batch=setting.workload.batch,
        num_ranks=setting.cluster.num_ranks,
        num_backbones=len(setting.graph.backbones),
    )
    best = best_way(setting, fill=fill, may_recompute=may_recompute)
    if best is not None:
        return best
    is_cut = least_of(setting) < float("inf")
    if may_recompute:
        setting = recomputed(setting) or setting
    fewer = fewer_devices(setting, fill=fill)
    problem = nothing_fits(setting) if is_cut else uncuttable(setting)
    raise ConfigError("\n".join([problem, *([as_remedy(fewer, setting, asking)] if fewer else [])]))


def with_alternatives(
    shown: Comparison, choice: Choice, *, fill: bool | None = None, asking: Asking = IN_WORDS
) -> Comparison:
    """The comparison with remarks on a faster plan on fewer devices, and on a leaner plan if a device is almost full.

    `fill`: whether encoders run in bubbles, None tries both. `asking` words the ways to these plans. It takes as long
    as making some more plans.
    """
    setting = choice.setting.whole or choice.setting
    fewer = fewer_devices(setting, fill=fill, limit=choice.step / (1 + NEAR_TIE))
    remarks = [remark_on(fewer, setting, choice.step, asking)] if fewer else []
    remarks += [warning(choice, leanest(choice, fill=fill), asking)] if is_full(choice) else []
    return replace(shown, fewer=(fewer.choice.row,) if fewer else (), remarks=(*shown.remarks, *remarks))
