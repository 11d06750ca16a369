"""Prodigy over several ranks steps as the package's own class does over all parameters."""

import threading

import pytest
import torch
from torch import nn

from diffusionpipe.trainer.optim.prodigy import SharedProdigy
from diffusionpipe.trainer.optim.trial import sums_over_all
from diffusionpipe.trainer.recipe import OptimizerSection, PipelineSection
from diffusionpipe.workflows.training.recipe_checks import checks_of_run

SHAPES = ((5, 4), (7,), (3, 3), (2, 2))
STEPS = 12


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def give_gradients(step, held, still):
    """Gradients towards 0 with noise; 0 for the parameters with the numbers in `still`."""
    generator = torch.Generator().manual_seed(100 + step)
    for index, parameter in enumerate(held):
        noise = 0.1 * torch.randn(parameter.shape, generator=generator)
        parameter.grad = torch.zeros_like(parameter) if index in still else noise + parameter.detach()


def stepped_apart(options, still):
    """Two ranks with two parameters each, and one without any."""
    from prodigyopt import Prodigy

    held, sums, meeting = parameters(), {}, threading.Barrier(3)
    optimizers = [Prodigy(held[:2], **options), Prodigy(held[2:], **options), None]

    def sum_over(rank):
        def summed(terms):
            sums[rank] = terms.clone()
            meeting.wait()
            total = sum(sums.values())
            meeting.wait()
            return total

        return summed

    owned = [held[:2], held[2:], []]
    ranks = [
        SharedProdigy(one, own, sum_over(rank), torch.device("cpu"))
        for rank, (one, own) in enumerate(zip(optimizers, owned, strict=True))
    ]
    for step in range(STEPS):
        give_gradients(step, held, still)
        threads = [threading.Thread(target=rank.step, args=(options["lr"],)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return held, optimizers, ranks


@pytest.mark.parametrize("still", [(), (2, 3)], ids=["all move", "a rank without gradients"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_bias_correction": True, "weight_decay": 0.1},
        {"safeguard_warmup": True, "slice_p": 2},
        {"growth_rate": 1.02, "d_coef": 2.0},
        {"weight_decay": 0.1, "decouple": False},
    ],
)
def test_ranks_step_with_the_distance_of_all(options, still):
    from prodigyopt import Prodigy

    options = {"lr": 1.0, **options}
    together = parameters()
    whole = Prodigy(together, **options)
    for step in range(STEPS):
        before = whole.param_groups[0]["d"]
        give_gradients(step, together, still)
        whole.step()
    held, optimizers, ranks = stepped_apart(options, still)
    for one, other in zip(held, together, strict=True):
        assert float((one - other).detach().norm()) < 1e-6 * float(other.detach().norm())
    expected = whole.param_groups[0]
    for optimizer in optimizers[:2]:
        found = optimizer.param_groups[0]
        for key in ("d", "d_max", "d_hat", "d_numerator", "d_denom", "k", "d_coef", "growth_rate"):
            assert found[key] == pytest.approx(expected[key], rel=1e-6), key
    assert expected["d"] > 1e-6
    assert [rank.rate for rank in ranks] == pytest.approx([before] * 3)


@pytest.mark.parametrize(
    ("name", "is_summing"),
    [("prodigyopt.Prodigy", True), ("AdamW", False), ("schedulefree.AdamWScheduleFree", False)],
)
def test_sums_over_all_parameters_are_found_by_a_trial(name, is_summing):
    assert sums_over_all(name, {}) is is_summing


@pytest.mark.parametrize(
    ("name", "stages", "num_ranks", "is_refused"),
    [
        ("pytorch_optimizer.Prodigy", None, 2, True),
        ("pytorch_optimizer.Prodigy", 1, 2, False),
        ("pytorch_optimizer.Prodigy", None, 1, False),
        ("prodigyopt.Prodigy", None, 2, False),
    ],
)
def test_a_class_with_sums_of_its_own_is_refused_where_ranks_share_the_parameters(name, stages, num_ranks, is_refused):
    sections = {"optimizer": OptimizerSection(name=name), "pipeline": PipelineSection(stages=stages)}
    check = next(one for one in checks_of_run(num_ranks, None) if one.__name__ == "has_an_optimizer_for_the_ranks")
    problems = list(check(**sections))
    assert [problem.startswith(f"optimizer.name: {name} changes a parameter by sums") for problem in problems] == (
        [True] if is_refused else []
    )
