"""A run whose sizes are given names the slow links of its ranks before it starts."""

from kit.tiny_runs import recipe_of
from planner import synthetic

from diffusionpipe.workflows.training.run_plan import make_plan


def test_a_run_with_given_sizes_names_slow_links(tmp_path, caplog):
    setting = synthetic.slow_pairs((1, 2))
    sizes = {"stages": 4, "microbatches": 4, "schedule": "1f1b", "fill": True}
    recipe = recipe_of(tmp_path, tmp_path, tmp_path / "run", training={"batch": 8}, pipeline=sizes)
    plan = make_plan(setting.graph, recipe, 4, setting.profile, setting.cluster)
    assert plan.mesh.num_ranks == 4
    assert "Slow links between ranks: 1-2 with " in caplog.text
