"""The planners of other systems: each chooses a layout by its own formula, for the same profile, cluster and batch.

    PipeDream    a partition for one minibatch at a time, as if no pipeline were ever emptied
    DAPPLE       a latency around a pivot stage, with replicas of stages
    SPP          a bound of the makespan, with replicas of stages
    GPipe        stages of equal time and the clock of a pipeline
    BaPipe       a stage for each device: balanced by time, then moved for slow links and for memory
    Megatron-LM  the fewest stages that fit, the most chunks that divide the layers, and a formula for the micro-batch
    DDP, ZeRO-3  no planner: the fewest parts of the batch that fit in memory win, by a sum over layers

No formula counts encoders, so each is about the iteration without them. A planner looks at every size that cuts the
batch, and takes the one that its formula says is fastest of those that fit in memory, or, where none fits, the one that
lacks least. `simulated` says how long that layout really takes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from math import gcd, lcm

from diffusionpipe.ir import Sharded
from diffusionpipe.planner.assembly.partition import balanced_cuts
from diffusionpipe.planner.pricing.arrangement import Arrangement
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.storing import settings_in_storages
from diffusionpipe.planner.rivals.bapipe import bapipe_guesses
from diffusionpipe.planner.rivals.baselines import DDP, ZERO3, accumulations, places
from diffusionpipe.planner.rivals.copy_times import DDP_BUCKET, data_parallel_times, zero3_times
from diffusionpipe.planner.rivals.guesses import PlannerEstimate, overflow_of, times_of
from diffusionpipe.planner.rivals.megatron import megatron_guesses
from diffusionpipe.planner.rivals.pipedream import pipedream
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.constants import MAX_UNEQUAL_UNITS
from diffusionpipe.planner.search.dynamic_program import PartitionObjective
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.objectives import PivotLatency, PlanningBound
from diffusionpipe.units import Seconds

NUM_CHOICES = 3
"""The most layouts that are simulated, if buffers of messages make the first ones too large after all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Another system's planner: its formula in words, its source, and the layouts that it looks at."""

    title: str
    formula: str
    source: str
    guesses: Callable[[Judge], Iterator[PlannerEstimate]]
    """A function that yields every layout that the other system looks at, with its own estimate."""
    schedules: tuple[str, ...] = ()
    """The schedules that its formula does not tell apart; () if it has one schedule."""
    needs: str = "sizes that cut this batch into equal parts"
    """Words for the thing that is missing if the planner finds no layout."""


def choices_of(planner: Planner, setting: Setting) -> list[PlannerEstimate]:
    """The layouts that another system's planner would choose, best first, three at most; [] if it has none.

    If no layout fits, it is the one that lacks least memory. Encoders are in host memory only if they are heavy and
    nothing fits otherwise.
    """
    found = _choices(planner, setting)
    for moved in settings_in_storages(setting):
        if found and overflow_of(found[0]) <= 0:
            break
        other = _choices(planner, moved)
        if other and (not found or overflow_of(other[0]) < overflow_of(found[0])):
            found = other
    return found


def _choices(planner: Planner, setting: Setting) -> list[PlannerEstimate]:
    guesses = sorted(planner.guesses(Judge(setting=setting)), key=lambda one: one.seconds)
    fitting = list(islice((one for one in guesses if overflow_of(one) <= 0), NUM_CHOICES))
    return fitting or sorted(guesses, key=overflow_of)[:1]


def _pipedream(judge: Judge) -> Iterator[PlannerEstimate]:
    """PipeDream's layout for each number of minibatches in a batch that keeps its pipeline full: NOAM or more of them.

    It ends with the first layout that fits in memory.
    """
    setting, table = judge.setting, judge.tables.table
    cluster, batch = setting.cluster, setting.workload.batch
    node = cluster.nodes.count(0)
    levels = [(node, cluster.intra.bandwidth), (cluster.num_ranks // node, cluster.inter.bandwidth)]
    parameters = [table.held(layer, layer + 1).gradients for layer in range(len(table.names))]
    for count in (count for count in range(1, batch + 1) if batch % count == 0):
        size = batch // count
        seconds, stages = pipedream(
            table.sums(size, count).steps(),
            [round(size * forward) for forward, _ in table.crossing[1:]],
            parameters,
            [level for level in levels if level[0] > 1] or levels[:1],
        )
        replicas = [number for _, number in stages]
        groups = gcd(*replicas)
        counts = tuple(number // groups for number in replicas)
        # Fewer minibatches than NOAM, the number that keeps the pipeline full, do not follow its formula.
        if count < -(-cluster.num_ranks // replicas[0]):
            continue
        # The batch is raised to one that all replicas can share; `Rival.scale` takes that off the result.
        shared = groups * lcm(*counts)
        whole = replace(setting, workload=replace(setting.workload, batch=count * shared * -(-size // shared)))
        candidate = Candidate(
            arrangement=Arrangement(data_parallel=groups, units=sum(counts)),
            schedule="1f1b",
            microbatches=count,
            starts=tuple(first for first, _ in stages),
            replicas=counts,
        )
        guess = PlannerEstimate(
            judge=Judge(setting=whole) if whole != setting else judge, candidate=candidate, seconds=count * seconds
        )
        yield guess
        if overflow_of(guess) <= 0:
            return  # smaller minibatches take longer by the formula


def _by_objective(
    objective_of: Callable[[int], PartitionObjective], schedule: str
) -> Callable[[Judge], Iterator[PlannerEstimate]]:
    """A function that yields the best layout by an objective for each arrangement and number of micro-batches.

    `objective_of`: number of micro-batches -> the objective. `schedule`: the schedule of all layouts.
    """

    def guesses(judge: Judge) -> Iterator[PlannerEstimate]:
        for arrangement, count in places(judge, least=1):
            rows = judge.setting.workload.batch // (arrangement.data_parallel * count)
            most = arrangement.units if 2 < arrangement.units <= MAX_UNEQUAL_UNITS else 2
            replicas = tuple(number for number in range(1, most) if rows % number == 0)
            found = judge.questions.partitions(
                arrangement, count, objective_of(count), replicas=replicas, width=2, ignores_memory=True
            )
            for one in found[:1]:
                candidate = Candidate(
                    arrangement=arrangement,
                    schedule=schedule,
                    microbatches=count,
                    starts=one.starts,
                    replicas=one.replicas,
                )
                if candidate.divides(judge.setting.workload.batch):
                    yield PlannerEstimate(judge=judge, candidate=candidate, seconds=one.value)

    return guesses


def _gpipe(judge: Judge) -> Iterator[PlannerEstimate]:
    for arrangement, count in places(judge):
        sums = judge.tables.table.sums(judge.tables.unit_samples(arrangement, count), count)
        starts = balanced_cuts(sums.steps(), arrangement.units)
        candidate = Candidate(
            arrangement=arrangement, schedule="gpipe", microbatches=count, starts=starts, replicas=(1,) * len(starts)
        )
        stages, _ = times_of(judge, candidate)
        clock = (count + len(starts) - 1) * max(forward + backward for forward, backward, _ in stages)
        yield PlannerEstimate(judge=judge, candidate=candidate, seconds=clock + max(reduce for _, _, reduce in stages))


def _ddp(judge: Judge) -> Iterator[PlannerEstimate]:
    gradients = judge.tables.table.held(0, judge.tables.num_layers).gradients
    buckets = max(1, min(judge.tables.num_layers, -(-gradients // DDP_BUCKET)))
    for rows, count in accumulations(judge):
        passes, last = data_parallel_times(judge, rows / count, is_overlapped=True)
        yield _copies(judge, count, buckets, (count - 1) * passes + last)


def _zero3(judge: Judge) -> Iterator[PlannerEstimate]:
    for rows, count in accumulations(judge):
        guess = _copies(judge, count, judge.tables.num_layers, count * zero3_times(judge, rows / count)[1])
        yield replace(
            guess,
            candidate=replace(
                guess.candidate, sharded=Sharded.ALL if judge.setting.cluster.num_ranks > 1 else Sharded.NONE
            ),
        )


def _copies(judge: Judge, count: int, buckets: int, seconds: Seconds) -> PlannerEstimate:
    candidate = Candidate(
        arrangement=Arrangement(units=1, data_parallel=judge.setting.cluster.num_ranks),
        schedule="1f1b",
        microbatches=count,
        starts=(0,),
        replicas=(1,),
        buckets=buckets,
    )
    return PlannerEstimate(judge=judge, candidate=candidate, seconds=seconds)


PLANNERS = {
    "pipedream": Planner(
        title="PipeDream",
        formula="M times the longest of (F + B + 4 (r - 1) P / (bandwidth r)) / r of a stage with P parameter bytes "
        "and 2 O / (bandwidth r) of a link that O bytes cross; M is the least number that keeps all devices busy, "
        "because the pipeline is never emptied. Simulated with one update per batch",
        source="Narayanan et al., SOSP 2019, section 3.1, with the terms of the released optimizer",
        guesses=_pipedream,
    ),
    "dapple": Planner(
        title="DAPPLE",
        formula="Tw + Ts + Te around the pivot stage Q: Tw is the sum of F up to Q, Ts is (M - 1) (F + B) of Q, Te the "
        "longest way from there to the end of a gradient sum; links count as stages",
        source="Fan et al., PPoPP 2021, section 4",
        guesses=_by_objective(PivotLatency, "dapple-a"),
        schedules=("dapple-a", "dapple-b"),
    ),
    "spp": Planner(
        title="SPP",
        formula="(M + 4 S - 4) W + A, an upper bound: W is the longest F + B of a stage or transfer there and back on "
        "a link, A the longest gradient sum",
        source="Luo et al., INFOCOM 2022",
        guesses=_by_objective(PlanningBound, "1f1b"),
    ),
    "gpipe": Planner(
        title="GPipe",
        formula="(M + S - 1) max(F + B) + the longest gradient sum; stages of equal time",
        source="Huang et al., NeurIPS 2019; torchgpipe's balance",
        guesses=_gpipe,
    ),
    "bapipe": Planner(
        title="BaPipe",
        formula="(M + S - 1) max(F + B) + (S - 1) times the longest transfer there and back; a stage for each device, "
        "balanced by time, then with cuts at small tensors where a link is slower than a stage, then by memory",
        source="Zhao et al., 2020, arXiv 2012.12544, without its division of single layers",
        guesses=bapipe_guesses,
        needs="a layer for each device",
    ),
    "megatron": Planner(
        title="Megatron-LM",
        formula="(M + D - 1) (F + B) of the slowest of a pipeline's D devices; the fewest devices that fit, the most "
        "chunks that divide the layers, and of all micro-batches the one with the shortest time",
        source="Narayanan et al., SC 2021, section 3, with tensor size 1",
        guesses=megatron_guesses,
    ),
    "ddp": Planner(
        title=DDP,
        formula="M (F + B) + the part of the gradient sums, 25 MB each, that the last backward does not hide",
        source="Li et al., VLDB 2020",
        guesses=_ddp,
    ),
    "zero3": Planner(
        title=ZERO3,
        formula="M times the longer of F + B and 2 gathers and 1 scatter of all parameters, layer by layer",
        source="Rajbhandari et al., SC 2020; Zhao et al., VLDB 2023",
        guesses=_zero3,
    ),
}
"""Word that `plan --compare` takes -> the planner."""
