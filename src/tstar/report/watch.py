"""The report of a run that is being written, served to this machine and updated in place.

The page asks every second or two whether there is news; the server looks at the files' times and sizes,
and builds the report again only if one of them changed. It answers to no other name than this machine's,
so that no page from elsewhere can read a run through the browser.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tstar.errors import UserError
from tstar.report.content import build
from tstar.report.page import render, to_json

HOSTS = ("127.0.0.1", "localhost")


class LiveReport:
    """The latest report of some paths; safe to ask from several threads."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._lock = threading.Lock()
        self._seen: str | None = None
        self._page = self._json = b""
        self._tag = ""
        self.refresh()

    def refresh(self) -> tuple[bytes, bytes, str]:
        """The page, the record, and the record's tag, as the files stand now."""
        with self._lock:
            seen = fingerprint(self._paths)
            if seen != self._seen:
                self._build()
                self._seen = seen
            return self._page, self._json, self._tag

    def _build(self) -> None:
        try:
            report = build(self._paths)
        except UserError:
            if self._seen is None:
                raise
            return  # the run went away; what was last seen of it stays
        self._page, self._json = render(report, live=True).encode(), to_json(report).encode()
        self._tag = f'"{hashlib.sha256(self._json).hexdigest()[:32]}"'


def fingerprint(paths: Sequence[Path]) -> str:
    """Changes when a file below the paths is written, added or removed; weights are not looked at."""
    digest = hashlib.sha256()
    for path in paths:
        for current, names, files in os.walk(path):
            names[:] = sorted(n for n in names if n != "checkpoints" and not n.startswith("."))
            for name in sorted(n for n in files if not n.startswith(".")):
                file = Path(current, name)
                try:
                    status = file.stat()
                except FileNotFoundError:
                    continue  # removed since it was listed, as old rollouts are
                digest.update(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="replace"))
        if path.is_file():
            digest.update(f"{path}\0{path.stat().st_size}\0{path.stat().st_mtime_ns}\n".encode())
    return digest.hexdigest()


def serve(paths: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """A server for `serve_forever`; port 0 takes a free one."""
    live = LiveReport(paths)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Host", "").rsplit(":", 1)[0] not in HOSTS:
                self._answer(403, b"this server answers to localhost only\n", "text/plain")
            elif self.path == "/":
                self._answer(200, live.refresh()[0], "text/html; charset=utf-8")
            elif self.path == "/report.json":
                _, record, tag = live.refresh()
                is_known = self.headers.get("If-None-Match") == tag
                self._answer(304 if is_known else 200, b"" if is_known else record, "application/json", tag)
            else:
                self._answer(404, b"not here\n", "text/plain")

        def _answer(self, status: int, content: bytes, kind: str, tag: str | None = None) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            if tag is not None:
                self.send_header("ETag", tag)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the base's name)
            """A line for every question would bury what the terminal is for."""

    try:
        return ThreadingHTTPServer((HOSTS[0], port), Handler)
    except OSError as error:
        raise UserError(
            f"port: {port} cannot be used ({error.strerror}); name another with --port"
        ) from error
