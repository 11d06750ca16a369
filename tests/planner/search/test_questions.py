import random

import pytest
from planner import synthetic

from diffusionpipe.planner.pricing.arrangement import Arrangement
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.dynamic_program import best_partitions
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.objectives import LeastInAnyOrder, LeastOneForwardOneBackward

NUM_DEVICES, BATCH = 4, 16
REPLICAS = (1, 2, 4)
PLACE = Arrangement(data_parallel=1, units=NUM_DEVICES)


def judge_of(seed: int) -> Judge:
    """Seven uneven layers on devices of unequal speeds and memories."""
    rng = random.Random(seed)
    profile = synthetic.chain(
        [rng.randint(1, 6) * 1e-3 for _ in range(7)],
        parameters=[rng.randint(1, 40) * 10**6 for _ in range(7)],
        elements=rng.choice([10**4, 10**6]),
        overhead=rng.choice([0, 5e-3]),
    )
    speeds = [rng.choice([0.5, 0.5, 1]) for _ in range(NUM_DEVICES)]
    cluster = synthetic.cluster(
        NUM_DEVICES, memory=rng.choice([1.2, 4, 80]), intra_gb=rng.choice([2, 10, 100]), speeds=speeds
    )
    return Judge(setting=Setting(profile=profile, cluster=cluster, workload=synthetic.workload(BATCH)))


def all_chains(judge, objective, **options):
    """Every Pareto-optimal partition."""
    question = judge.questions.question(PLACE, objective.num_microbatches, replicas=REPLICAS, **options)
    return best_partitions(question, objective, width=10_000)


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("seed", range(12))
def test_no_chain_below_the_limit_is_left_out(seed, microbatches):
    judge = judge_of(seed)
    for objective, ask, options in (
        (LeastOneForwardOneBackward(microbatches), judge.questions.chains, {}),
        (LeastInAnyOrder(microbatches), judge.questions.least_chains, {"hosts": (), "in_flight": 1}),
    ):
        everything = all_chains(judge, objective, **options)
        best = everything[0].value if everything else 1.0
        for limit in (best, best * (1 + 1e-6), best * 1.1, best * 2):
            found = ask(PLACE, microbatches, replicas=REPLICAS, limit=limit)
            assert all(one.value < limit for one in found)
            below = [one for one in everything if one.value < limit]
            assert [one.value for one in found[:1]] == [one.value for one in below[:1]]


@pytest.mark.parametrize("seed", range(12))
def test_equal_units_share_a_price_and_unequal_ones_do_not(seed):
    judge = judge_of(seed)
    ground, microbatches = judge.tables.ground(PLACE), 2
    asked = judge.questions.question(PLACE, microbatches, replicas=REPLICAS, ignores_memory=True)
    sums = {count: judge.tables.table.sums(BATCH / microbatches / count, microbatches) for count in REPLICAS}
    for count in REPLICAS:
        for position in range(NUM_DEVICES - count + 1):
            slowest = min(ground.speeds[position : position + count])
            forward, backward, *_ = asked.stage(1, 3, position, count, 1)
            assert forward == (sums[count].forward[3] - sums[count].forward[1]) / slowest
            assert backward == (sums[count].backward[3] - sums[count].backward[1]) / slowest
