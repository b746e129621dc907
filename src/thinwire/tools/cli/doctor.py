"""``thinwire doctor``: what a bug report needs, and what is wrong with this machine's network set-up."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.tools.cli.console import Output, RunFailed, read_record
from thinwire.tools.cli.options import JsonOption
from thinwire.tools.cli.verb import option

if TYPE_CHECKING:
    from rich.table import Table

    from thinwire.tools.doctor import Choice, Diagnosis, Facts

_LAB = {
    "root": "emulated links as root",
    "user": "emulated links in a user namespace",
    "loopback": "no permission for network namespaces: ranks run on plain loopback, links are not emulated",
}
_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}
_COMPILE = "coupled methods give equal results; overlap only across graph breaks"


class DoctorVerb(JsonOption):
    """Print what a bug report needs and what is wrong with this machine's network set-up.

    The exit code is 1 if something prevents training, else 0.

    Example: thinwire doctor --nodes 2
    """

    nodes: int | None = option(None, "Number of machines in the job; by default taken from torchrun's variables.")
    read: Path | None = option(None, "Diagnose another machine from what doctor --json printed there.")

    def run(self, output: Output) -> Any:
        try:
            import torch  # noqa: F401
        except (ImportError, OSError) as error:
            reason = str(error).splitlines()[0]
            raise RunFailed(f"torch cannot be imported ({reason}): reinstall it, see pytorch.org") from error
        from thinwire.tools.doctor import Facts, judge

        facts = _here() if self.read is None else read_record(self.read, Facts)
        diagnosis = judge(facts, self.nodes)
        _show(facts, diagnosis, output)
        output.code = int(diagnosis.prevents_training)
        return report(facts, diagnosis)


def _here() -> Facts:
    from thinwire.tools.doctor import collect_facts
    from thinwire.tools.lab import Cluster, LabError
    from thinwire.tools.lab.network import Network, find_mode, open_shell

    mode, reason = find_mode()
    control = None
    if mode != "loopback":
        try:
            with open_shell(mode) as shell, Network(shell, Cluster(1)) as network:
                control = network.congestion_control
        except LabError as error:
            reason = str(error)
    return collect_facts(mode, reason, control)


def report(facts: Facts, diagnosis: Diagnosis) -> dict[str, Any]:
    from thinwire.tools.doctor.listeners import LISTENERS

    return {
        **asdict(facts),
        "backend in use": (diagnosis.nccl or diagnosis.gloo).backend,
        "interface": ", ".join((diagnosis.nccl or diagnosis.gloo).interfaces) or "unknown",
        "torch.compile": _COMPILE,
        "nodes": diagnosis.nodes,
        "gloo": asdict(diagnosis.gloo),
        "nccl": asdict(diagnosis.nccl) if diagnosis.nccl else None,
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "prevents_training": diagnosis.prevents_training,
        "listeners": [asdict(listener) for listener in LISTENERS],
    }


def _show(facts: Facts, diagnosis: Diagnosis, output: Output) -> None:
    from rich.text import Text

    for finding in diagnosis.findings:
        line = Text(f"{finding.level}: ", style=_COLOURS[finding.level]).append(finding.what, style="default")
        output.say(line.append(f"\n    {finding.remedy} [{finding.code}]", style="default"))
    if not diagnosis.findings:
        output.say("no problems were found")
    elif diagnosis.prevents_training:
        output.say("training cannot work until what is marked as an error is fixed")
    output.say(_machine(facts, diagnosis), _listeners())


def _machine(facts: Facts, diagnosis: Diagnosis) -> Table:
    from rich.table import Table
    from rich.text import Text

    rows = {
        "thinwire": facts.thinwire,
        "python, torch": f"{facts.python}, {facts.torch}",
        "platform": facts.platform,
        "packages": ", ".join(f"{name} {version}" for name, version in facts.packages.items()),
        "extras": ", ".join(facts.extras) or "none",
        "backends": ", ".join(facts.backends) or "none",
        "gpus": ", ".join(facts.gpus) or "none",
        "cores, threads": f"{facts.cores}, {facts.threads}" + (f"; quota {facts.quota:g}" if facts.quota else ""),
        "memory, /dev/shm": f"{_gib(facts.memory_bytes)}, {_gib(facts.shm_bytes)}",
        "open files": "unknown" if facts.open_files is None else "{} (hard limit {})".format(*facts.open_files),
        "name": f"{facts.hostname.name}: {', '.join(facts.hostname.addresses) or facts.hostname.error or 'no address'}",
        "gloo": _choice(diagnosis.gloo),
        **({"nccl": _choice(diagnosis.nccl)} if diagnosis.nccl else {}),
        **_interfaces(facts, diagnosis),
        "tcp": ", ".join(f"{name} {value}" for name, value in facts.tcp.items()) or "unknown",
        "tcp segments": f"{facts.segments} sent, {facts.retransmitted} of them retransmitted",
        "variables": ", ".join(f"{name}={value}" for name, value in facts.environment.items()) or "none",
        "lab": _LAB.get(facts.lab, facts.lab)
        + (f", TCP with {facts.lab_congestion_control}" if facts.lab_congestion_control else ""),
        "torch.compile": _COMPILE,
    }
    table = Table("what", show_header=False)
    table.add_column("found", overflow="fold")  # a value that is cut is of no use in a bug report
    for name, value in rows.items():
        table.add_row(name, Text(value))  # brackets are not markup
    return table


def _listeners() -> Table:
    from rich.table import Table

    from thinwire.tools.doctor.listeners import LISTENERS

    table = Table()
    for name in ("what listens while it runs", "at", "who may connect", "encrypted"):
        table.add_column(name, overflow="fold")  # variable names are long, and users copy them
    for one in LISTENERS:
        table.add_row(one.what, one.address, one.admits, one.encrypted)
    return table


def _choice(choice: Choice) -> str:
    if choice.problem:
        return f"cannot start: {choice.why}: {choice.problem}"
    return f"{', '.join(choice.interfaces) or 'unknown interface'} ({choice.address}): {choice.why}"


def _interfaces(facts: Facts, diagnosis: Diagnosis) -> dict[str, str]:
    rows = {}
    for one in facts.interfaces:
        used = [c.title for c in (diagnosis.gloo, diagnosis.nccl) if c is not None and one.name in c.interfaces]
        parts = [
            f"{'up' if one.up else 'down'}, {one.kind}",
            " ".join(one.addresses) or "no address",
            ("rate unknown" if one.mbits is None else f"{one.mbits} Mbit/s") + f", MTU {one.mtu or 'unknown'}",
            f"{one.packets} packets, {one.errors} errors, {one.drops} drops",
            *(["default route"] if one.name == facts.default_route else []),
            *([f"used by {' and '.join(used)}"] if used else []),
        ]
        rows[f"interface {one.name}"] = "; ".join(parts)
    return rows


def _gib(count: int | None) -> str:
    return "unknown" if count is None else f"{count / (1 << 30):.3g} GiB"
