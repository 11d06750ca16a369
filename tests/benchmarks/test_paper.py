from dataclasses import replace

import pytest
from planner import synthetic

from benchmarks.paper.bandwidth import Threshold, with_bandwidth
from benchmarks.paper.cells import BEST, PIPELINE, Case, Cell, Entry, SameLayout, measure, setting_of
from benchmarks.paper.fill import Fill
from benchmarks.paper.sensitivity import with_share
from benchmarks.paper.summary import fill_figures, is_data_parallel, summary
from benchmarks.rivals.copies import AHEAD, CACHED, HYBRID, NARROW_SUMS, ZERO1, Cache
from benchmarks.rivals.replicated import REPLICATED_SPP
from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.search import search

CASE = Case(model="SD 2.1, 512 px", devices=8, per_device=8)


CACHE = Cache(sample_bytes=8, seconds=1.0)


def entry(system: str, step: float, *, overflow: int = -1, bubble: float = 0.0, layout: str = "") -> Entry:
    return Entry(system=system, layout=layout, step=step, bubble=bubble, overflow=overflow)


def same(ours: float, gpipe: Entry, spp: Entry) -> SameLayout:
    mine = entry("ours", ours)
    return SameLayout(stages=2, ours=mine, unbucketed=replace(mine, step=1.25), unfilled=mine, gpipe=gpipe, spp=spp)


def cell(*others: Entry, ours: float = 1.0, same_layout: tuple[SameLayout, ...] = ()) -> Cell:
    mine = (entry(BEST, ours, bubble=0.01), entry(PIPELINE, ours, bubble=0.07))
    return Cell(
        case=CASE,
        frozen_over_busy=1.0,
        ours=mine,
        others=others,
        tuned=(),
        cache=CACHE,
        fill=None,
        same_layout=same_layout,
    )


def test_the_ceiling_is_half_as_much_again_where_encoders_take_as_long_as_training():
    assert cell().ceiling == 1.5


def test_a_baseline_that_does_not_fit_is_never_the_rival():
    small, large = entry("ZeRO-3 / FSDP", 1.5), entry("DDP", 0.5, overflow=1)
    figures = summary([cell(small, large)], [])
    assert figures["speedup_best_baseline_min"] == 1.5
    assert figures["speedup_over_ddp_max"] is None


def test_at_equal_layouts_the_better_of_the_two_that_fit_counts():
    fits, too_large = entry("GPipe", 2.0), entry("1F1B + SPP", 1.1, overflow=1)
    assert same(1.0, fits, too_large).speedup == 2.0
    assert same(1.0, fits, replace(too_large, overflow=0)).speedup == 1.1
    assert same(1.0, fits, too_large).speedup_unbucketed == 1.6
    assert same(1.0, replace(fits, overflow=1), too_large).speedup is None


def test_the_summary_takes_the_extremes_over_all_cells_and_gigabits_for_the_bandwidth():
    ddp = "DDP"
    cells = [cell(entry(ddp, 2.0)), cell(entry(ddp, 3.0), ours=2.0)]
    figures = summary(cells, [Threshold(case=CASE, bandwidth=4e9), Threshold(case=CASE, bandwidth=None)])
    assert (figures["speedup_over_ddp_max"], figures["speedup_over_ddp_min"]) == (2.0, 1.5)
    assert figures["ddp_128_bus_bandwidth_gbps"] == 32
    assert figures["bubble_after_fill_max"] == 0.01


def test_whole_and_sharded_copies_are_data_parallel_and_pipelines_are_not():
    layouts = ("sharded data parallel, 8 copies, 4 buckets", "data parallel, 8 copies", "zb-v, 8 stages x 2 groups")
    cells = [replace(cell(), ours=(entry(BEST, 1.0, layout=layout),)) for layout in layouts]
    assert summary(cells, [])["cells_where_the_best_is_data_parallel"] == 2
    assert [is_data_parallel(one) for one in cells] == [True, True, False]


def test_tuned_copies_have_their_own_figures_and_the_cache_never_counts_as_on_the_fly():
    tuned = (entry(AHEAD, 1.005), entry(NARROW_SUMS, 1.5), entry(ZERO1, 0.5, overflow=1), entry(CACHED, 0.9))
    figures = summary([replace(cell(), tuned=tuned), replace(cell(), tuned=tuned[1:])], [])
    assert (figures["speedup_over_ddp_encoding_ahead_min"], figures["speedup_over_ddp_bf16_max"]) == (1.005, 1.5)
    assert (figures["speedup_over_cached_max"], figures["speedup_over_zero1_max"]) == (0.9, None)
    assert figures["cells_where_tuned_data_parallelism_is_as_fast"] == 1


def test_a_fill_counts_its_bubble_where_frozen_work_exceeds_the_idle_time_and_its_bound_elsewhere():
    scarce = Fill(unfilled=2.0, bound=2.0, iteration=2.02, frozen_over_idle=0.5, bubble=0.2)
    plenty = Fill(unfilled=2.0, bound=3.0, iteration=3.03, frozen_over_idle=2.0, bubble=0.01)
    figures = fill_figures([scarce, plenty])
    assert figures["cells_where_frozen_work_exceeds_idle_time"] == 1
    assert figures["bubble_where_frozen_work_exceeds_idle_time_max"] == 0.01
    assert figures["fill_over_bound_elsewhere_max"] == figures["fill_over_bound_elsewhere_median"] == 1.01


def test_a_slower_network_slows_messages_as_much_as_sums_and_nothing_inside_a_node():
    cluster = load_cluster("a100-80x8:2")
    slow = with_bandwidth(cluster, cluster.inter_reduce.bandwidth / 4)
    assert slow.inter.bandwidth == pytest.approx(cluster.inter.bandwidth / 4)
    assert (slow.intra, slow.intra_reduce) == (cluster.intra, cluster.intra_reduce)


@pytest.mark.slow
def test_a_measured_cell_has_every_system_and_ours_is_no_slower_than_any_that_fits():
    measured = measure(CASE)
    ours = measured.entry(BEST)
    assert {one.system for one in measured.others} == {
        "DDP", "DDP (no overlap)", "ZeRO-3 / FSDP", "GPipe", "1F1B + SPP", REPLICATED_SPP,
    }  # fmt: skip
    assert {one.system for one in measured.tuned} == {AHEAD, NARROW_SUMS, ZERO1, CACHED}
    assert HYBRID not in {one.system for one in measured.tuned}  # one node
    assert all(ours.step <= one.step for one in measured.others if one.fits)
    assert {one.stages for one in measured.same_layout} <= {2, 4, 8}
    assert measured.same_layout


def test_encoders_take_the_stated_share_of_the_trained_part():
    profile = synthetic.chain([0.01, 0.03, 0.02], parameters=[10] * 3, frozen=0.004)
    setting = Setting(profile=profile, cluster=synthetic.cluster(8), workload=synthetic.workload(64))
    tables = Judge(setting=with_share(setting, CASE, 0.4)).tables
    sums = tables.table.sums(CASE.per_device)
    assert tables.frozen_seconds == pytest.approx(0.4 * (sums.forward[-1] + sums.backward[-1]))
    assert with_share(setting, CASE, 0.4).profile.layers[-1] == profile.layers[-1]


@pytest.mark.slow
def test_pipelines_of_two_ranks_win_though_places_of_more_ranks_have_better_chains():
    setting = setting_of(Case(model="SD 2.1, 512 px", devices=64, per_device=8))
    free = search(setting, filler=filler_of(setting))
    of_two = search(setting, filler=filler_of(setting), units=(2,))
    assert free.winner
    assert of_two.winner
    assert free.winner[1].step <= 1.002 * of_two.winner[1].step
