import json
import re
import shutil
from dataclasses import replace
from statistics import median

import pytest
from kit.report_runs import SCRIPT, make_run, write_metrics, write_plan_of, write_samples

from diffusionpipe.cli import main
from diffusionpipe.costs.loading import Spread
from diffusionpipe.ir.files import read_timeline
from diffusionpipe.workflows.report.page import report_of
from diffusionpipe.workflows.training.expectation import Expectation
from diffusionpipe.workflows.training.expected_step import keep_expected, note_unjudged


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "birds")


def page_of(out, *sources, options=()):
    with pytest.raises(SystemExit) as ended:
        main(["report", *map(str, sources), "--out", str(out), *options])
    assert not ended.value.code
    return out.read_text(encoding="utf-8")


def data_of(page):
    return json.loads(page.partition('id="data">')[2].partition("</script>")[0])


def refusal(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["report", *map(str, arguments)])
    assert ended.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def copy_of(run, folder):
    shutil.copytree(run, folder)
    return folder


def figures_in(part):
    if isinstance(part, dict):
        if {"text", "value", "file", "key"} <= set(part):
            yield part
        for one in part.values():
            yield from figures_in(one)
    elif isinstance(part, list):
        for one in part:
            yield from figures_in(one)


def test_a_run_becomes_one_file_with_all_parts(run, tmp_path):
    item = data_of(page_of(tmp_path / "report.html", run))["items"][0]
    parts = ("learning", "speed", "curves", "samples", "timeline", "causes", "memory", "stages")
    assert [name for name in parts if isinstance(item[name], dict) and "absent" in item[name]] == []
    assert item["alternatives"]["absent"].startswith("there is no plan.alternatives.json")
    assert [one["source"] for one in item["timeline"]["timelines"]] == ["predicted", "measured"]


def test_numbers_are_those_of_the_files(run):
    item = report_of([run])["items"][0]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step_s"] for row in rows if "step_s" in row]
    assert item["speed"]["step"]["value"] == median(steps[1:])
    held_out = {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}
    found = [one for one in figures_in(item["learning"]) if "@ step" in one["key"] and "/" not in one["key"]]
    assert len(found) == 2
    for one in found:
        key, _, step = one["key"].partition(" @ step ")
        assert (key, one["value"]) == ("validation_loss", held_out[int(step)])
        assert abs(float(one["text"]) / one["value"] - 1) < 1e-3
    timeline = read_timeline(run / "timeline.json")
    busy = sum(timeline.busy(rank) for rank in range(2)) + sum(one.end - one.start for one in timeline.update)
    parts = item["causes"][0]["parts"]
    assert sum(part["time"]["value"] for part in parts if not part["wait"]) == pytest.approx(busy / 2)
    assert sum(part["share"]["value"] for part in parts) == pytest.approx(1)


def test_the_loss_that_falls_is_called_learning_and_one_that_rises_is_not(tmp_path):
    for name, losses, word in (
        ("down", (2.0, 1.8, 1.7, 1.5, 1.3, 1.2), "Yes"),
        ("up", (1.0, 0.8, 1.1, 1.2, 1.25, 1.3, 1.4, 1.5), "No"),
        ("turn", (2.0, 1.5, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6), "It was"),
        ("few", (2.0, 1.5, 1.2), "Too early to say"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        rows = [{"step": place, "validation_loss": loss} for place, loss in enumerate(losses, start=1)]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        assert report_of([folder])["items"][0]["learning"]["word"] == word


def test_the_page_and_the_log_of_a_run_have_one_prediction_and_the_page_says_why_it_was_not_judged(run, tmp_path):
    folder = copy_of(run, tmp_path / "own")
    expected = Expectation(
        iteration=0.05,
        update=0.0123,
        loading=Spread(least=0.0, usual=0.0356, most=0.04),
        memory=(),
        has_activations=True,
    )
    keep_expected(expected, folder)
    note_unjudged(folder, "steps 6 to 20: other programs used 83 % of the cores")
    item = report_of([folder])["items"][0]
    assert item["predicted"]["value"] == expected.step
    assert item["slowness"]["ratio"] == item["speed"]["step"]["value"] / expected.step
    said = "".join(part if isinstance(part, str) else part["text"] for part in item["slowness"]["text"])
    assert "Predicted are 50 ms for the iteration, 12.3 ms for the update, 35.6 ms for loading. " in said
    assert "not judge its prediction by its steps 6 to 20: other programs used 83 % of the cores. " in said
    keep_expected(replace(expected, iteration=None), folder)  # a later start that predicts nothing
    assert report_of([folder])["items"][0]["predicted"]["file"] != "expected_step.json"


def test_captions_with_markup_stay_texts(run, tmp_path):
    page = page_of(tmp_path / "report.html", run)
    assert SCRIPT not in page
    pictures = data_of(page)["items"][0]["samples"]["steps"][0]["pictures"]
    assert [one["caption"] for one in pictures] == ["a red cat", SCRIPT, "חתול אדום"]


def test_a_run_that_was_killed_in_a_line_shows_the_lines_before_it(run, tmp_path):
    folder = copy_of(run, tmp_path / "killed")
    (folder / "ended.json").unlink()
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text[:-40])
    item = report_of([folder])["items"][0]
    assert item["progress"]["step"]["value"] == 400
    assert item["notes"][0].startswith("metrics.jsonl: 1 line cannot be read and is left out")
    assert item["state"] == "stopped before its last step"


@pytest.mark.parametrize(
    ("name", "part", "reason"),
    [
        ("metrics.jsonl", "curves", "there is no metrics.jsonl; the run has not finished a step yet"),
        ("plan.json", "timeline", "there is no plan.json; a run writes it before its first step"),
        ("profile.json", "memory", "the memory of a step is not known: put the profile.json"),
        ("samples", "samples", "no samples were drawn"),
        ("survey.json", "data", "there is no survey.json"),
        ("recipe.toml", "recipe", "there is no recipe.toml"),
    ],
)
def test_what_is_absent_says_why_and_the_rest_is_shown(run, tmp_path, name, part, reason):
    folder = copy_of(run, tmp_path / "run")
    gone = folder / name
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    item = report_of([folder])["items"][0]
    assert reason in item[part]["absent"]
    assert "absent" not in item["samples" if part == "curves" else "curves"]


def test_the_data_are_shown_by_size_with_what_was_said_of_them(run, tmp_path):
    data = data_of(page_of(tmp_path / "report.html", run))["items"][0]["data"]
    rows = [(row["size"], row["samples"]["text"], row["share"]["text"], row["cut"]["text"]) for row in data["sizes"]]
    assert rows == [("768 x 384", "90", "75.0%", "4.0%"), ("512 x 512", "30", "25.0%", "25.0%")]
    assert [(line["name"], line["warns"]) for line in data["lines"]] == [("pictures", False), ("captions", True)]


def test_a_run_without_a_plan_says_all_that_its_metrics_know(tmp_path):
    folder = tmp_path / "alone"
    write_metrics(folder, 60)
    rows = [json.loads(line) | {"learning_rate_times_d": 0.5} for line in (folder / "metrics.jsonl").open()]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    item = report_of([folder])["items"][0]
    known = {key for row in rows for key in row} - {"step", "epoch"}
    assert {line["key"] for curve in item["curves"] for line in curve["lines"]} == known
    said = "".join(part if isinstance(part, str) else part["text"] for part in item["slowness"]["text"])
    assert said.startswith(
        "A step takes 51 ms: running the schedule 45 ms, the update 4 ms, waiting for the batch 1 ms"
    )
    assert "idle for 20.0% of the time" in said


def test_steps_that_wait_for_their_batch_are_called_so(run, tmp_path):
    folder = copy_of(run, tmp_path / "late")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    late = [row | {"data_s": 0.02} if "data_s" in row else row for row in rows]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in late))
    words = [report_of([source])["items"][0]["slowness"]["word"] for source in (run, folder)]
    assert words[0] != words[1] == "It waits for its data"


def test_files_of_a_later_version_are_named_and_the_rest_is_shown(run, tmp_path):
    folder = copy_of(run, tmp_path / "later")
    for name in ("plan.json", "timeline.json", "survey.json"):
        text = (folder / name).read_text()
        (folder / name).write_text(re.sub(r'"version": \d+', '"version": 99', text, count=1))
    item = report_of([folder])["items"][0]
    assert "version 99 is unknown" in item["timeline"]["absent"]
    assert "version 99 is unknown" in item["data"]["absent"]
    assert "absent" not in item["curves"]


def test_a_picture_that_is_cut_off_is_counted_and_left_out(run, tmp_path):
    folder = copy_of(run, tmp_path / "cut")
    path = next((folder / "samples").rglob("001*.png"))
    path.write_bytes(path.read_bytes()[:60])
    samples = report_of([folder])["items"][0]["samples"]
    assert "1 picture cannot be read" in samples["notes"][0]
    assert str(tmp_path) not in json.dumps(samples["notes"])


def test_a_plan_file_has_a_page_of_its_own(run, tmp_path):
    item = data_of(page_of(tmp_path / "report.html", run / "plan.json"))["items"][0]
    assert item["kind"] == "plan"
    assert item["predicted"]["value"] == pytest.approx(item["causes"][-1]["step"]["value"])
    assert len(item["memory"]["rows"]) == 2


def test_values_of_a_recipe_are_written_as_in_a_recipe(run, tmp_path):
    folder = copy_of(run, tmp_path / "own")
    (folder / "recipe.toml").write_text('[run]\nfolder = "own"\ntake_over = false\nnames = ["a", "b"]\n')
    rows = {row["key"]: row["values"] for row in report_of([folder])["recipes"]["rows"]}
    assert rows == {"run.folder": ["own"], "run.take_over": ["false"], "run.names": ['["a", "b"]']}


def test_runs_of_different_recipes_show_their_differences_first(run, tmp_path):
    other = make_run(tmp_path / "other", start=2.0, seed=5)
    rows = report_of([run, other])["recipes"]["rows"]
    assert [row["key"] for row in rows if row["differs"]] == ["run.folder", "run.seed"]
    assert rows[0]["differs"]


def test_a_shared_page_holds_no_path_no_host_and_no_user(run, tmp_path, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "node-of-mine.example")
    monkeypatch.setenv("LOGNAME", "someone-else")
    folder = make_run(tmp_path / "named", note="seen on node-of-mine by someone-else in /srv/data/x")
    text = page_of(tmp_path / "report.html", folder, options=("--share",))
    data = json.dumps(data_of(text))
    for secret in (str(tmp_path), "/home/someone", "node-of-mine", "someone-else", "/srv/data"):
        assert secret not in data
    assert "training.batch" in data
    assert str(tmp_path) in page_of(tmp_path / "open.html", folder)


def test_a_shared_page_holds_no_relative_path_but_rates_and_names_of_losses(run, tmp_path):
    folder = make_run(tmp_path / "named", note="pictures/of/mine", images="['masks/a b.png', 'masks/c.png']")
    survey = json.loads((folder / "survey.json").read_text())
    survey["lines"].append({"name": "captions", "text": "1 is empty, e.g. holidays/anna/8.jpg"})
    (folder / "survey.json").write_text(json.dumps(survey))
    (folder / "plan.alternatives.json").write_text("seen in pictures/of/mine")
    data = json.dumps(report_of([folder], is_shared=True))
    for path in ("pictures/of/mine", "masks/", "holidays", "anna"):
        assert path not in data
    assert "samples/s" in data
    assert "holidays/anna" in json.dumps(report_of([folder]))


def test_no_token_of_a_tracker_is_in_a_page(run, tmp_path):
    folder = make_run(tmp_path / "tracked", api_key="a-secret-of-mine", note="hf_abcdefghijklmnopqrstuvwx")
    page = page_of(tmp_path / "report.html", folder)
    assert "a-secret-of-mine" not in page
    assert "hf_abcdefghij" not in page
    assert "run.api_key" in page


def test_a_folder_that_is_no_run_and_a_file_that_is_no_plan_are_refused(tmp_path, capsys):
    assert "is not the folder of a run" in refusal(capsys, tmp_path, "--out", tmp_path / "x.html")
    assert "there is no run folder and no plan file" in refusal(
        capsys, tmp_path / "no.json", "--out", tmp_path / "x.html"
    )
    (tmp_path / "text.json").write_text("{}")
    assert 'has no key "format"' in refusal(capsys, tmp_path / "text.json", "--out", tmp_path / "x.html")
    assert not (tmp_path / "x.html").exists()


def test_a_search_keeps_its_layouts_beside_the_plan_and_the_page_shows_them(run, tmp_path, capsys):
    plan = tmp_path / "plan.json"
    files = ["--profile", run / "profile.json", "--cluster", run / "cluster.json"]
    with pytest.raises(SystemExit) as ended:
        main(["plan", *map(str, files), "--batch", "8", "--out", str(plan)])
    assert not ended.value.code
    kept = json.loads((tmp_path / "plan.alternatives.json").read_text())
    part = report_of([plan])["items"][0]["alternatives"]
    assert part["why"] == kept["verdict"]
    assert [row["step"]["value"] for row in part["rows"]] == [one["step"] for one in kept["layouts"]]
    assert [one["is_chosen"] for one in kept["layouts"]].count(True) == 1
    assert "other" in {one["found"] for one in kept["layouts"]}
    step = next(one["step"] for one in kept["layouts"] if one["is_chosen"])
    near = [one["step"] <= 1.015 * step and not one["is_chosen"] and one["found"] != "other" for one in kept["layouts"]]
    assert [row["near"] for row in part["rows"]] == near
    (row,) = report_of([plan])["items"][0]["memory"]["rows"]  # without profile and cluster: as the search has kept it
    chosen = next(one for one in kept["layouts"] if one["is_chosen"])
    assert row["total"]["value"] == chosen["memory"] == sum(one["value"] for one in row["items"])
    assert "parameters" in {one["kind"] for one in row["items"]}
    shutil.copy(run / "plan.json", plan)
    item = report_of([plan])["items"][0]
    assert item["alternatives"]["absent"].endswith("belongs to another plan")
    assert "table of layouts" not in item["memory"]["absent"]
    assert "profile.json" in item["memory"]["absent"]


@pytest.mark.slow
def test_the_page_of_100_000_steps_and_500_pictures_has_less_than_3_mb_beside_its_pictures(tmp_path):
    folder = tmp_path / "long"
    write_metrics(folder, 100_000, every=500)
    write_plan_of(folder)
    write_samples(folder, steps=range(1000, 51_000, 1000), prompts=[f"prompt {number}" for number in range(10)])
    page = page_of(tmp_path / "report.html", folder)
    data = data_of(page)
    pictures = [one for step in data["items"][0]["samples"]["steps"] for one in step["pictures"]]
    assert len(pictures) == 500
    assert len(page.encode()) - sum(len(one["source"]) for one in pictures) < 3e6
    (loss,) = [curve for curve in data["items"][0]["curves"] if curve["id"] == "loss"]
    points = loss["lines"][0]["points"]
    assert max(points[1::2]) > 3  # the one high value of 100,000
    assert len(points) <= 2000
