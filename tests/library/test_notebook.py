import json
import re
from html import unescape

import pytest
import torch
from planner import synthetic

import diffusionpipe as dp


@pytest.fixture(scope="module")
def choice():
    profile = synthetic.chain([0.01] * 6, parameters=[10**6] * 6, elements=10**5, frozen=0.0)
    return dp.plan(profile, cluster=synthetic.cluster(2), batch=8)


def page_in(frame):
    """The page that a frame holds, and its data."""
    page = unescape(re.fullmatch(r"<iframe [^>]*srcdoc=\"([^\"]*)\"></iframe>", frame)[1])
    return page, json.loads(page.partition('id="data">')[2].partition("</script>")[0])


def test_a_plan_shows_its_page_in_a_frame_of_its_own(choice):
    frame = choice._repr_html_()
    assert 'sandbox="allow-scripts"' in frame
    page, data = page_in(frame)
    (item,) = data["items"]
    assert "default-src 'none'" in page
    assert item["predicted"]["value"] == choice.timeline.spans.step
    rows = item["alternatives"]["rows"]
    assert [row["step"]["value"] for row in rows] == [row.step for row in choice.rows]
    assert [row["chosen"] for row in rows].count(True) == 1
    assert "has not run yet" in item["timeline"]["notes"][-1]


def test_the_table_of_a_plan_is_the_same_text_and_a_table_in_a_notebook(choice):
    table = choice.table()
    first, *lines = table.splitlines()
    assert first.split() == ["layout", "step", "ms", "idle", "peak"]
    shown = re.findall(r"<td>([^<]*)</td>", table._repr_html_())
    assert len(shown) == 4 * len(lines)
    assert [shown[4 * place] in line for place, line in enumerate(lines)] == [True] * len(lines)


def test_a_run_shows_its_measured_step_and_before_it_the_reason_why_there_is_none():
    layers = [torch.nn.Linear(4, 4) for _ in range(4)]
    batch = (torch.ones(8, 4), torch.zeros(8, 4))
    model = dp.pipeline(layers, loss=lambda out, target: ((out - target) ** 2).mean(1), example=batch)
    plan = dp.plan(dp.profile(model, analytic="cpu-1-thread"), cluster="cpux2", batch=8, stages=2, microbatches=2).plan
    with dp.run(model, plan) as run:
        _, data = page_in(run._repr_html_())
        assert "no step has been measured yet" in data["items"][0]["timeline"]["absent"]
        run.step(*batch)
        _, data = page_in(run._repr_html_())
        (timeline,) = data["items"][0]["timeline"]["timelines"]
        assert timeline["source"] == "measured"
        assert len(timeline["rows"]) == 2
        losses = [run.step(*batch) for _ in range(20)]
    _, data = page_in(run._repr_html_())  # after the end too
    (item,) = data["items"]
    (timeline,) = item["timeline"]["timelines"]
    loss = next(curve for curve in item["curves"] if curve["id"] == "loss")["lines"][0]
    assert loss["points"][::2] == list(range(1, 22))
    assert loss["points"][3::2] == pytest.approx(losses, rel=1e-5)
    assert (item["kind"], item["speed"]["step"]["file"]) == ("run", "this run")
    assert timeline["source"] == "measured"
    assert run.timeline().spans.num_workers == 2
    assert "metrics.jsonl" not in json.dumps(data)
