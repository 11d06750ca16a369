"""A headless Chromium for tests of pages. Where it is missing they are skipped, but not where NEEDS_BROWSER is set."""

import os
import shutil
from contextlib import contextmanager
from importlib.util import find_spec

import pytest

PATH = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)


def needs_browser(*packages):
    """Skip the tests of this module where Chromium, playwright or one of these packages is missing."""
    missing = [name for name in ("playwright", *packages) if find_spec(name) is None]
    found = f"{missing[0]} is not installed" if missing else "" if PATH else "chromium is not installed"
    if found and not os.environ.get("NEEDS_BROWSER"):
        pytest.skip(found, allow_module_level=True)
    assert not found, found


@contextmanager
def browsing():
    """A browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        # Chromium's own sandbox needs rights that containers lack; the pages are ours.
        browser = driver.chromium.launch(executable_path=PATH, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    """A page in a tab, with all that it asked for and said."""

    def __init__(self, browser, path, *, width=1280, scheme="light"):
        self.page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
        self.asked, self.said = [], []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready]")
        self.page.wait_for_timeout(150)

    @property
    def left(self):
        """Requests other than for the file itself and for pictures in it."""
        return [url for url in self.asked[1:] if not url.startswith("data:")]
