"""SPP as it was published: stages of different numbers of replicas, cut by SPP's bound, in the order of 1F1B.

`baselines` has it with one rank for each stage, because then all pipelines can be compared at equal layouts.

Luo, Yi, Wang, Fan, Wu, Chu, "Efficient Pipeline Planning for Expedited Distributed DNN Training", INFOCOM 2022.
"""

from diffusionpipe.planner.rivals.baselines import Baseline, is_better, pipeline_at
from diffusionpipe.planner.rivals.planners import PLANNERS
from diffusionpipe.planner.search.judge import Judge

REPLICATED_SPP = "1F1B + SPP, replicas"


def replicated_spp(judge: Judge) -> Baseline | None:
    """The best of all sizes, each cut where SPP's bound is least; None where the batch cannot be shared.

    SPP itself would take the size of the least bound; here it gets that of the least time. Stages that hold the whole
    model are data parallelism, and are left out.
    """
    best: Baseline | None = None
    for guess in PLANNERS["spp"].guesses(judge):
        if len(guess.candidate.starts) > 1:
            one = pipeline_at(judge, REPLICATED_SPP, guess.candidate)
            if best is None or is_better(one, best):
                best = one
    return best
