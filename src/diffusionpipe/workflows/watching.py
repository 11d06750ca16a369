"""`diffusionpipe watch`: the page of a run on this machine's loopback address while the run trains.

    GET  /?token=T             the page
    GET  /data?token=T         its data as JSON, which the page asks for every few seconds
    POST /save, /stop, /draw   ask the run to save, to save and stop, or to draw, by the files that it looks for

The token is random and new for each start. Reading needs it in the address. A request that changes something is a POST
with the token in a header, which no form of another page can send; its Host must be a loopback name, so that no name of
another site leads here, and an Origin must be that host. Every other request changes nothing.
"""

from __future__ import annotations

import hmac
import json
import secrets
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

from diffusionpipe.errors import ConfigError, DiffusionPipeError
from diffusionpipe.workflows.page import html_of, waiting_report, watched_report
from diffusionpipe.workflows.page_recipe import recipe_of

LOOPBACK = "127.0.0.1"
TOKEN_HEADER = "X-DiffusionPipe-Token"
FILES = {"/save": "save", "/stop": "save_quit", "/draw": "draw"}
"""The file of the run folder that each request creates, see `trainer.step.stopping`."""
_HOSTS = ("127.0.0.1", "localhost", "[::1]")
_LONGEST = 4096
"""The most bytes of a request's body; none is needed."""


class Watch(ThreadingHTTPServer):
    """The server of one run's page. It keeps no state of the run: every answer is read from the folder."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0) -> None:
        """Listen on loopback; port 0: any free one.

        Raises:
            ConfigError: the port is taken.
        """
        self.folder, self.token, self.reading = folder, secrets.token_urlsafe(24), Lock()
        try:
            super().__init__((LOOPBACK, port), _Answers)
        except OSError as error:
            raise ConfigError(
                f"port {port} of {LOOPBACK} cannot be used: {error.strerror}; give another --port, or leave it out"
            ) from error

    @property
    def address(self) -> str:
        """The address of the page, with the token."""
        return f"http://{LOOPBACK}:{self.server_address[1]}/?token={self.token}"

    def report(self) -> dict[str, object]:
        """The data of the page as the files are now; before the run has begun, a page that says so."""
        with self.reading:  # one at a time: two readers would not be faster
            try:
                return watched_report(self.folder) if self.folder.is_dir() else waiting_report(self.folder)
            except DiffusionPipeError:
                return waiting_report(self.folder)


def _no_effect(folder: Path, name: str) -> str:
    """The reason why a file of that name in the run folder would do nothing now; empty where it does something."""
    from diffusionpipe.trainer.launching.run_lock import is_held

    if not folder.is_dir():
        return "the run has not begun"
    if not is_held(folder):
        return "no job trains in this folder now, so nothing has been asked"
    recipe = recipe_of(folder)
    if name == FILES["/draw"] and isinstance(recipe, dict) and not isinstance(recipe.get("sampling.every"), int):
        return "the recipe draws nothing; set sampling.every, and this button draws between its steps too"
    return ""


class _Answers(BaseHTTPRequestHandler):
    server: Watch
    server_version, sys_version = "DiffusionPipe", ""

    def do_GET(self) -> None:  # the name that http.server calls
        """Answer with the page or its data."""
        asked = urlsplit(self.path)
        token = parse_qs(asked.query).get("token", [""])[0]
        if not self._is_here() or not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._answer(HTTPStatus.FORBIDDEN, "this needs the whole address that `diffusionpipe watch` has printed")
        elif asked.path == "/":
            self._answer(HTTPStatus.OK, html_of(self.server.report(), is_watched=True), "text/html")
        elif asked.path == "/data":
            text = json.dumps(self.server.report(), ensure_ascii=False, allow_nan=False)
            self._answer(HTTPStatus.OK, text, "application/json")
        else:
            self._answer(HTTPStatus.NOT_FOUND, "there is no such page")

    def do_POST(self) -> None:
        """Ask the run to save, to draw or to stop, if the request comes from the page itself."""
        length = self.headers.get("Content-Length", "0")
        if length.isdigit() and int(length) <= _LONGEST:
            self.rfile.read(int(length))
        token = self.headers.get(TOKEN_HEADER, "")
        if not self._is_here() or not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._answer(HTTPStatus.FORBIDDEN, "only the page of this address may ask for that")
        elif (name := FILES.get(self.path)) is None:
            self._answer(HTTPStatus.NOT_FOUND, "there is no such request")
        elif reason := _no_effect(self.server.folder, name):
            self._answer(HTTPStatus.CONFLICT, reason)
        else:
            try:
                (self.server.folder / name).touch()
            except OSError as error:
                self._answer(HTTPStatus.CONFLICT, f"the file {name} cannot be made: {error.strerror}")
            else:
                self._answer(HTTPStatus.OK, "the run does it after its step")

    def _is_here(self) -> bool:
        """Whether the Host is a loopback name, with any port, and the Origin, if there is one, is that host."""
        host = self.headers.get("Host", "")
        origin = self.headers.get("Origin")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        return name in _HOSTS and origin in (None, f"http://{host}")

    def _answer(self, status: HTTPStatus, text: str, kind: str = "text/plain") -> None:
        body = text.encode()
        self.send_response(status)
        for key, value in (
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
            ("X-Frame-Options", "DENY"),
        ):
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the address in each line would show the token."""
