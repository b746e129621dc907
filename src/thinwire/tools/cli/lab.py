"""``thinwire lab``: an emulated cluster on this machine."""

from __future__ import annotations

import json
import sys
from typing import Any, ClassVar

from thinwire.tools import lab
from thinwire.tools.cli.console import Output, note
from thinwire.tools.cli.options import JsonOption, LabOptions, numbered
from thinwire.tools.cli.verb import argument, option


class LabRunVerb(LabOptions):
    """Run a command as the ranks of an emulated cluster; the exit code is the worst of the ranks'.

    It says how long the command took. Whether a method is faster at the same loss: thinwire race.

    Example: thinwire lab run -- python train.py
    """

    command_settings: ClassVar[dict[str, Any]] = {"context_settings": {"allow_interspersed_args": False}}

    command: list[str] | None = argument(None, "After --: what every rank runs, such as python train.py.")
    grace: float = option(30.0, "Seconds that the other ranks may continue after one has failed.")
    timeout: float | None = option(None, "Seconds after which the run is stopped (exit code 124).")
    master_port: int | None = option(None, "Port of rank 0; by default a free one.")
    share_cores: bool = option(False, "Let every node use all cores; by default each has its own.")
    kill: list[str] | None = option(None, "Kill a rank: 2:30s is rank 2 after 30 s. May be repeated.")
    restart: str | None = option(None, "Restart killed ranks after this time, such as 5s; without it they stay dead.")
    stop: list[str] | None = option(None, "Stop a rank: 1:10s:3s is rank 1 after 10 s, for 3 s. May be repeated.")
    cut: list[str] | None = option(None, "Cut the link of a rank's node: 1:10s:3s. May be repeated.")
    slow: list[str] | None = option(None, "Slow a rank down: 3:2 is rank 3 at half its speed. May be repeated.")
    json: bool = option(False, "Print the result as JSON on stdout; the ranks' output goes to stderr.")

    def run(self, output: Output) -> Any:
        faults = lab.parse_kills(self.kill or [], self.restart)
        faults += [*lab.parse_pauses("stop", self.stop or []), *lab.parse_pauses("cut", self.cut or [])]
        stream = sys.stderr if self.json else sys.stdout
        result = lab.run(
            self.cluster,
            self.command or [],
            on_line=lambda rank, line: print(f"[{rank}] {line}", file=stream, flush=True),
            grace_seconds=self.grace,
            timeout_seconds=self.timeout,
            faults=faults,
            slow=dict(numbered(self.slow, self.workers, "RANK", "--slow 3:2")),
            **self.part(["master_port", "share_cores"]),
        )
        if result.emulated and not self.json:
            sent = ", ".join(f"{count / 1e6:.2f}" for count in result.sent_bytes)
            note(f"{result.note}: {result.seconds:.1f} s, MB sent per node: {sent}")
        for rank, share in {} if self.json else result.stopped_shares.items():
            note(f"rank {rank} stood still for {100 * share:.0f} % of its time")
        output.code = result.exit_code
        return json.loads(result.to_json())


class LabCleanVerb(JsonOption):
    """Remove what killed runs left behind.

    Example: thinwire lab clean
    """

    all: bool = option(False, "Also remove what belongs to runs that are still alive.")

    def run(self, output: Output) -> Any:
        removed = lab.clean(all=self.all)
        output.line(*([f"removed {name}" for name in removed] or ["nothing to remove"]))
        return {"removed": removed}


VERBS = (LabRunVerb, LabCleanVerb)
