"""How long a step takes, simulated: 4 ranks with equal stages, a backward twice as long as a forward, free messages."""

from fractions import Fraction
from functools import cache, partial

from benchmarks.asynchronous.settings import STAGES, Setting
from diffusionpipe.costs import Costs
from diffusionpipe.ir import Schedule
from diffusionpipe.ir.versions import Versions
from diffusionpipe.planner.assembly.windows import overlap
from diffusionpipe.schedules import one_f_one_b
from diffusionpipe.simulator import simulate, uniform_costs
from diffusionpipe.simulator.steady import steady

FLUSHED_MICROBATCHES = 4


def _costs(schedule: Schedule, microbatches: int) -> Costs:
    """A batch takes the same work whatever its micro-batches are."""
    part = Fraction(1, microbatches)
    return uniform_costs(schedule, forward=part, backward=2 * part)  # type: ignore[arg-type]


def flushed_period() -> Fraction:
    """Of 1F1B with 4 micro-batches, in forwards of a whole batch through one stage."""
    schedule = one_f_one_b(STAGES, FLUSHED_MICROBATCHES)
    return Fraction(simulate(schedule, _costs(schedule, FLUSHED_MICROBATCHES)).makespan)


def period(setting: Setting) -> Fraction:
    """Of the setting's steps between flushes, in the same unit."""
    return flushed_period() if setting.versions is Versions.FLUSHED else _free_period(setting.microbatches)


@cache
def _free_period(microbatches: int) -> Fraction:
    return steady(overlap(STAGES, microbatches), partial(_costs, microbatches=microbatches)).period


def time_of(setting: Setting, made: int, steps: int) -> Fraction:
    """Until so many steps of a run are made, in steps of the flushed pipeline, of which its own run has `steps`."""
    free = period(setting) / flushed_period()
    steps = round(setting.length * steps)
    begin, end = setting.flushed_until * steps, setting.flushed_from * steps
    unflushed = Fraction(max(0.0, min(made, end) - begin))
    return (made - unflushed) + unflushed * free
