"""A notebook with the plan, its table and a run as values of cells: run by nbclient, opened in a headless Chromium."""

from html import escape

import pytest
from kit.browser import Tab, browsing, needs_browser

needs_browser("nbclient", "ipykernel")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]

FIRST = """
import torch
import diffusionpipe as dp

layers = [torch.nn.Linear(4, 4) for _ in range(4)]
batch = (torch.ones(8, 4), torch.zeros(8, 4))
model = dp.pipeline(layers, loss=lambda out, target: ((out - target) ** 2).mean(1), example=batch)
profile = dp.profile(model, analytic="cpu-1-thread")
choice = dp.plan(profile, cluster="cpux2", batch=8, stages=2, microbatches=2)
choice
"""
CELLS = (
    FIRST,
    "choice.table()",
    "run = dp.run(model, choice.plan)\nrun.step(*batch)\nrun",
    "run.close()",
)


def executed():
    """The HTML of each cell's value."""
    from nbclient import NotebookClient
    from nbformat.v4 import new_code_cell, new_notebook

    notebook = new_notebook(cells=[new_code_cell(source) for source in CELLS])
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    found = [
        [one["data"]["text/html"] for one in cell.outputs if "text/html" in one.get("data", {})]
        for cell in notebook.cells
    ]
    return [texts[0] for texts in found if texts]


def test_plan_table_and_run_show_themselves_and_stay_in_their_cells(tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    cells = executed()
    assert len(cells) == 3
    page = tmp_path / "notebook.html"
    sources = "".join(
        f"<pre>{escape(source)}</pre><div class=cell>{cell}</div>" for source, cell in zip(CELLS, cells, strict=False)
    )
    page.write_text(
        f"<!doctype html><html data-ready><style>td {{ color: rgb(1, 2, 3) }}</style><body>{sources}</body></html>",
        encoding="utf-8",
    )
    with browsing() as browser:
        tab = Tab(browser, page)
        frames = [frame for frame in tab.page.frames if frame != tab.page.main_frame]
        assert len(frames) == 2
        for frame, source in zip(frames, ("predicted", "measured"), strict=True):
            frame.wait_for_selector("html[data-ready]")
            assert source in frame.locator("#timeline .lead").inner_text()
            assert frame.locator("td").first.evaluate("one => getComputedStyle(one).color") != "rgb(1, 2, 3)"
            with pytest.raises(Exception, match=r"cross-origin|Blocked"):
                frame.evaluate("parent.document.title")
        assert [url for url in tab.left if not url.startswith("about:")] == []
        assert tab.said == []
        assert tab.page.evaluate("typeof dp") == "undefined"
        assert tab.page.locator("table th").first.inner_text() == "layout"
        assert (
            tab.page.locator(".cell > table td").first.evaluate("one => getComputedStyle(one).color") == "rgb(1, 2, 3)"
        )
