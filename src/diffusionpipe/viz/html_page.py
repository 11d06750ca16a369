"""A page as one HTML file: data as JSON, style and script in it.

It asks for nothing, and its browser lets it ask for nothing: the page's own rules allow its script and its style by
their hashes, and pictures in the page.
"""

from base64 import b64encode
from hashlib import sha256
from html import escape
from importlib.resources import files

_SCRIPTS = ("dom.js", "timeline.js", "curves.js", "page.js")
"""The scripts of the page in `viz/assets`, in the order in which they define names."""


def page_of(data: str, *, title: str, asks_server: bool = False) -> str:
    """The HTML of the page that shows a report; `data`: the report as JSON text. No text in it can become markup.

    `asks_server`: whether the page may ask its own server for newer data; else it may send no request.
    """
    style, script = _asset("page.css"), "\n".join(_asset(name) for name in _SCRIPTS)
    rules = f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}"
    if asks_server:
        rules += "; connect-src 'self'"
    # "<" could end the script; U+2028 and U+2029 end lines in older engines of JavaScript.
    safe = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    parts = {
        "TITLE": escape(title),
        "RULES": escape(rules, quote=True).replace("&#x27;", "'"),
        "STYLE": style,
        "SCRIPT": script,
        "DATA": safe,
    }
    page = _asset("page.html")
    pieces = []
    for name, value in parts.items():  # the names stand in the file in this order, and no value is searched again
        before, _, page = page.partition(f"{{{{{name}}}}}")
        pieces += [before, value]
    return "".join([*pieces, page])


def _asset(name: str) -> str:
    return (files("diffusionpipe.viz") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode('ascii')}'"
