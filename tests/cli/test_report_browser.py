import json
import re
import sys
import tomllib
from contextlib import contextmanager
from random import Random
from statistics import fmean, median
from threading import Thread

import pytest
from kit.browser import Tab, browsing, needs_browser
from kit.report_runs import SCRIPT, make_run, write_plan_of
from planner import synthetic

import diffusionpipe as dp
from diffusionpipe.ir.files import read_timeline
from diffusionpipe.trainer.launching.run_lock import acquire
from diffusionpipe.workflows.report.changes import change_of
from diffusionpipe.workflows.report.page import report_page
from diffusionpipe.workflows.report.watching import Watch

needs_browser()
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]

MOST_BARS = 8000


@pytest.fixture(scope="module")
def browser():
    with browsing() as opened:
        yield opened


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("pages") / "birds", steps=400)


@pytest.fixture(scope="module")
def pages(run, tmp_path_factory):
    """The pages of a run, of a plan of 64 ranks with 500 actions and more each, and of two runs."""
    folder = tmp_path_factory.mktemp("reports")
    write_plan_of(folder / "large", stages=64, microbatches=85, ranks=64, measured=False, layers=128)
    other = make_run(folder / "other", start=2.0, steps=300, seed=1)
    sources = {"run": [run], "plan": [folder / "large/plan.json"], "two": [run, other]}
    for name, found in sources.items():
        (folder / f"{name}.html").write_text(report_page(found), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in sources}


@pytest.mark.parametrize("name", ["run", "plan", "two"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_opens_without_a_request_and_without_an_error(browser, pages, name, scheme):
    tab = Tab(browser, pages[name], scheme=scheme)
    assert tab.left == []
    assert tab.said == []
    assert tab.page.evaluate("document.querySelectorAll('data.figure').length") > 20


def test_a_narrow_page_does_not_scroll_sideways(browser, pages):
    for name in ("run", "two"):
        tab = Tab(browser, pages[name], width=400)
        assert tab.page.evaluate("document.documentElement.scrollWidth") == 400


def test_pictures_are_shown_without_scrolling_to_them(browser, pages):
    """So a printed page and a picture of the whole page have them."""
    tab = Tab(browser, pages["run"], width=400)
    widths = tab.page.evaluate("[...document.querySelectorAll('.pictures img')].map((one) => one.naturalWidth)")
    assert widths
    assert all(widths)


def value_in(folder, file, key):
    """The number that a key names in a file of a run, computed without the code of the page; None for other keys."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if file == "metrics.jsonl":
        if found := re.fullmatch(r"(\w+) @ step (\d+)", key):
            return next(row[found[1]] for row in rows if row["step"] == int(found[2]) and found[1] in row)
        if found := re.fullmatch(r"(median|mean)\((\w+)\) of steps (\d+) to (\d+)", key):
            span = range(int(found[3]), int(found[4]) + 1)
            values = [row[found[2]] for row in rows if row["step"] in span and found[2] in row]
            return {"median": median, "mean": fmean}[found[1]](values)
        if found := re.fullmatch(r"smoothed\((\w+)\) @ step (\d+)", key):
            points = [(row["step"], row[found[1]]) for row in rows if found[1] in row]
            place = [step for step, _ in points].index(int(found[2]))
            half = min(len(points) // 40, place)
            return fmean(value for _, value in points[place - half : place + half + 1])
        if key == "last(step)":
            return max(row["step"] for row in rows if "loss" in row)
    if file == "recipe.toml":
        value = tomllib.loads((folder / file).read_text())
        for part in key.split("."):
            value = value[part]
        return value
    if file == "cluster.json":
        found = re.fullmatch(r"devices\[(\d+)\]\.memory", key)
        return json.loads((folder / file).read_text())["devices"][int(found[1])]["memory"]
    if file == "timeline.json":
        timeline = read_timeline(folder / file)
        if key == "step of the timeline":
            return max(one.end for one in (*timeline.spans, *timeline.update))
        if found := re.fullmatch(r"forward, rank (\d+)", key):
            spans = [one for one in timeline.spans if one.worker == int(found[1]) and one.action.op == "F"]
            return sum(one.end - one.start for one in spans)
    return None


def number_of(text):
    """The number that a text shows, in the unit of the file."""
    number, _, unit = text.replace(",", "").partition(" ")
    scale = {"ms": 1e-3, "GiB": 2**30, "MiB": 2**20}.get(unit, 1.0)
    if number.endswith("%"):
        number, scale = number[:-1], 0.01
    return float(number) * scale


def test_each_number_that_is_shown_is_that_of_its_file(browser, pages, run):
    tab = Tab(browser, pages["run"])
    shown = tab.page.evaluate(
        "[...document.querySelectorAll('data.figure')].map(e => [e.textContent, e.dataset.file, e.dataset.key])"
    )
    assert [one for one in shown if not one[1] or not one[2]] == []
    compared = dict.fromkeys(("metrics.jsonl", "recipe.toml", "cluster.json", "timeline.json"), 0)
    for text, file, key in shown:
        value = value_in(run, file, key)
        if value is not None:
            assert number_of(text) == pytest.approx(value, rel=6e-3), (text, file, key)
            compared[file] += 1
    assert all(compared.values())
    assert compared["metrics.jsonl"] >= 15


def test_captions_are_shown_as_texts_and_never_run(browser, pages):
    tab = Tab(browser, pages["run"])
    assert tab.page.title() == "birds - DiffusionPipe"
    captions = tab.page.eval_on_selector_all("#samples figcaption", "all => all.map(one => one.textContent)")
    assert captions == ["a red cat", SCRIPT, "חתול אדום"]


def test_a_frame_draws_at_most_8000_bars_at_every_zoom_and_says_what_it_merges(browser, pages):
    tab = Tab(browser, pages["plan"])
    tab.page.locator("#timeline .frame").scroll_into_view_if_needed()
    merged, times = [], []
    for _ in range(14):
        frame = tab.page.locator("#timeline .frame")
        assert 0 < int(frame.get_attribute("data-bars")) <= MOST_BARS
        times.append(float(frame.get_attribute("data-ms")))
        merged.append("merged" in tab.page.locator("#timeline [role=note]").inner_text())
        tab.page.get_by_label("Zoom in").click()
    sys.stdout.write(f"milliseconds of a frame: {times}\n")
    assert merged[0]
    assert not merged[-1]


def test_merged_bars_keep_the_idle_part_of_their_time(browser, pages):
    tab = Tab(browser, pages["plan"])
    busy = """() => {
      const data = JSON.parse(document.getElementById('data').textContent).items[0].timeline;
      const drawn = new dp.Timeline(data);
      Object.assign(drawn, { width: 500, height: 520, gutter: 84, offset: 0, from: 0, to: drawn.length });
      let bucket = drawn.length / 20, bars = drawn.collect(0, drawn.length, 26, 520, bucket);
      const sum = {};
      for (const bar of bars) {
        const key = `${bar.line.row.worker}/${bar.lane}`;
        sum[key] = (sum[key] || 0) + bar.busy;
        if (bar.count > 1 && bar.lane === 0 && bar.busy > 1.001 * (bar.end - bar.start)) throw new Error('busy');
      }
      const wrong = [];
      for (const line of drawn.lines.filter((one) => one.lanes)) line.lanes.forEach((spans, lane) => {
        const key = `${line.row.worker}/${lane}`;
        const whole = spans.reduce((total, one) => total + one.end - one.start, 0);
        if (key in sum && Math.abs(sum[key] - whole) > 1e-6 * whole) wrong.push([key, sum[key], whole]);
      });
      return { wrong, merged: bars.filter((bar) => bar.count > 1).length };
    }"""
    found = tab.page.evaluate(busy)
    assert found["wrong"] == []
    assert found["merged"] > 100


def test_dragging_draws_the_strip_that_comes_into_view_and_the_same_picture(browser, pages):
    tab = Tab(browser, pages["run"])
    frame = tab.page.locator("#timeline .frame")
    frame.scroll_into_view_if_needed()
    for _ in range(3):
        tab.page.get_by_label("Zoom in").click()
    whole = int(frame.get_attribute("data-bars"))
    box = frame.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + 60
    tab.page.mouse.move(x, y)
    tab.page.mouse.down()
    tab.page.mouse.move(x - 40, y)
    assert frame.get_attribute("data-part") == "strip"
    assert int(frame.get_attribute("data-bars")) < whole
    picture = "document.querySelector('#timeline canvas').toDataURL()"
    dragged = tab.page.evaluate(picture)
    tab.page.mouse.up()  # draws the whole frame again
    assert frame.get_attribute("data-part") == "whole"
    assert differing(dragged, tab.page.evaluate(picture)) < 0.002


def differing(one, other):
    """The part of the pixels of two pictures that clearly differ."""
    from base64 import b64decode
    from io import BytesIO

    import numpy as np
    from PIL import Image

    first, second = (
        np.asarray(Image.open(BytesIO(b64decode(url.partition(",")[2]))).convert("RGB"), dtype=int)
        for url in (one, other)
    )
    return float((np.abs(first - second).max(axis=2) > 60).mean())


def test_the_keyboard_reaches_every_action_of_the_timeline_and_each_is_read_out(browser, pages, run):
    tab = Tab(browser, pages["run"])
    tab.page.locator("#timeline .frame").focus()
    counts = tab.page.evaluate(
        """JSON.parse(document.getElementById('data').textContent).items[0].timeline.timelines
             .flatMap((one) => one.rows.map((row) => row.spans.length / 3))"""
    )
    read = set()
    for place, count in enumerate(counts):
        if place:
            tab.page.keyboard.press("ArrowDown")
        tab.page.keyboard.press("Home")
        for _ in range(count):
            read.add(tab.page.locator("#timeline-reading").inner_text())
            tab.page.keyboard.press("ArrowRight")
    assert len(read) == sum(counts)
    assert any("forward, stage 0, micro-batch 0 (0F0)" in text for text in read)


def test_an_action_shows_its_layers(browser, pages):
    tab = Tab(browser, pages["run"])
    tab.page.locator("#timeline .frame").focus()
    tab.page.keyboard.press("Home")
    for _ in range(12):
        if "forward, stage 0" in tab.page.locator("#timeline-reading").inner_text():
            break
        tab.page.keyboard.press("ArrowRight")
    facts = tab.page.locator("#timeline .facts").inner_text()
    assert "3 layers" in facts
    assert "measured:" in facts


def test_the_data_are_shown_by_size_with_their_warnings_and_markup_stays_text(browser, pages):
    tab = Tab(browser, pages["run"])
    rows = tab.page.locator("#training-data table").first.locator("tbody tr")
    assert [text.split() for text in rows.all_inner_texts()] == [
        ["768", "x", "384", "90", "75.0%", "4.0%", "1.25\u00d7"],
        ["512", "x", "512", "30", "25.0%", "25.0%", "not", "enlarged"],
    ]
    warned = tab.page.locator("#training-data .tag").locator("xpath=..").inner_text()
    assert warned == f"look 3 are empty, e.g. {SCRIPT}"


def test_the_slider_shows_the_samples_of_its_step(browser, pages):
    tab = Tab(browser, pages["run"])
    assert tab.page.locator("#samples h3").first.inner_text() == "step 200"
    tab.page.get_by_label("Step", exact=True).focus()
    tab.page.keyboard.press("ArrowLeft")
    assert tab.page.locator("#samples h3").first.inner_text() == "step 100"


def test_frozen_components_have_the_colours_of_the_timeline_in_every_bar(browser, tmp_path):
    write_plan_of(tmp_path / "plan", filled=synthetic.transformer(blocks=6), measured=False)
    (tmp_path / "plan.html").write_text(report_page([tmp_path / "plan/plan.json"]), encoding="utf-8")
    for scheme in ("light", "dark"):
        tab = Tab(browser, tmp_path / "plan.html", scheme=scheme)
        legend = """(root) => Object.fromEntries([...document.querySelectorAll(`${root} .legend li`)].map((one) =>
          [one.textContent, getComputedStyle(one.querySelector('.patch')).backgroundColor]))"""
        timeline, waits = (tab.page.evaluate(legend, part) for part in ("#timeline", "#waits"))
        pieces = tab.page.evaluate("""[...document.querySelectorAll('.stack:not(.memory) span')].map((one) =>
          [one.title.replace(/ [0-9.]+%$/, ''), getComputedStyle(one).backgroundColor])""")
        frozen = {name: colour for name, colour in timeline.items() if name.startswith("frozen")}
        assert len(set(frozen.values())) == len(frozen) >= 2
        assert frozen.keys() <= waits.keys() & {name for name, _ in pieces}
        assert {name: timeline[name] for name in timeline.keys() & waits.keys()}.items() <= waits.items()
        assert all(timeline[name] == colour for name, colour in pieces if name in timeline)


def test_parts_of_a_plan_that_cannot_be_read_say_so_once(browser, tmp_path):
    run = make_run(tmp_path / "birds", steps=30)
    (run / "plan.json").write_text('{"format": "diffusionpipe-plan", "ver')
    (tmp_path / "run.html").write_text(report_page([run]), encoding="utf-8")
    tab = Tab(browser, tmp_path / "run.html")
    assert tab.page.locator("main section:visible .absent").count() == 1
    assert tab.page.locator("#why h2").inner_text() == "Layout, step, waits, memory and stages"
    assert tab.page.locator(".links a:visible").all_inner_texts() == ["Curves", "Samples", "Layout", "Data", "Recipe"]


def test_two_runs_show_their_differences_first_and_align_by_samples(browser, pages):
    tab = Tab(browser, pages["two"])
    first = tab.page.eval_on_selector("main > section", "one => one.id")
    assert first == "differences"
    keys = tab.page.eval_on_selector_all(
        "#differences tbody tr td:first-child", "all => all.map(one => one.textContent)"
    )
    assert keys == ["run.folder", "run.seed"]
    tab.page.get_by_label("Align the runs by").select_option("samples")
    assert tab.said == []


@pytest.mark.parametrize("name", ["run", "plan", "two"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_and_names_pass_axe(browser, pages, name, scheme):
    assert axe_faults(Tab(browser, pages[name], scheme=scheme)) == []


def axe_faults(tab):
    from axe_playwright_python.sync_playwright import Axe

    tab.page.evaluate("document.querySelector('meta[http-equiv]').remove()")
    found = Axe().run(tab.page).response["violations"]
    return [(one["id"], [node["html"][:150] for node in one["nodes"][:3]]) for one in found]


def test_cells_of_a_notebook_ask_for_nothing_and_reach_neither_each_other_nor_the_page(browser, tmp_path):
    profile = synthetic.chain([0.01] * 6, parameters=[10**6] * 6, elements=10**5, frozen=0.0)
    choice = dp.plan(profile, cluster=synthetic.cluster(2), batch=8)
    cells = [choice._repr_html_(), choice._repr_html_(), choice.table()._repr_html_()]
    path = tmp_path / "notebook.html"
    path.write_text(
        "<!doctype html><html data-ready><style>body { background: rgb(1, 2, 3) }</style><body>"
        f"{''.join(f'<div class=cell>{cell}</div>' for cell in cells)}</body></html>",
        encoding="utf-8",
    )
    tab = Tab(browser, path)
    frames = [frame for frame in tab.page.frames if frame != tab.page.main_frame]
    assert len(frames) == 2
    for frame in frames:
        frame.wait_for_selector("html[data-ready]")
        assert frame.locator("#timeline canvas").count() == 2
        with pytest.raises(Exception, match=r"cross-origin|Blocked"):
            frame.evaluate("parent.document.title")
    assert [url for url in tab.left if not url.startswith("about:")] == []
    assert tab.said == []
    assert tab.page.evaluate("typeof dp") == "undefined"
    assert tab.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(1, 2, 3)"
    assert tab.page.locator("table th").first.inner_text() == "layout"


def test_a_watched_run_grows_in_the_browser_and_is_saved_by_its_button(browser, tmp_path):
    from playwright.sync_api import expect

    folder = make_run(tmp_path / "live", steps=30)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with acquire(folder), Watch(folder) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        page = browser.new_context().new_page()
        asked, said = [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.goto(server.address)
        page.wait_for_selector("html[data-ready]")
        assert "30 of 400" in page.locator(".facts-row").inner_text()
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 31, "loss": 0.25, "step_s": 0.05}\n')
        expect(page.locator(".facts-row")).to_contain_text("31 of 400", timeout=15000)
        page.get_by_role("button", name="Save now").click()
        expect(page.locator(".controls [role=status]")).to_contain_text("after its step")
        assert (folder / "save").exists()
        page.close()
        server.shutdown()
        thread.join()
    after = {path: path.read_bytes() for path in before if path.name != "metrics.jsonl"}
    assert after == {path: content for path, content in before.items() if path.name != "metrics.jsonl"}
    assert said == []
    own = f"http://127.0.0.1:{server.server_address[1]}/"
    assert [url for url in asked if not url.startswith((own, "data:"))] == []


@contextmanager
def watching(browser, folder):
    """A page of a run that is watched, and its server."""
    with Watch(folder) as server:
        server.rest = 0
        thread = Thread(target=server.serve_forever)
        thread.start()
        page = browser.new_context().new_page()
        page.goto(server.address)
        page.wait_for_selector("html[data-ready]")
        try:
            yield page, server
        finally:
            page.close()
            server.shutdown()
            thread.join()


def test_a_watched_page_shows_what_the_run_writes_later_and_has_buttons_only_while_it_trains(browser, tmp_path):
    from playwright.sync_api import expect

    folder = make_run(tmp_path / "live", steps=30)
    with (folder / "recipe.toml").open("a") as recipe:
        recipe.write("[sampling]\nevery = 100\n")
    later = {name: (folder / name).read_bytes() for name in ("timeline.json", "survey.json", "profile.json")}
    for name in (*later, "ended.json"):
        (folder / name).unlink()
    job = acquire(folder)
    with watching(browser, folder) as (page, _):
        buttons = page.locator(".controls button")
        assert [buttons.nth(place).is_enabled() for place in range(3)] == [True, True, True]
        for part in ("memory", "training-data"):
            expect(page.locator(f"#{part} .absent")).to_be_visible()
        for name, text in later.items():
            (folder / name).write_bytes(text)
        expect(page.locator("#memory .stack")).to_have_count(2, timeout=15000)
        expect(page.locator("#training-data table")).to_have_count(2, timeout=15000)
        expect(page.locator("#waits h3").first).to_contain_text("Measured step", timeout=15000)
        expect(page.locator("#timeline .lead")).to_contain_text("measured below", timeout=15000)
        (folder / "ended.json").write_text("{}")
        job.release()
        expect(buttons.first).to_be_disabled(timeout=15000)
        assert [buttons.nth(place).is_disabled() for place in range(3)] == [True, True, True]
        expect(page.locator("#refusals")).to_have_text("no job trains in this folder now, so there is nothing to ask")
        expect(page.locator(".state")).to_have_text("finished")


def test_a_page_whose_server_has_ended_says_since_when_its_numbers_are_old(browser, tmp_path):
    from playwright.sync_api import expect

    folder = make_run(tmp_path / "live", steps=30)
    with watching(browser, folder) as (page, _):
        assert page.locator("#silence").is_hidden()
        page.route("**/data*", lambda route: route.abort())
        expect(page.locator("#silence")).to_have_text(
            re.compile(r"No answer since \d\d:\d\d:\d\d; the numbers below are old\."), timeout=15000
        )
        page.unroute("**/data*")
        expect(page.locator("#silence")).to_be_hidden(timeout=15000)


def test_the_page_applies_changes_as_the_server_makes_them(browser, pages):
    random = Random(0)

    def value(depth):
        if not depth or random.random() < 0.3:
            return random.choice([None, 0, 1, 2, "a", "b"])
        size = random.randrange(5)
        if random.random() < 0.5:
            return [value(depth - 1) for _ in range(size)]
        return {key: value(depth - 1) for key in random.sample("abcd", min(size, 4))}

    pairs = [(value(3), value(3)) for _ in range(2000)]
    cases = [[old, change_of(old, new)] for old, new in pairs]
    made = Tab(browser, pages["run"]).page.evaluate("all => all.map(([old, change]) => dp.changed(old, change))", cases)
    assert made == [new for _, new in pairs]


def test_a_page_asks_again_only_after_the_last_answer(browser, tmp_path):
    folder = make_run(tmp_path / "live", steps=30)
    with watching(browser, folder) as (page, server):
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        with server._reading:  # as a reading that takes long
            page.wait_for_timeout(7000)
        assert len(asked) == 1


def test_links_of_a_frame_go_to_its_sections_and_leave_the_notebook_where_it_is(browser, tmp_path):
    profile = synthetic.chain([0.01] * 6, parameters=[10**6] * 6, elements=10**5, frozen=0.0)
    cell = dp.plan(profile, cluster=synthetic.cluster(2), batch=8)._repr_html_()
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><html data-ready><body>{cell}</body></html>", encoding="utf-8")
    tab = Tab(browser, path)
    (frame,) = (frame for frame in tab.page.frames if frame != tab.page.main_frame)
    frame.wait_for_selector("html[data-ready]")
    top = "document.querySelector('#memory').getBoundingClientRect().top"
    assert frame.evaluate(top) > 700
    frame.get_by_role("link", name="Memory").click()
    for _ in range(50):
        if frame.evaluate(top) < 400:  # it glides there
            break
        tab.page.wait_for_timeout(100)
    assert frame.evaluate(top) < 400
    assert frame.evaluate("document.activeElement.id") == "memory"
    assert [url for url in tab.left if not url.startswith("about:")] == []
    assert frame.url == "about:srcdoc"


@pytest.mark.parametrize("name", ["run", "plan", "two"])
def test_tables_that_are_wider_than_a_narrow_screen_say_so_until_their_end(browser, pages, name):
    tab = Tab(browser, pages[name], width=400)
    frames = """[...document.querySelectorAll('.scroll')].filter((one) => one.clientWidth).map((one) => [
      one.scrollWidth - one.clientWidth > 1, !one.previousElementSibling.hidden,
      one.classList.contains('more-right')])"""
    found = tab.page.evaluate(frames)
    assert any(is_cut for is_cut, _, _ in found)
    assert [one for one in found if len(set(one)) > 1] == []
    tab.page.evaluate("document.querySelectorAll('.scroll').forEach((one) => { one.scrollLeft = one.scrollWidth; })")
    tab.page.wait_for_timeout(300)
    assert not any(is_marked for _, _, is_marked in tab.page.evaluate(frames))
    assert tab.page.evaluate("document.documentElement.scrollWidth") == 400


@pytest.mark.parametrize("name", ["run", "plan", "two"])
def test_the_keyboard_reaches_the_file_and_the_key_of_each_number(browser, pages, name):
    tab = Tab(browser, pages[name], width=400)
    for summary in tab.page.locator(".sources > summary").all():
        summary.focus()
        tab.page.keyboard.press("Enter")
    tab.page.wait_for_timeout(300)
    titles = set(tab.page.eval_on_selector_all("data.figure[title]", "all => all.map((one) => one.title)"))
    rows = tab.page.eval_on_selector_all(
        ".sources tbody tr", "all => all.map((row) => `${row.children[1].textContent}: ${row.children[2].textContent}`)"
    )
    assert len(titles) > 20
    assert titles <= set(rows)
    assert axe_faults(tab) == []


def test_curves_of_several_runs_are_told_apart_and_all_are_read(browser, tmp_path):
    runs = [make_run(tmp_path / name, steps=60, start=start) for name, start in (("one", 1.0), ("two", 40.0))]
    for run in runs:
        with (run / "metrics.jsonl").open("a") as file:
            times = {f"validation_loss_t{time}": 0.1 + time / 1000 for time in (100, 300, 500, 700, 900)}
            file.write(json.dumps({"step": 60, **times}) + "\n" + json.dumps({"step": 61, **times}) + "\n")
    (tmp_path / "two.html").write_text(report_page(runs), encoding="utf-8")
    tab = Tab(browser, tmp_path / "two.html")
    chart = tab.page.locator(".chart", has_text="Validation loss by time")
    styles = chart.locator("path.curve").evaluate_all(
        "all => all.map((one) => [one.style.getPropertyValue('--own'), one.getAttribute('stroke-dasharray')].join())"
    )
    assert len(styles) == len(set(styles)) == 10
    assert chart.locator(".reading data").count() == 10
    assert chart.locator(".legend li").count() == 10
    loss = tab.page.locator("#curves .chart").first
    assert "logarithmic scale" in loss.locator("figcaption").inner_text()
    assert "logarithmic scale" not in chart.locator("figcaption").inner_text()
    names = tab.page.locator("#curves figcaption strong").all_inner_texts()
    assert "Waiting for the batch" in names
    assert not any(name.endswith((" s", " gib")) for name in names)
