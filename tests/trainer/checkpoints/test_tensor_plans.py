"""Each tensor is written once, about equally much by each rank, and lies where the plan of its file says."""

import itertools
import json
import random

import pytest
import torch

from diffusionpipe.errors import CheckpointError
from diffusionpipe.runtime.comm.exchange import rows_of
from diffusionpipe.trainer.checkpoints.tensor_plans import Offer, check_offers, file_plan, offer_of, shares_of


def offer(name, size, dtype="uint8"):
    return Offer(name=name, dtype=dtype, shape=(size,))


def random_offers(chance, ranks):
    """Tensors of one rank, and tensors that all ranks have, in an order of each rank's own."""
    shared = [offer(f"shared.{number}", chance.randint(0, 30)) for number in range(chance.randint(0, 6))]
    own = [[offer(f"own.{rank}.{number}", chance.randint(0, 20)) for number in range(chance.randint(0, 3))]
           for rank in range(ranks)]  # fmt: skip
    return [chance.sample(shared + of_rank, len(shared + of_rank)) for of_rank in own]


def written(offers, shares):
    return [sum(of_rank[position].size for position in share) for of_rank, share in zip(offers, shares, strict=True)]


def fairest(offers):
    """The least that the rank with most to write must write, by trying every choice."""
    holders = {}
    for rank, of_rank in enumerate(offers):
        for one in of_rank:
            holders.setdefault(one, []).append(rank)
    best = None
    for choice in itertools.product(*holders.values()):
        sizes = [0] * len(offers)
        for one, rank in zip(holders, choice, strict=True):
            sizes[rank] += one.size
        best = max(sizes) if best is None else min(best, max(sizes))
    return best


@pytest.mark.parametrize("seed", range(40))
def test_each_tensor_is_written_once_and_no_rank_writes_much_more_than_must_be(seed):
    chance = random.Random(seed)
    offers = random_offers(chance, ranks=chance.randint(1, 3))
    shares = shares_of(offers)
    names = [offers[rank][position].name for rank, share in enumerate(shares) for position in share]
    assert sorted(names) == sorted({one.name for of_rank in offers for one in of_rank})
    assert max(written(offers, shares)) <= 4 / 3 * fairest(offers)


def test_no_rank_writes_more_than_by_torchs_own_choice():
    from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
    from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

    for seed in range(20):
        offers = random_offers(random.Random(seed), ranks=3)
        plans = [
            create_default_local_save_plan(
                {one.name: torch.zeros(one.shape, dtype=torch.uint8) for one in of_rank}, True
            )
            for of_rank in offers
        ]
        chosen = dedup_save_plans(plans)
        theirs = max(sum(item.tensor_data.size.numel() for item in plan.items) for plan in chosen)
        assert max(written(offers, shares_of(offers))) <= max(theirs, 4 / 3 * fairest(offers))


def test_offers_arrive_as_they_were_sent():
    offers = tuple(offer_of(name, tensor) for name, tensor in {
        "a": torch.zeros(3, 2), "b": torch.zeros((), dtype=torch.bfloat16), "c": torch.nn.Parameter(torch.zeros(0, 5)),
    }.items())  # fmt: skip
    form = rows_of(Offer)
    assert form.read(json.loads(json.dumps(form.write(offers)))) == offers
    assert [one.size for one in offers] == [24, 2, 0]


def test_the_tensors_of_a_file_follow_each_other_at_multiples_of_their_width():
    kinds = ["uint8", "float64", "bfloat16", "complex128", "bool", "float32"]
    plan = file_plan(
        "rank-3.safetensors", [offer(f"w.{number}", number + 1, kind) for number, kind in enumerate(kinds)]
    )
    ends = [one.offset + one.length for one in plan.tensors]
    assert [one.offset for one in plan.tensors] == [len(plan.start), *ends[:-1]]
    assert ends[-1] == plan.size
    assert all(one.offset % min(8, getattr(torch, one.dtype).itemsize) == 0 for one in plan.tensors)
    assert {one.file for one in plan.tensors} == {"rank-3.safetensors"}


@pytest.mark.parametrize("wrong", [{"dtype": "os"}, {"dtype": "nn"}, {"shape": (-1,)}])
def test_a_tensor_that_cannot_be_is_refused(wrong):
    given = {"name": "w", "dtype": "float32", "shape": (2,)} | wrong
    with pytest.raises(CheckpointError, match="w: there is no tensor of type"):
        check_offers([[Offer(**given)]])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["sparse", "quantised"])
def test_a_tensor_that_is_not_dense_is_refused(kind):
    given = torch.zeros(3)
    other = given.to_sparse() if kind == "sparse" else torch.quantize_per_tensor(given, 1.0, 0, torch.qint8)
    with pytest.raises(CheckpointError, match="w is not a dense tensor"):
        offer_of("w", other)
