"""Rows of training without a flush beside the planner's table."""

import re
from dataclasses import replace
from statistics import fmean

import pytest
from planner import synthetic

from diffusionpipe.cli.text.plan_table import table_lines
from diffusionpipe.ir import Sharded
from diffusionpipe.ir.versions import Versions, versions_held
from diffusionpipe.passes import with_versions
from diffusionpipe.planner import Layout, build_plan, plan_from_profile, predicted_period
from diffusionpipe.planner.assembly.windows import overlap
from diffusionpipe.planner.choosing.choice import choose
from diffusionpipe.planner.choosing.unflushed import unflushed
from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.pricing.given import Given
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.tables import Tables

ROWS = {str(row) for row in Versions if row is not Versions.FLUSHED}


def chain_setting(*, ranks=4, batch=16, intra_gb=50.0, memory=80.0, given=Given()):  # noqa: B008
    profile = synthetic.chain([0.01] * 8, parameters=[10**8] * 8, elements=10**5, frozen=0.02)
    cluster = synthetic.cluster(ranks, memory=memory, intra_gb=intra_gb)
    return Setting(profile=profile, cluster=cluster, workload=synthetic.workload(batch), given=given)


def all_work(setting, microbatches, groups):
    """Of a step on each rank, if it were shared equally."""
    batch, ranks, tables = setting.workload.batch, setting.cluster.num_ranks, Tables(setting=setting)
    trained = sum(setting.table.sums(batch / (groups * microbatches)).steps()) * microbatches * groups
    return trained / ranks + tables.encoding(-(-batch // ranks))


def sizes_of(row):
    words = row.sizes.replace(",", "").split()
    count = int(words[words.index("micro-batches") - 1]) if "micro-batches" in words else 1
    return count, int(words[words.index("groups") - 1]) if "groups" in words else 1


@pytest.mark.parametrize(("ranks", "intra_gb"), [(2, 50.0), (4, 0.5), (8, 50.0)])
def test_no_row_is_faster_than_all_work_shared_equally(ranks, intra_gb):
    setting = chain_setting(ranks=ranks, intra_gb=intra_gb)
    rows = unflushed(setting)
    assert {row.name for row in rows} == ROWS
    for row in rows:
        least = all_work(setting, *sizes_of(row))
        assert row.step >= least * (1 - 1e-9)
        assert row.bubble == pytest.approx(max(0, 1 - least / row.step), abs=0.2)
        assert row.samples_per_second == pytest.approx(setting.workload.batch / row.step)


def test_where_links_are_free_the_slowest_stage_sets_the_pace():
    """Two of eight layers on each stage, of which the first needs no gradient of its input."""
    setting = chain_setting(intra_gb=1e6, given=Given(stages=4, data_parallel=1, microbatches=8))
    stashed = unflushed(setting)[0]
    slowest = 16 * 2 * 3 * 0.01 + Tables(setting=setting).encoding(4)
    assert stashed.step == pytest.approx(slowest, rel=1e-3)
    assert stashed.bubble == pytest.approx(1 - all_work(setting, 8, 1) / slowest, abs=1e-3)


def test_a_slower_device_gets_fewer_layers():
    """Eight equal layers over speeds of 1 and 0.6: five and three of them take 5 and 3 / 0.6, four of them 4 / 0.6."""
    even = chain_setting(ranks=2, intra_gb=1e6, given=Given(microbatches=8))
    devices = tuple(replace(one, speed=speed) for one, speed in zip(even.cluster.devices, (1.0, 0.6), strict=True))
    setting = replace(even, cluster=replace(even.cluster, devices=devices))
    encoding = Tables(setting=setting).encoding(8)
    assert unflushed(setting)[0].step <= 16 * 5 * 3 * 0.01 + encoding / 0.6 + 1e-6
    assert unflushed(even)[0].step == pytest.approx(16 * 4 * 3 * 0.01 + encoding, rel=1e-3)


def test_versions_are_counted_in_memory():
    """What the fullest rank holds of parameters is its versions times its own."""
    rows = {row.name: row for row in unflushed(chain_setting(given=Given(stages=4, data_parallel=1, microbatches=4)))}
    for name, row in rows.items():
        held = versions_held(with_versions(overlap(4, 4), Versions(name), 1))
        assert row.use.parameters in {count * 2 * 10**8 * 4 for count in held.values()}
    assert rows["newest"].memory < rows["stashed"].memory == rows["delayed"].memory < rows["predicted"].memory


def test_staleness_is_said_in_words():
    rows = {row.name: row.sizes for row in unflushed(chain_setting(given=Given(data_parallel=1, microbatches=4)))}
    mean = fmean([0.75, 0.5, 0.25, 0])
    assert rows["stashed"] == f"4 stages, 4 micro-batches, age {mean:.2g} (at most 1)"
    assert rows["delayed"] == "4 stages, 4 micro-batches, age 1"


def test_older_weights_are_shown_only_where_they_save_time():
    """One sample for each rank: with two micro-batches on two stages a layer's overhead counts twice."""
    slow = replace(synthetic.unet(), update=0.0)
    cluster = synthetic.cluster(num_ranks=8)
    rows = unflushed(Setting(profile=slow, cluster=cluster, workload=synthetic.workload(64)))
    stashed = [row for row in rows if row.name == "stashed"]
    assert len(stashed) == 2
    assert stashed[0].step < 0.99 * stashed[1].step
    assert [row.name for row in unflushed(chain_setting()) if row.step < 1].count("stashed") <= 1


@pytest.mark.parametrize("given", [Given(sharded=Sharded.ALL), Given(schedule="gpipe"), Given(stages=1)])
def test_there_are_none_where_it_cannot_train_so(given):
    setting = chain_setting(given=given)
    assert unflushed(setting) == ()
    lines = [line for line, _ in table_lines(setting, choose(setting).with_unflushed(), width=100)]
    assert not any("flush" in line for line in lines)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (Given(stages=2), r"give it the sizes of its row, 2 stages x 2 groups, .*; a step is \d\.\d\d times as fast"),
        (Given(stages=1), "this table has no row without a flush"),
    ],
)
def test_a_recipe_that_trains_without_a_flush_is_told_its_sizes(given, says):
    setting = chain_setting(given=given)
    shown = table_lines(setting, choose(setting).with_unflushed(), width=300, versions=Versions.DELAYED)
    (line,) = [line for line, _ in shown if line.startswith("The recipe trains")]
    assert line.startswith('The recipe trains without a flush (pipeline.versions = "delayed"), and a plan has one: ')
    assert re.search(says, line)


def test_a_delay_of_one_needs_nearly_as_many_micro_batches_as_stages():
    rows = unflushed(chain_setting(given=Given(stages=4, data_parallel=1, microbatches=2)))
    assert {row.name for row in rows} == {"stashed"}


@pytest.mark.parametrize("ranks", [2, 4])
def test_filled_rows_come_near_all_work_shared_equally(ranks):
    """Ten layers, of which three take twice as long, cannot be cut equally: frozen work balances the stages."""
    profile = synthetic.chain([0.01] * 7 + [0.02] * 3, parameters=[10**8] * 10, elements=10**5, frozen=0.02)
    given = Given(stages=ranks, data_parallel=1)
    setting = Setting(
        profile=profile, cluster=synthetic.cluster(ranks), workload=synthetic.workload(4 * ranks), given=given
    )
    plain, filled = (unflushed(setting, filler)[0] for filler in (None, filler_of(setting)))
    least = all_work(setting, *sizes_of(filled))
    assert least * (1 - 1e-9) <= filled.step < plain.step
    assert filled.sizes.endswith(", filled")
    assert filled.use.frozen_outputs > 0


@pytest.mark.parametrize("versions", [Versions.STASHED, Versions.DELAYED])
def test_the_period_that_a_run_is_told_is_shorter_with_fills(versions):
    profile = synthetic.chain([0.01] * 5 + [0.02] * 3, parameters=[10**8] * 8, elements=10**5, frozen=0.02)
    layout = Layout(batch=16, stages=4, microbatches=4, versions=versions)
    filled = plan_from_profile(profile, layout)
    assert filled.is_filled
    plain = build_plan(profile.graph, replace(layout, splits=splits_of(filled)))
    assert not plain.is_filled
    assert predicted_period(profile, filled) < predicted_period(profile, plain)


def splits_of(plan):
    return tuple(block[0] for block in plan.blocks[1:-1])
