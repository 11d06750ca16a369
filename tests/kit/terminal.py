"""A terminal of a given width for a command, and what it shows at the end."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence

_TOKEN = re.compile(r"\x1b\[(?P<number>[0-9;?]*)(?P<letter>[A-Za-z])|\r|\n|[^\x1b\r\n]+|\x1b")


def run_in_terminal(command: Sequence[str], *, width: int, environ: Mapping[str, str], timeout: float = 120) -> str:
    """The screen after the command has ended, lines that were drawn over each other in their last state."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 60, width, 0, 0))
    process = subprocess.Popen(
        command, stdin=child, stdout=child, stderr=child, env={**environ, "TERM": "xterm"}, start_new_session=True
    )
    os.close(child)
    written = b""
    try:
        while True:
            try:
                read = os.read(parent, 65536)
            except OSError:  # the other end is closed
                break
            if not read:
                break
            written += read
        status = process.wait(timeout)
    finally:
        process.kill()
        os.close(parent)
    shown = last_state(written.decode())
    assert status == 0, shown
    return shown


def last_state(written: str) -> str:
    """The text that stands there after all control sequences of rich's live displays."""
    rows, row, column = [""], 0, 0
    for token in _TOKEN.finditer(written):
        text, letter = token.group(), token.group("letter")
        if text == "\r":
            column = 0
        elif text == "\n":
            row += 1
            rows += [""] * (row + 1 - len(rows))
        elif letter == "A":
            row = max(0, row - int(token.group("number") or 1))
        elif letter == "K" and token.group("number") == "2":
            rows[row] = ""
        elif letter is None and text != "\x1b":
            line = rows[row].ljust(column)
            rows[row] = line[:column] + text + line[column + len(text) :]
            column += len(text)
    return "\n".join(line.rstrip() for line in rows)
