"""A run that trains, watched and asked in a headless Chromium, beside the same run alone."""

from threading import Thread

import pytest
from kit.browser import browsing, needs_browser
from kit.forked_jobs import ForkedCommand
from kit.tiny_runs import losses_of, recipe_of, save_pictures, save_stable_diffusion, tensors_of

from diffusionpipe.trainer.checkpoints.checkpoint_folder import latest
from diffusionpipe.workflows.report.watching import Watch

needs_browser()
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]

PATIENCE = 60_000
"""Milliseconds."""


def ended(job):
    status, said = job.end()
    assert status in (0, 75), said
    return status


def recipe_in(place, name, steps):
    return recipe_of(
        place / "sd",
        place / "data",
        place / name,
        training={"steps": steps},
        sampling={"every": 50_000, "steps": 2, "prompts": ("a b", "c")},
        checkpoint={"every": 50_000},
    )


def test_a_run_that_is_watched_saved_drawn_and_stopped_in_the_browser_is_the_run_alone(tmp_path):
    from playwright.sync_api import expect

    save_stable_diffusion(tmp_path / "sd")
    save_pictures(tmp_path / "data")
    watched = recipe_in(tmp_path, "watched", 100_000)
    folder = watched.run.folder
    with browsing() as browser, Watch(folder) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        page = browser.new_context().new_page()
        page.goto(server.address)
        expect(page.locator("h1")).to_contain_text("has not begun")  # the page is opened first
        job = ForkedCommand(watched, ranks=2)
        try:
            step = page.locator(".facts-row dd").first
            expect(step).to_contain_text("of 100,000", timeout=PATIENCE)
            shown = step.inner_text()
            expect(step).not_to_have_text(shown, timeout=PATIENCE)  # it grows
            status = page.locator(".controls [role=status]")
            for name in ("Save now", "Draw now"):
                page.get_by_role("button", name=name).click()
                expect(status).to_contain_text("after its step")
            expect(page.locator("#samples figure")).to_have_count(2, timeout=PATIENCE)
            assert list((folder / "samples").glob("step-*/*.png"))
            job.await_event(lambda: latest(folder) is not None, "a checkpoint")
            page.close()
            other = browser.new_context().new_page()
            other.goto(server.address)
            other.get_by_role("button", name="Save and stop").click()
            assert ended(job) == 75
            expect(other.locator(".state")).to_contain_text("stopped before its last step", timeout=PATIENCE)
            expect(other.get_by_role("button", name="Draw now")).to_be_disabled(timeout=PATIENCE)
            expect(other.locator("#refusals")).to_contain_text("no job trains in this folder")
        finally:
            job.kill_all()
            server.shutdown()
    losses = losses_of(folder)
    alone = recipe_in(tmp_path, "alone", max(losses))
    job = ForkedCommand(alone, ranks=2)
    try:
        assert ended(job) == 0
    finally:
        job.kill_all()
    assert losses_of(alone.run.folder) == losses
    saved, expected = tensors_of(latest(folder)), tensors_of(latest(alone.run.folder))
    assert saved.keys() == expected.keys()
    assert all(tensor.equal(expected[name]) for name, tensor in saved.items())
