import json
from math import inf, nan

from diffusionpipe.trainer.reporting.metrics import MetricsWriter, read_metrics


def write(folder, steps, resume_step=None):
    with MetricsWriter(folder, resume_step) as writer:
        for step in steps:
            writer.write(step, {"loss": step / 2})


def steps(folder):
    return [row["step"] for row in read_metrics(folder)]


class TestFile:
    def test_a_line_is_in_the_file_as_soon_as_it_is_written(self, tmp_path):
        with MetricsWriter(tmp_path / "run") as writer:
            writer.write(1, {"loss": 0.5, "step_s": 0.25})
            assert (tmp_path / "run/metrics.jsonl").read_text() == '{"step": 1, "loss": 0.5, "step_s": 0.25}\n'

    def test_numbers_that_are_not_finite_become_null(self, tmp_path):
        with MetricsWriter(tmp_path) as writer:
            writer.write(1, {"loss": nan, "norm": inf, "rate": -inf, "ok": 1.0})
        assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
            "step": 1,
            "loss": None,
            "norm": None,
            "rate": None,
            "ok": 1.0,
        }

    def test_resuming_drops_later_lines_and_goes_on(self, tmp_path):
        write(tmp_path, range(6))
        write(tmp_path, range(4, 8), resume_step=3)
        assert steps(tmp_path) == list(range(8))

    def test_resuming_drops_a_line_that_a_crash_cut_off(self, tmp_path):
        write(tmp_path, range(3))
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "lo')
        assert steps(tmp_path) == [0, 1, 2]
        write(tmp_path, [3], resume_step=2)
        assert steps(tmp_path) == [0, 1, 2, 3]

    def test_a_new_run_begins_a_new_file(self, tmp_path):
        write(tmp_path, range(3))
        write(tmp_path, [0])
        assert steps(tmp_path) == [0]

    def test_resuming_without_a_file_begins_one(self, tmp_path):
        write(tmp_path, [5], resume_step=4)
        assert steps(tmp_path) == [5]
        assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]

    def test_a_folder_without_metrics_has_no_rows(self, tmp_path):
        assert read_metrics(tmp_path) == []
