"""Rows of training without a flush for shipped models and clusters; `benchmarks.asynchronous plans` has all of them."""

import pytest
from golden.plans import recorded_profile

from benchmarks.asynchronous.plans import Cell, all_work, clusters, kept, plan, setting_of, table_of
from diffusionpipe.cli.text.plan_table import table_lines
from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.models.opening.configured import configured_models
from diffusionpipe.planner.choosing.choice import choose
from diffusionpipe.planner.choosing.unflushed import unflushed

SAMPLE = (
    ("sd-2.1-a100-80", "a100-80x8"),
    ("controlnet-sd-1.5-a100-80", "a100-80x8"),
    ("sdxl-rtx4090", "rtx4090x4"),
    ("sd3-medium-l40s", "l40sx8"),
    ("flux.1-dev-lora-rtx4090", "rtx4090x2"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("profile", "cluster"), SAMPLE)
def test_no_row_is_faster_than_all_work_shared_equally(profile, cluster):
    setting = setting_of(recorded_profile(profile), load_cluster(cluster))
    rows = unflushed(setting)
    assert {"stashed", "delayed", "newest", "vertical", "predicted"} == {row.name for row in rows}
    assert all(row.step >= all_work(setting, row) * (1 - 1e-9) for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize(("profile", "cluster"), [SAMPLE[2], SAMPLE[-1]])
def test_they_are_shown_and_never_chosen(profile, cluster):
    setting = setting_of(recorded_profile(profile), load_cluster(cluster))
    shown = choose(setting).with_unflushed()
    assert min(row.step for row in shown.unflushed) < shown.winner.step
    assert not {row.name for row in shown.unflushed} & {row.name for row in (shown.winner, *shown.ours)}
    lines = [line for line, _ in table_lines(setting, shown, width=160)]
    (title,) = (number for number, line in enumerate(lines) if line.startswith("without a flush"))
    assert any("stashed" in line for line in lines[title:])
    assert not any("stashed" in line for line in lines[:title])


def test_cells_that_are_written_down_are_not_planned_again(tmp_path):
    line = '{"model": "sdxl", "cluster": "%s", "rows": 5, "sizes": "stashed, 4 stages", "step": 2.0, "least": 1.9, '
    rest = '"least_ratio": 1.05, "idle": 0.01, "fits": true}'
    (tmp_path / "plans.jsonl").write_text("".join(line % one.name + rest + "\n" for one in clusters()))
    assert list(plan(tmp_path, ["sdxl"])) == []
    found = kept(tmp_path)
    assert {type(cell) for cell in found} == {Cell}
    assert table_of(found).row_count == len(clusters()) == 9
    assert "sdxl" in configured_models()
