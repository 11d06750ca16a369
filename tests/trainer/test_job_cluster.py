"""What a job measures of its own devices."""

from kit.tiny_runs import recipe_of

from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.runtime.job.membership import membership
from diffusionpipe.runtime.job.process_group import joined
from diffusionpipe.trainer.reporting.screen import NoScreen
from diffusionpipe.trainer.setup.job_cluster import agree_on_cluster, with_host_bandwidth


def test_all_devices_get_the_rate_from_host_memory_that_was_measured():
    with joined(membership({}), device="cpu") as job:
        measured = with_host_bandwidth(load_cluster("cpux2"), job, repeats=3)
    assert len({device.host_bandwidth for device in measured.devices}) == 1
    assert measured.devices[0].host_bandwidth > 0


def test_the_cluster_of_a_job_says_how_fast_it_copies_from_host_memory(tmp_path):
    recipe = recipe_of(tmp_path, tmp_path, tmp_path / "run", pipeline={"plan": "auto"})
    recipe.run.folder.mkdir()
    with joined(membership({}), device="cpu") as job:
        found = agree_on_cluster(recipe, job, NoScreen())
    assert found.devices[0].host_bandwidth > 0
    assert load_cluster(str(tmp_path / "run" / "cluster.json")) == found
