import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from diffusionpipe.errors import FileFormatError
from diffusionpipe.viz import loss_curve
from diffusionpipe.viz.metrics import smoothed


def written(tmp_path, rows, *, ending=""):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + ending)
    return path


def training(num_steps):
    return [{"step": i, "loss": 1 / i, "learning_rate": 1e-4, "samples_per_s": 50.0} for i in range(1, num_steps + 1)]


def drawn(metrics, tmp_path):
    path = tmp_path / "loss.png"
    loss_curve(metrics, path)
    return Image.open(path)


def test_panels_appear_for_what_the_file_holds(tmp_path):
    full = drawn(written(tmp_path, [*training(20), {"step": 20, "validation_loss": 0.5}]), tmp_path)
    bare = drawn(written(tmp_path, [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.4}]), tmp_path)
    assert full.height > bare.height


def test_models_that_train_together_have_curves_of_their_own(tmp_path):
    def texts_of(rates):
        rows = [*training(20), {"step": 20, "validation_loss/base": 0.3, "validation_loss/super": 0.2}]
        for row in rows[:20]:
            row |= {"loss/base": 0.6, "loss/super": 0.4}
            row |= {f"learning_rate/{name}": rate for name, rate in rates.items()}
        loss_curve(written(tmp_path, rows), tmp_path / "loss.svg")
        return (tmp_path / "loss.svg").read_text()

    alike, apart = texts_of({"base": 1e-4, "super": 1e-4}), texts_of({"base": 1e-4, "super": 1e-5})
    for name, last in (("base", 0.3), ("super", 0.2)):
        assert f">training loss of {name}<" in alike
        assert f">validation loss of {name}, last {last}<" in alike
        assert f">{name}<" in apart
        assert f">{name}<" not in alike


@pytest.mark.parametrize(("num_steps", "label"), [(6, "training loss"), (80, "training loss, smoothed")])
def test_a_curve_is_called_smoothed_where_it_is(tmp_path, num_steps, label):
    loss_curve(written(tmp_path, training(num_steps)), tmp_path / "loss.svg")
    assert f">{label}<" in (tmp_path / "loss.svg").read_text()


def test_validation_alone_a_single_step_and_a_loss_that_is_no_number_are_drawn(tmp_path):
    for rows in (
        [{"step": 5, "validation_loss": 0.5}],
        training(1),
        [*training(3), {"step": 4, "loss": float("nan")}],
        [{"step": 1, "loss": 0.0, "learning_rate": 0.0}],
    ):
        assert drawn(written(tmp_path, rows), tmp_path).width > 0


def test_a_last_line_that_is_being_written_is_left_out(tmp_path):
    whole = drawn(written(tmp_path, training(5)), tmp_path).tobytes()
    assert drawn(written(tmp_path, training(5), ending='{"step": 6, "lo'), tmp_path).tobytes() == whole


@pytest.mark.parametrize(
    ("rows", "ending", "says"),
    [
        ([], "", "the run has not finished a step yet"),
        ([{"step": 1}], "", "the run has not finished a step yet"),
        (training(2), "oops\n", "line 3: not valid JSON"),
        (training(2), "[1]\n", "line 3: must be a JSON object"),
    ],
)
def test_a_file_without_losses_or_with_a_broken_line_is_refused(tmp_path, rows, ending, says):
    with pytest.raises(FileFormatError) as caught:
        loss_curve(written(tmp_path, rows, ending=ending), tmp_path / "loss.png")
    assert says in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(FileFormatError, match="cannot read"):
        loss_curve(tmp_path / "nowhere.jsonl", tmp_path / "loss.png")


@given(st.lists(st.integers(-100, 100), max_size=30), st.integers(0, 10))
@settings(deadline=None)
def test_smoothing_keeps_length_and_range_and_starts_at_the_first_value(values, half_window):
    means = smoothed(values, half_window)
    assert len(means) == len(values)
    assert all(min(values) <= mean <= max(values) for mean in means)
    assert means[:1] == values[:1]


def test_smoothing_does_not_lag_behind_a_straight_line():
    line = list(range(50))
    assert smoothed(line, 5)[:45] == line[:45]
