"""``thinwire report`` and ``thinwire watch``: results as one HTML page, and a page that follows a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from thinwire.tools.cli.console import Output, note
from thinwire.tools.cli.verb import Verb, argument, option


class ReportVerb(Verb):
    """Make one self-contained HTML page from results, predicted and measured.

    Example: thinwire report thinwire-out/race.json --out race.html
    """

    files: list[Path] = argument(
        ...,
        "Files of race and demo, --json output of bench, plan and others, step logs, journals, Chrome traces.",
        metavar="FILE...",
    )
    out: Path = option(Path("report.html"), "File for the page.", writes="file")

    def run(self, output: Output) -> Any:
        from thinwire.tools.report.inputs import read_files
        from thinwire.tools.report.page import render

        for path in self.files:
            if not path.is_file():
                raise ValueError(f"{path} is not a file")
        if self.out.resolve() in {path.resolve() for path in self.files}:
            raise ValueError(f"--out {self.out} is one of the files to read")
        page = render(read_files(self.files))
        output.write(self.out, page, f" ({len(page) / 1e6:.1f} MB; opens without a network)")


class WatchVerb(Verb):
    """Follow a run in the browser: loss, seconds and bytes of its steps, from the file that it writes.

    Example: thinwire watch steps.jsonl --open
    """

    files: list[Path] = argument(
        ..., "Files of tw.StepLog or ps server --journal; they may appear later.", metavar="FILE..."
    )
    port: int = option(0, "Port on this machine's loopback; 0: a free one.")
    open: bool = option(False, "Open the page in the browser.")

    def run(self, output: Output) -> Any:
        import webbrowser

        from thinwire.tools.report.watch import WatchPage

        for path in self.files:
            if path.is_dir() or not path.absolute().parent.is_dir():
                raise ValueError(f"{path} is not a file, and none can be created there")
        with WatchPage(self.files, self.port) as page:
            for path in self.files:
                if not path.exists():
                    note(f"{path} does not exist yet: the page shows it as soon as it does")
            output.line(f"watching {', '.join(map(str, self.files))} at {page.address} ; ctrl-C stops it")
            if self.open:
                webbrowser.open(page.address)
            page.serve_forever()
