"""`diffusionpipe watch`: the page of a run on this machine's loopback address while the run trains.

    GET  /?token=T             the page
    GET  /data?token=T         its data as JSON, which the page asks for again and again: 304 where it has them, and
                               the change since those that it has, if the server still keeps these
    POST /save, /stop, /draw   ask the run to save, to save and stop, or to draw, by the files that it looks for

The token is random and new for each start. Reading needs it in the address. A request that changes something is a POST
with the token in a header, which no form of another page can send; its Host must be a loopback name, so that no name of
another site leads here, and an Origin must be that host. Every other request changes nothing.

The server reads again only what has changed, and rests after each reading for fifty times its CPU time. In between it
gives the last answer, so pages that ask more, or that were closed, cost a training next to nothing.
"""

from __future__ import annotations

import hmac
import json
import secrets
import sys
import time
from collections.abc import Hashable
from dataclasses import dataclass
from hashlib import sha256
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

from diffusionpipe.errors import ConfigError
from diffusionpipe.workflows.report.changes import change_of
from diffusionpipe.workflows.report.page import html_of, waiting_report, watched_report
from diffusionpipe.workflows.report.run_files import RunFiles
from diffusionpipe.workflows.report.run_folder import check_run_to_come, is_run

LOOPBACK = "127.0.0.1"
TOKEN_HEADER = "X-DiffusionPipe-Token"
FILES = {"/save": "save", "/stop": "save_quit", "/draw": "draw"}
"""The file of the run folder that each request creates, see `trainer.step.stopping`."""
_HOSTS = ("127.0.0.1", "localhost", "[::1]")
REST, _LONGEST_REST = 50, 60.0
"""The pause after a reading as a multiple of its CPU time, and the longest pause in seconds."""
_KEPT = 4
"""The number of the last states of the data that are kept; a page with an older state gets all data again."""
_LONGEST = 4096
"""The most bytes of a request's body; none is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageAnswer:
    """The data of a watched page at one reading, with an entity tag."""

    report: dict[str, object]
    state: str
    """An entity tag, which differs when the data do."""

    @property
    def embedded(self) -> dict[str, object]:
        """The data of a whole page, with their state."""
        return {**self.report, "state": self.state}


class Watch(ThreadingHTTPServer):
    """The local HTTP server of one run's page. Mutable: keeps its last answer and the parts that it has read."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0) -> None:
        """Listen on loopback; port 0: any free one.

        Raises:
            ConfigError: the path cannot be the folder of a run, or the port is taken.
        """
        check_run_to_come(folder)
        self.folder, self.token = folder, secrets.token_urlsafe(24)
        self._files, self._reading, self._rests_until = RunFiles(folder), Lock(), 0.0
        self.rest: float = REST
        """CPU seconds of a reading, times this, are the least time until the next one."""
        self._state: Hashable = None
        self._kept: list[PageAnswer] = []
        try:
            super().__init__((LOOPBACK, port), _Answers)
        except OSError as error:
            raise ConfigError(
                f"port {port} of {LOOPBACK} cannot be used: {error.strerror}; give another --port, or leave it out"
            ) from error

    @property
    def address(self) -> str:
        """The URL of the page, with the token that it asks for."""
        return f"http://{LOOPBACK}:{self.server_address[1]}/?token={self.token}"

    def answer(self) -> PageAnswer:
        """The data of the page, read again if the server has rested long enough since the last reading."""
        # Requests come on threads of their own, and one reading serves them all.
        with self._reading:
            if time.monotonic() >= self._rests_until:
                # The thread's processor time: other threads of the server do not count.
                began, is_first = time.thread_time(), self._state is None
                self._look()
                if not is_first:  # it reads the whole run, the next ones what is new
                    self._rests_until = time.monotonic() + min(_LONGEST_REST, self.rest * (time.thread_time() - began))
            return self._kept[-1]

    def change(self, state: str) -> dict[str, object] | None:
        """The newest data for a page that has the data of `state`: {"state": new state, "change": change}.

        None where the page has the newest data. For a state that is not kept, the change holds all data.
        """
        now = self.answer()
        if state == now.state:
            return None
        before = next((one for one in self._kept if one.state == state), None)
        change = {"new": now.report} if before is None else change_of(before.report, now.report)
        return {"state": now.state, "change": change}

    def _look(self) -> None:
        refusals = {path: self.refusal(name) for path, name in FILES.items()}
        # The state is taken before the data, so what changes in between is read again.
        state = self._files.state(), tuple(refusals.values())
        if state != self._state:
            try:
                report = watched_report(self._files, refusals)
            except ConfigError:
                report = waiting_report(self.folder)
            # Browsers read no NaN in JSON.
            text = json.dumps(report, ensure_ascii=False, allow_nan=False)
            answer = PageAnswer(report=report, state=f'"{sha256(text.encode()).hexdigest()[:32]}"')
            self._state, self._kept = state, [*self._kept[1 - _KEPT :], answer]

    def refusal(self, name: str) -> str:
        """The reason why a file of this name in the run folder, as requests create, would do nothing now; else ""."""
        from diffusionpipe.trainer.launching.run_lock import is_held

        if not is_held(self.folder):
            return "no job trains in this folder now, so there is nothing to ask"
        if not is_run(self.folder):
            return "the run has not begun"
        recipe = self._files.recipe()
        if name == FILES["/draw"] and isinstance(recipe, dict) and not isinstance(recipe.get("sampling.every"), int):
            return "the recipe draws nothing; set sampling.every, and this button draws between its steps too"
        return ""

    def handle_error(self, request: Any, address: Any) -> None:
        """Ignore an error of a page that was closed before its answer; report any other as http.server does."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, address)


class _Answers(BaseHTTPRequestHandler):
    server: Watch
    server_version, sys_version = "DiffusionPipe", ""

    def do_GET(self) -> None:  # the name that http.server calls
        """Answer with the page or its data."""
        asked = urlsplit(self.path)
        token = parse_qs(asked.query).get("token", [""])[0]
        # As bytes: compare_digest refuses text beyond ASCII.
        if not self._is_here() or not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._answer(HTTPStatus.FORBIDDEN, "this needs the whole address that `diffusionpipe watch` has printed")
        elif asked.path == "/":
            self._answer(HTTPStatus.OK, html_of(self.server.answer().embedded, is_watched=True), "text/html")
        elif asked.path == "/data":
            found = self.server.change(self.headers.get("If-None-Match", ""))
            text = "" if found is None else json.dumps(found, ensure_ascii=False, allow_nan=False)
            self._answer(HTTPStatus.NOT_MODIFIED if found is None else HTTPStatus.OK, text, "application/json")
        else:
            self._answer(HTTPStatus.NOT_FOUND, "there is no such page")

    def do_POST(self) -> None:
        """Ask the run to save, to draw or to stop, if the request comes from the page itself."""
        length = self.headers.get("Content-Length", "0")
        # Closing a connection with unread bytes could reset it before the answer has arrived.
        if length.isdigit() and int(length) <= _LONGEST:
            self.rfile.read(int(length))
        token = self.headers.get(TOKEN_HEADER, "")
        if not self._is_here() or not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._answer(HTTPStatus.FORBIDDEN, "only the page of this address may ask for that")
        elif (name := FILES.get(self.path)) is None:
            self._answer(HTTPStatus.NOT_FOUND, "there is no such request")
        elif reason := self.server.refusal(name):
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
        # Only digits after the last colon are a port: "[::1]" has colons of its own.
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
