"""The report as one HTML file that opens from disk and asks nobody for anything.

What a model wrote is hostile text. It only ever stands in a JSON data block in which no character can end
the block, and the script shows it as text, never as markup. Should that fail, the page's own policy lets
no script run but this one, and no request leave.
"""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from dataclasses import asdict
from importlib import resources

from tstar import __version__
from tstar.report.record import Report

_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def render(report: Report, live: bool = False) -> str:
    """The page. live: it asks the server that it came from for news."""
    style, script = _asset("report.css"), _asset("report.js")
    connect = "'self'" if live else "'none'"
    policy = (
        f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; "
        f"img-src data:; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    slots = {
        "policy": policy,
        "title": _escape_markup(report.title),
        "style": style,
        "live": "live" if live else "",
        "version": __version__,
        "data": to_json(report),
        "script": script,
    }
    # One pass: what has been filled in is not looked at again.
    return re.sub(r"<!--(\w+)-->", lambda slot: slots[slot[1]], _asset("page.html"))


def to_json(report: Report) -> str:
    """The record as strict JSON that may stand inside a script element."""
    text = json.dumps(asdict(report), allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    # Half of a surrogate pair is no character that a file can hold.
    clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return clean.translate(_ESCAPES)


def _asset(name: str) -> str:
    return resources.files("tstar.report").joinpath("assets", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _escape_markup(text: str) -> str:
    for character, name in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;")):
        text = text.replace(character, name)
    return text
