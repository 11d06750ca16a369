"""Drawing over all devices: time and memory from a profile, as `sample --ranks` draws."""

from dataclasses import replace

import pytest
from planner import synthetic

from diffusionpipe.costs.decoding import Decoding
from diffusionpipe.errors import ConfigError
from diffusionpipe.holding import Workload
from diffusionpipe.planner.drawing.drawing import DrawingMemory, predict_drawing
from diffusionpipe.planner.pricing.setting import Setting


def setting(ranks, *, precision="bfloat16", profile=None):
    made = profile or synthetic.drawn(precision)
    return Setting(profile=made, cluster=synthetic.cluster(ranks), workload=Workload(batch=1))


@pytest.mark.parametrize(
    ("ranks", "rows", "step"), [(1, 4, 32.0), (2, 1, 8.0), (2, 4, 20.0), (4, 4, 14.0), (8, 8, 15.0)]
)
def test_a_step_is_a_forward_of_all_rows_through_all_stages(ranks, rows, step):
    drawing = predict_drawing(setting(ranks), pictures=rows, rows=rows, size=1)
    assert drawing.step == pytest.approx(step, rel=1e-2)  # (rows + ranks - 1) stages of 8 / ranks seconds
    assert drawing.encoding == pytest.approx(4.0 * rows)
    assert drawing.seconds_a_picture(10) == pytest.approx((4.0 * rows + 10 * drawing.step) / rows)


def test_drawing_keeps_nothing_and_takes_what_that_was_measured_to_take():
    profile = synthetic.with_forward_only(synthetic.drawn(), 0.75)
    plain, drawing = (predict_drawing(setting(2, profile=one), pictures=4, rows=4, size=1) for one in (None, profile))
    assert drawing.step == pytest.approx(0.75 * plain.step, rel=1e-3)
    assert drawing.encoding == plain.encoding


def test_guidance_takes_two_rows_a_picture():
    one, two = (predict_drawing(setting(1), pictures=4, rows=rows, size=1) for rows in (4, 8))
    assert two.seconds_a_picture(10) == pytest.approx(2 * one.seconds_a_picture(10))


@pytest.mark.parametrize(("precision", "width"), [("bfloat16", 2), ("float32", 4)])
def test_weights_are_stored_as_they_are_read_and_encoders_are_gone_before(precision, width):
    drawing = predict_drawing(setting(4, precision=precision), pictures=1, rows=1, size=1)
    assert [use.weights for use in drawing.memory] == [2 * 10**6 * width] * 4
    assert [use.encoders for use in drawing.memory] == pytest.approx([340 * 10**6 * 2] * 4, rel=1e-3)
    assert all(use.peak == use.encoders for use in drawing.memory)
    assert DrawingMemory(encoders=5, weights=4, tensors=3).peak == 7
    assert DrawingMemory(encoders=5, weights=4, tensors=3, decoding=8).peak == 8


@pytest.mark.parametrize(("device", "waiting"), [("cuda", 0), ("cpu", 3)])
def test_the_first_rank_decodes_and_pictures_wait_in_host_memory(device, waiting):
    decoding = Decoding(weights=10**9, whole=10**10, tiled=10**9, picture=10**8, latents=10**6)
    profile = replace(synthetic.drawn(), decoding=decoding, device_type=device)
    first, *others = predict_drawing(setting(3, profile=profile), pictures=3, rows=6, size=1).memory
    assert first.decoding == 11 * 10**9 + 6 * 10**6 + waiting * 10**8
    assert first.peak == first.decoding
    assert [other.decoding for other in others] == [0, 0]


@pytest.mark.parametrize(("room", "is_tiled"), [(10.9, True), (11.1, False)])
def test_pictures_are_decoded_by_tiles_where_a_whole_one_does_not_fit(room, is_tiled):
    decoding = Decoding(weights=10**9, whole=10**10, tiled=10**9, picture=0, latents=0)
    made = replace(setting(2), cluster=synthetic.cluster(2, memory=room))
    made = replace(made, profile=replace(made.profile, decoding=decoding))
    drawing = predict_drawing(made, pictures=1, rows=1, size=1)
    assert drawing.is_tiled == is_tiled
    assert drawing.memory[0].decoding == pytest.approx(2e9 if is_tiled else 11e9, rel=1e-3)


def test_the_vae_and_its_latents_are_not_there():
    profile = synthetic.drawn()
    heavy = replace(
        profile,
        layers=tuple(
            replace(one, workspace=(10**12,) * len(one.workspace)) if one.name.startswith(("vae", "noise")) else one
            for one in profile.layers
        ),
    )
    plain, same = (predict_drawing(setting(2, profile=one), pictures=4, rows=4, size=1) for one in (profile, heavy))
    assert plain == same


def test_a_model_without_a_prediction_is_refused():
    with pytest.raises(ConfigError, match="cannot be drawn from"):
        predict_drawing(setting(2, profile=synthetic.chain([1.0] * 4)), pictures=1, rows=1, size=1)


def test_more_devices_than_layers_are_refused():
    with pytest.raises(ConfigError, match="9 devices at most"):
        predict_drawing(setting(10), pictures=1, rows=1, size=1)
