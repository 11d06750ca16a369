"""Makes the row of a layout in a table: of a simulated plan, of an estimate, or of another system's layout.

A step is an iteration and the optimizer's update after it, ours and everyone's: a rank updates the parameters that it
holds, which are all of them in data parallelism, an equal part with ZeRO-3, its stages' parameters in a pipeline.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

from diffusionpipe.holding.memory import MemoryUse
from diffusionpipe.ir import Sharded
from diffusionpipe.ir.words import bytes_in_words
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.stage_costs import time_to_update
from diffusionpipe.planner.rivals.baselines import Baseline
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.naming import name_of, sizes_of
from diffusionpipe.planner.search.pool import Judged
from diffusionpipe.planner.search.proposal import Proposal
from diffusionpipe.units import Bytes, Seconds

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One candidate in a table of plans, with its times and its memory."""

    name: str
    """The name of the layout's schedule, or of another system."""
    sizes: str
    """The sizes in words, e.g. "2 stages, 4 micro-batches"."""
    num_stages: int
    """Stages of its pipeline; 1 for data parallelism."""
    step: Seconds
    """Time of an iteration and the update after it, in seconds."""
    update: Seconds
    """Seconds of the update of the rank with most to update; 0 if the profile does not have it."""
    samples_per_second: float
    bubble: float
    """Idle part of all devices' time."""
    exposed: Seconds
    """Time in which only encoders run."""
    memory: Bytes
    """Memory of the fullest device, estimated where `use` is None."""
    use: MemoryUse | None
    """The items of the fullest device's memory; None where it was only estimated."""
    overflow: Bytes
    """Bytes beyond the device's memory; 0 or less: the plan fits."""
    is_copy: bool = False
    """Whether it is another system's layout with the whole model on every device."""

    @property
    def fits(self) -> bool:
        """Whether every device has room for the layout."""
        return self.overflow <= 0


def sizes_in(setting: Setting, candidate: Candidate) -> str:
    """The sizes of a candidate in words, and a remark where the encoders' weights are in host memory."""
    return sizes_of(candidate) + setting.workload.encoders.words


def row_of(setting: Setting, candidate: Candidate, proposal: Proposal) -> Row:
    """The row in a table of plans of a layout that was simulated in full."""
    use = max(proposal.memory, key=lambda memory: memory.total)
    return Row(
        name=name_of(candidate),
        sizes=sizes_in(setting, candidate),
        num_stages=max(candidate.stages),
        step=proposal.step,
        update=proposal.update,
        samples_per_second=setting.workload.batch / proposal.step,
        bubble=proposal.timeline.bubble,
        exposed=proposal.exposed,
        memory=use.total,
        use=use,
        overflow=proposal.overflow,
    )


def estimated_row(judge: Judge, one: Judged, is_filled: bool) -> Row:
    """The row in a table of plans of a candidate that was only estimated; `is_filled`: with frozen work in bubbles."""
    estimate, update = one.estimate, update_of(judge, one.candidate)
    return Row(
        name=name_of(one.candidate),
        sizes=sizes_in(judge.setting, one.candidate),
        num_stages=max(one.candidate.stages),
        step=one.score + update,
        update=update,
        samples_per_second=judge.setting.workload.batch / (one.score + update),
        bubble=max(0.0, 1 - (estimate.busy + estimate.frozen) / one.score),
        exposed=max(0.0, one.score - estimate.pipeline) if is_filled else estimate.frozen,
        memory=smallest_device(judge.setting) + estimate.overflow,
        use=None,
        overflow=estimate.overflow,
    )


def baseline_row(judge: Judge, one: Baseline) -> Row:
    """The row in a table of plans of another system's layout, whose times are estimated."""
    setting = judge.setting
    if one.candidate is not None:
        update = update_of(judge, one.candidate)
    else:
        update = time_to_update(one.updated, setting.profile, setting.cluster.num_ranks)
    return Row(
        name=one.name,
        sizes=one.sizes,
        num_stages=len(one.candidate.starts) if one.candidate else 1,
        step=one.step + update,
        update=update,
        samples_per_second=setting.workload.batch / (one.step + update),
        bubble=max(0.0, 1 - one.busy / one.step),
        exposed=one.frozen,
        memory=smallest_device(setting) + one.overflow,
        use=None,
        overflow=one.overflow,
        is_copy=one.is_copy,
    )


def update_of(judge: Judge, candidate: Candidate) -> Seconds:
    """The seconds of the update on the worker with most to update; 0 if the profile has no time for it."""
    if not judge.setting.profile.update:
        return 0.0
    starts, trained = (*candidate.starts, judge.tables.num_layers), judge.tables.table.trained
    blocks = [trained[stop] - trained[start] for start, stop in pairwise(starts)]
    held: dict[int, set[int]] = defaultdict(set)
    for stage in candidate.layout(judge.setting).generated().placement.stages:
        held[stage.worker].add(stage.weights)
    most: float = max(sum(blocks[block] for block in own) for own in held.values())
    # Copies in parts update an equal part each.
    most /= candidate.arrangement.data_parallel if candidate.sharded is not Sharded.NONE else 1
    return time_to_update(most, judge.setting.profile, judge.setting.cluster.num_ranks)


def smallest_device(setting: Setting) -> Bytes:
    """The memory of the device with the least memory, to which an estimate's overflow is added."""
    return min(device.memory for device in setting.cluster.devices)


def in_host_memory(setting: Setting) -> str:
    """Words that say how many bytes of encoders and optimizer states are kept in host memory; "" if none are."""
    ledger, words = setting.ledger, ""
    encoders = ledger.resting(setting.graph.frozen_layers).host
    states = ledger.held(list(ledger.trained)).hosted
    if encoders:
        words += f"; host memory of each machine: encoders {bytes_in_words(encoders)}"
    if states:
        words += f"; host memory of each copy of the model: states of the optimizer {bytes_in_words(states)}"
    return words


def unit_of(num_bytes: Bytes) -> tuple[str, Bytes]:
    """(name, bytes) of the unit in which an amount of memory is written: GiB from 1 GiB on, else MiB."""
    return ("GiB", GIB) if num_bytes >= GIB else ("MiB", 2**20)


def parts_of(use: MemoryUse, unit: Bytes) -> dict[str, float]:
    """Name of each item of a device's memory -> its amount in the unit, with two decimals, largest first.

    The amounts add up to the rounded total. Items that would be 0.00 are left out. `unit`: bytes, as in `unit_of`.
    """
    cents = {name.replace("_", " "): size / unit * 100 for name, size in use.items().items()}
    whole = {name: int(size) for name, size in cents.items()}
    # Parts are rounded down; the largest remainders get the hundredths that are missing in the total.
    missing = round(use.total / unit * 100) - sum(whole.values())
    for name in sorted(cents, key=lambda name: whole[name] - cents[name])[:missing]:
        whole[name] += 1
    return {name: size / 100 for name, size in sorted(whole.items(), key=lambda item: -item[1]) if size}
