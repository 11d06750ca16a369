"""Published measurements are stated in full, and computed speeds are compared with them by the work that they did."""

from dataclasses import replace

import pytest

from benchmarks.anchors.__main__ import compared, profile_of
from diffusionpipe.costs.anchors import ANCHORS, Work
from diffusionpipe.costs.devices import DEVICES
from diffusionpipe.costs.files import read_profile
from diffusionpipe.models.configured import configured_models

RESULTS = "benchmarks/anchors/results/anchors.txt"


def test_every_anchor_names_what_was_measured_and_where_it_is_published():
    assert len(ANCHORS) >= 10
    assert len({anchor.name for anchor in ANCHORS}) == len(ANCHORS)
    assert sum(anchor.is_held_out for anchor in ANCHORS) >= 4
    for anchor in ANCHORS:
        assert anchor.model in configured_models()
        assert anchor.device in DEVICES
        assert anchor.speed > 0
        assert "https://" in anchor.source or "/" in anchor.source
        assert (anchor.steps > 0) == (anchor.work is Work.SAMPLE)


@pytest.fixture(scope="module")
def profile(request):
    return read_profile(request.config.rootpath / "profiles/analytic/sd-2.1-a100-80.json")


def test_work_adds_up(profile):
    base = replace(ANCHORS[1], batch=8, speed=1.0, device="a100-80")
    trained = sum(one.num_bytes // 4 for one in profile.graph.parameters if one.is_trainable)
    names = profile.graph.backbone_layers
    forward = sum(profile.forward(name, 8) for name in names)
    backward = sum(profile.input_grad(name, 8) + profile.weight_grad(name, 8) for name in names)
    frozen = sum(profile.forward(name, 8) for name in profile.graph.frozen_layers)
    casts = sum(layer.cast for layer in profile.layers)
    update = 44 * trained / (2039e9 * DEVICES["a100-80"].efficiency.memory)
    once = casts + update
    plain = compared(base, profile).computed
    again = compared(replace(base, is_checkpointed=True), profile).computed
    encoding = compared(replace(base, work=Work.TRAIN_AND_ENCODE), profile).computed
    assert plain == pytest.approx(8 / (forward + backward + once))
    assert again == pytest.approx(8 / (2 * forward + backward + once))
    assert encoding == pytest.approx(8 / (forward + backward + frozen + once))
    sampled = compared(replace(base, work=Work.SAMPLE, steps=10), profile).computed
    assert sampled == pytest.approx(1 / (10 * sum(profile.forward(name, 2) for name in names)))


@pytest.mark.slow
@pytest.mark.parametrize("anchor", [ANCHORS[1], ANCHORS[8]], ids=lambda anchor: anchor.name)
def test_computed_speeds_are_those_of_the_stored_table(anchor, request):
    line = next(
        line for line in (request.config.rootpath / RESULTS).read_text().splitlines() if line.startswith(anchor.name)
    )
    published, computed, ratio = (float(word) for word in line.split()[-3:])
    found = compared(anchor, profile_of(anchor))
    assert published == pytest.approx(anchor.speed, abs=0.005)
    assert found.computed == pytest.approx(computed, abs=0.006)
    assert found.ratio == pytest.approx(ratio, abs=0.006)
