import json
from dataclasses import replace

import pytest
from planner import synthetic

from benchmarks.cards.__main__ import as_plain
from benchmarks.cards.advice import advice, reason_of
from benchmarks.cards.cells import (
    BASES,
    OTHER_TRAINING,
    OURS,
    PEER,
    PEER_SPLIT,
    STATES,
    STORED,
    SYSTEMS,
    TUNED,
    Case,
    Cell,
    Entry,
    measure,
    setting_of,
    stored_entries,
)
from benchmarks.cards.picture import draw
from benchmarks.cards.summary import summary
from benchmarks.rivals.copies import CACHED, HYBRID
from diffusionpipe.costs.forms import Form
from diffusionpipe.holding.state import held_of

CASE = Case(model="SDXL", machine="RTX 4090 + 4080")
GIB = 2**30


def entry(system: str, speed: float, *, overflow: int = -1, layout: str = "2 stages x 1, 4 micro-batches") -> Entry:
    return Entry(
        system=system,
        layout=layout,
        is_recomputed=False,
        samples_per_second=speed,
        bubble=0.25,
        held=(GIB, 2 * GIB),
        overflow=overflow,
    )


def cell(*entries: Entry) -> Cell:
    return Cell(case=CASE, state="float32", frozen_share=0.2, entries=entries)


def test_what_does_not_fit_is_no_rival():
    one = cell(entry(OURS, 3.0), entry("DDP", 9.0, overflow=1), entry("naive split", 2.0))
    assert one.over(one.best_other) == 1.5
    assert one.over(one.fitting(PEER)) is None


def test_what_trains_something_else_is_no_rival_but_has_its_figures():
    stored = [
        replace(entry(f"{name}, nf4 base", speed), base="nf4 base") for name, speed in ((OURS, 4.0), ("DDP", 2.5))
    ]
    one = cell(entry(OURS, 3.0), entry(CACHED, 9.0), *stored, entry("naive split", 2.0))
    assert one.over(one.best_other) == 1.5
    figures = summary([one])
    assert figures["over_DDP_cached_outputs_max"] == pytest.approx(1 / 3)
    assert (figures["over_DDP_nf4_base_min"], figures["cells_in_which_DDP_int8_base_fits"]) == (1.6, 0)
    assert figures["cells_in_which_DiffusionPipe_nf4_base_fits"] == 1


def test_the_summary_counts_each_cell_once():
    cells = [cell(entry(OURS, 3.0), entry(PEER, 1.0)), cell(entry(OURS, 3.0), entry(PEER, 2.0, overflow=1))]
    figures = summary(cells)
    assert (figures["cells"], figures["cells_in_which_diffusion_pipe_fits"]) == (2, 1)
    assert figures["over_diffusion_pipe_median"] == 3.0
    assert figures["over_the_best_other_min"] == 3.0


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ((entry(OURS, 2.0), entry(PEER, 1.0)), ""),
        ((entry(OURS, 1.2), entry(PEER, 1.0)), "diffusion-pipe is idle 25%, ours 25%; encoders are 20% of the work"),
        ((entry(OURS, 1.0), entry(PEER, 1.0, layout="1 stage x 2, 1 micro-batch")), "the model fits on one device"),
        ((entry(OURS, 1.0), entry(PEER, 1.0, overflow=3 * GIB)), "diffusion-pipe misses a device by 3.0 GiB"),
        ((entry(OURS, 1.0, overflow=2 * GIB), entry(PEER, 1.0, overflow=3 * GIB)), "nothing fits"),
    ],
)
def test_a_cell_below_the_aim_says_why(entries, reason):
    found = reason_of(cell(*entries))
    assert found.startswith(reason)
    assert bool(found) is bool(reason)


def test_the_advice_names_what_fits_and_what_does_not():
    split, nowhere = cell(entry(OURS, 3.0), entry(PEER, 2.0)), cell(entry(OURS, 1.0, overflow=1))
    text = advice([split, replace(nowhere, case=replace(CASE, model="FLUX.1-dev"))], CASE.machine)
    assert "stages with filled waits for SDXL (1.50 x" in text
    assert "for FLUX.1-dev nothing fits" in text


def test_the_advice_is_another_system_where_that_is_faster():
    one = cell(entry(OURS, 2.0), entry("ZeRO-3 / FSDP", 2.5), entry(PEER, 1.0))
    assert "ZeRO-3 / FSDP for SDXL (ours: 0.80 x)" in advice([one], CASE.machine)
    assert "1.25 times as fast" in reason_of(one)
    assert "20% less compute" in reason_of(one)


@pytest.mark.slow
def test_the_states_are_counted_as_the_case_says(monkeypatch):
    numbers = 2**20
    chain = replace(synthetic.chain([1.0], parameters=[numbers]), precision="bfloat16")
    wide = next(one for one in chain.graph.parameters if one.is_trainable)
    parameters = tuple(replace(one, dtype="bfloat16") if one is wide else one for one in chain.graph.parameters)
    rounded = replace(chain, graph=replace(chain.graph, parameters=parameters))
    monkeypatch.setattr(
        "benchmarks.cards.profiles.load", lambda model, device, form, *, is_narrow: rounded if is_narrow else chain
    )
    narrow = setting_of(CASE, STATES[1], is_recomputed=True)
    held = held_of(narrow.workload.states, replace(wide, dtype="bfloat16"))
    assert (held.parameters, held.gradients, narrow.workload.checkpointed) == (2 * numbers, 2 * numbers, ("*",))
    assert held.optimizer == 2 * numbers + 2 * 4 * numbers // 256  # a float32 scale for 256 numbers of either moment
    assert held_of(setting_of(CASE, STATES[0], is_recomputed=False).workload.states, wide).on_device == 16 * numbers


@pytest.mark.slow
def test_a_small_cell_has_every_system_and_ours_is_no_slower_than_any_that_fits(tmp_path):
    measured = measure(CASE)
    tuned = [name for name in TUNED if name != HYBRID]  # one node
    assert [one.system for one in measured.entries] == [*SYSTEMS, *tuned]  # all is trained: no quantised base
    assert measured.state == STATES[1].name  # 41 GB of weights, gradients and moments in float32 on 40 GB
    ours = measured.fitting(OURS)
    same = [one for one in measured.entries if one.fits and one.system not in OTHER_TRAINING]
    assert all(ours.samples_per_second >= one.samples_per_second for one in same)
    assert measured.over(measured.fitting(PEER_SPLIT)) > 1.2
    assert 0.2 < measured.frozen_share < 0.35
    draw([measured], tmp_path / "cards.png")
    assert (tmp_path / "cards.png").stat().st_size > 0
    assert json.loads(json.dumps(as_plain([measured])))["cells"][0]["batch"] == 8


def test_adapters_on_a_stored_base_are_compared_with_others_on_the_same_base(monkeypatch):
    asked = []

    def profile(model, device, form=None, *, is_narrow):
        asked.append(form)
        return synthetic.chain([1.0] * 4, parameters=[10**7 if form is None else 10**6] * 4)

    monkeypatch.setattr("benchmarks.cards.profiles.load", profile)
    case = Case(model="FLUX.1-dev LoRA", machine="2 x RTX 4090")
    found = {
        one.system: one
        for base, form in BASES.items()
        for one in stored_entries(setting_of(case, STATES[0], is_recomputed=True, form=form), base, is_recomputed=True)
    }
    assert set(found) == set(STORED)
    assert set(asked) == {Form.INT8, Form.NF4}
    assert {one.base for one in found.values()} == set(BASES)
    for one in found.values():
        assert one.samples_per_second <= found[f"{OURS}, {one.base}"].samples_per_second
