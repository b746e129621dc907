"""A page in the browser that follows a run: the pictures of its files, redrawn when a file has grown."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from stat import S_ISREG
from typing import Any

from thinwire.tools.pictures.colours import Colours
from thinwire.tools.pictures.picture import plotly
from thinwire.tools.report.figures import drawn
from thinwire.tools.report.inputs import read_files
from thinwire.tools.report.runs import RunPicture, grouped

logger = logging.getLogger("thinwire")
_LOCAL = ("127.0.0.1", "localhost")


class WatchPage(ThreadingHTTPServer):
    """Serves the page on this machine's loopback, read-only, to anyone on it; files may appear later."""

    daemon_threads = True

    def __init__(self, paths: Sequence[Path], port: int = 0) -> None:
        plotly()
        self.paths = tuple(paths)
        self._drawn: tuple[list[tuple[Path, int, int]], list[str], list[dict[str, Any]]] = ([], [], [])
        try:
            super().__init__((_LOCAL[0], port), _Answer)
        except (OSError, OverflowError) as error:
            raise ValueError(f"--port {port} cannot be used ({error}): leave it out to get a free one") from error

    @property
    def address(self) -> str:
        return f"http://{_LOCAL[0]}:{self.server_port}/"

    def state(self) -> dict[str, Any]:
        """Return the current pictures as plotly figures, and a line about each file."""
        written: dict[Path, os.stat_result] = {}
        for path in self.paths:
            with suppress(OSError):  # not there yet, or in a folder that cannot be read
                if S_ISREG((found := path.stat()).st_mode):
                    written[path] = found
        there = list(written)
        lines = [f"waiting for {path}" for path in self.paths if path not in there]
        now = [(path, found.st_mtime_ns, found.st_size) for path, found in written.items()]
        if now != self._drawn[0]:  # save CPU time for the training if nothing is new
            self._drawn = (now, *_draw(there))
        _, errors, pictures = self._drawn
        lines += errors
        for path, found in written.items():
            lines.append(f"{path.name}: written {max(0.0, time.time() - found.st_mtime):.0f} s ago")
        if there and not pictures:
            lines.append("these files contain no picture of a run: thinwire report can show them")
        return {"lines": lines, "pictures": pictures}


def _draw(paths: Sequence[Path]) -> tuple[list[str], list[dict[str, Any]]]:
    try:
        inputs = read_files(paths)
    except (OSError, ValueError) as error:
        return [str(error)], []
    colours = Colours(inputs.labels())
    pictures = []
    for picture in grouped(inputs.of(RunPicture)):
        pictures.append({"title": picture.title, "figure": json.loads(drawn(picture, colours).to_json())})
    return [], pictures


class _Answer(BaseHTTPRequestHandler):
    server: WatchPage

    def do_GET(self) -> None:
        if self.headers.get("Host", "").rpartition(":")[0] not in _LOCAL:  # a site whose name resolves to here
            self.send_error(403)
        elif self.path == "/":
            self._send("text/html; charset=utf-8", files(__package__).joinpath("watch.html").read_bytes())
        elif self.path == "/page.css":
            self._send("text/css; charset=utf-8", files(__package__).joinpath("page.css").read_bytes())
        elif self.path == "/plotly.js":
            from plotly.offline import get_plotlyjs

            self._send("text/javascript; charset=utf-8", get_plotlyjs().encode())
        elif self.path == "/state":
            self._send("application/json", json.dumps(self.server.state()).encode())
        else:
            self.send_error(404)

    def _send(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)
