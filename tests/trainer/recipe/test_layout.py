import pytest

from diffusionpipe.errors import RecipeError
from diffusionpipe.trainer.recipe.layout import replicas_of_stages
from diffusionpipe.trainer.recipe.pipeline_section import PipelineSection


@pytest.mark.parametrize(
    ("settings", "ranks", "replicas"),
    [
        ({}, 3, (1, 1, 1)),
        ({"stages": 2}, 2, (1, 1)),
        ({"replicas": [2, 1]}, 3, (2, 1)),
        ({"data_parallel": 2}, 4, (1, 1)),
        ({"replicas": [2, 1], "data_parallel": 2}, 6, (2, 1)),
    ],
)
def test_every_rank_gets_one_stage(settings, ranks, replicas):
    assert replicas_of_stages(PipelineSection.model_validate(settings), ranks) == replicas


@pytest.mark.parametrize(
    ("settings", "ranks", "message"),
    [
        ({"stages": 3}, 2, "need 3 ranks; there are 2"),
        ({"replicas": [2, 1]}, 2, "need 3 ranks"),
        ({"data_parallel": 2}, 3, "3 ranks cannot form 2 equal pipelines"),
        ({"data_parallel": 4}, 2, "2 ranks cannot form 4"),
    ],
)
def test_ranks_that_do_not_fit_are_refused_with_both_numbers(settings, ranks, message):
    with pytest.raises(RecipeError, match=message):
        replicas_of_stages(PipelineSection.model_validate(settings), ranks)
