"""A byte order mark, with which editors of Windows begin texts, changes nothing that is read from files of users."""

import pytest
from planner import synthetic

from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.costs.files import read_profile, write_cluster, write_profile
from diffusionpipe.errors import RecipeError
from diffusionpipe.ir.files import read_plan, read_schedule, write_plan, write_schedule
from diffusionpipe.ir.torch_csv import schedule_to_csv
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.schedules import one_f_one_b
from diffusionpipe.schedules.files.order_file import read_orders
from diffusionpipe.trainer.recipe import load_recipe, read_prompts

PROFILE = synthetic.chain([0.01] * 4, parameters=[10**5] * 4)
SCHEDULE = one_f_one_b(2, 4)
RECIPE = '[model]\npath = "m"\n[data]\ntrain = "d"\nresolution = 32\n[training]\nsteps = 10\nbatch = 8\n'

FILES = {
    "recipe.toml": (lambda path: path.write_text(RECIPE), load_recipe),
    "prompts.txt": (lambda path: path.write_text('an owl\n{"prompt": "a wren"}\n'), read_prompts),
    "prompts.jsonl": (lambda path: path.write_text('{"prompt": "a wren"}\n'), read_prompts),
    "profile.json": (lambda path: write_profile(PROFILE, path), read_profile),
    "cluster.json": (lambda path: write_cluster(synthetic.cluster(2), path), lambda path: load_cluster(str(path))),
    "plan.json": (
        lambda path: write_plan(build_plan(PROFILE.graph, Layout(batch=4, stages=2, microbatches=2)), path),
        read_plan,
    ),
    "schedule.json": (lambda path: write_schedule(SCHEDULE, path), read_schedule),
    "orders.csv": (lambda path: path.write_text(schedule_to_csv(SCHEDULE)), lambda path: read_orders(path, 2, 4)),
}
"""Name -> what writes such a file, and what reads it."""


@pytest.mark.parametrize("name", FILES)
def test_a_byte_order_mark_changes_nothing(tmp_path, name):
    write, read = FILES[name]
    write(tmp_path / name)
    plain = read(tmp_path / name)
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + (tmp_path / name).read_bytes())
    assert read(tmp_path / name) == plain


def test_a_text_of_another_encoding_is_refused(tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE, encoding="utf-16")
    with pytest.raises(RecipeError, match="not a TOML file: 'utf-8' codec can't decode"):
        load_recipe(tmp_path / "recipe.toml")
