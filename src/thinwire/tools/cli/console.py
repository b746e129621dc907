"""What verbs share: options, a bar on stderr, tables, checks of paths, errors as sentences, ranks in the lab."""

from __future__ import annotations

import errno
import functools
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import BadParameter

from thinwire.core.checks import local_path
from thinwire.core.events import LastWords

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID
    from rich.table import Table

    from thinwire.tools.bench.session import BenchSpec, Launched, RunRecord
    from thinwire.tools.lab import Cluster, LabResult
    from thinwire.tools.pictures import Picture


EVERY_SECONDS = 15.0  # between two lines if there is no bar

Workers = Annotated[int, typer.Option(help="Total number of ranks.")]
RanksPerNode = Annotated[int, typer.Option(help="Ranks that share a node and its link.")]
Link = Annotated[str, typer.Option(help="Rate of each node's link, such as 1gbit, or one per node: 1gbit,100mbit.")]
Delay = Annotated[str, typer.Option(help="One-way delay from each node, such as 25ms, or one per node.")]
Jitter = Annotated[str, typer.Option(help="By how much a packet's delay may differ, such as 2ms, or one per node.")]
Loss = Annotated[str, typer.Option(help="Share of each node's packets that get lost, such as 0.1%, or one per node.")]
Congestion = Annotated[
    str | None, typer.Option(help="TCP's congestion control on the links: cubic, bbr or reno; by default cubic.")
]
Model = Annotated[
    str, typer.Argument(help="chargpt, mlp, resnet18, bert-small or module:function; options as in mlp:width=512.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Device = Annotated[
    str, typer.Option(help="Where ranks compute: cpu, or cuda: on this machine's GPUs, which ranks may share.")
]
Plot = Annotated[Path | None, typer.Option(help="Also plot the result to this .png or .html file.")]
_USAGE = BadParameter.__mro__[1]  # typer brings its own click, which has no public name
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass
class Bar:
    """A progress bar; if stderr is no terminal, a line from time to time."""

    shown: Progress
    task: TaskID
    told: float = field(default_factory=time.monotonic)

    def __call__(
        self, completed: float | None = None, total: float | None = None, description: str | None = None
    ) -> None:
        if completed is not None and total is None and completed > (self.shown.tasks[0].total or math.inf):
            total = completed  # more than was foreseen: a period that only the ranks know
        self.shown.update(self.task, completed=completed, total=total, description=description)
        if self.shown.disable and time.monotonic() - self.told > EVERY_SECONDS:
            task, self.told = self.shown.tasks[0], time.monotonic()
            of = "" if task.total is None else f" of {task.total:.0f}"
            counts = f"  {task.completed:.0f}{of}" if of or task.completed else ""  # some only say what is happening
            self.shown.console.print(f"{task.description}{counts}", markup=False, highlight=False)

    @property
    def completed(self) -> float:
        return self.shown.tasks[0].completed

    @property
    def hidden(self) -> bool:
        return self.shown.disable

    def log(self, text: str) -> None:
        """Print a line that stays, above the bar if there is one."""
        self.told = time.monotonic()
        self.shown.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def say(self, text: str, style: str) -> None:
        self.shown.console.print(text, style=style, markup=False)


@contextmanager
def progress(description: str, total: float | None = None, *, quiet: bool = False) -> Iterator[Bar]:
    """Show a bar on stderr, removed when its work ends; if stderr is no terminal, a line at once and more later."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True, quiet=quiet)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        bar = Bar(shown, shown.add_task(description, total=total))
        if bar.hidden and description:
            bar.log(f"... {description}")
        yield bar


def plain_table(title: str, columns: Sequence[str], left: Sequence[str] = (), *, close: bool = False) -> Table:
    """Return a table with one line under its head: the first column and ``left`` are text, others numbers."""
    from rich import box

    from thinwire.tools.bench.summary import WholeTable

    padding = (0, 0) if close else (0, 1)
    table = WholeTable(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=padding)
    for i, name in enumerate(columns):
        words = i == 0 or name in left  # these wrap on a narrow screen; numbers must not be cut
        table.add_column(name, justify="left" if words else "right", no_wrap=not words, overflow="fold")
    return table


def check_output(option: str, path: Path | None) -> None:
    """Raise ``ValueError`` for a path at which no file can be written."""
    if path is None:
        return
    local_path(path)
    try:
        if path.exists():
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        else:
            tempfile.TemporaryFile(dir=path.absolute().parent).close()  # some folders refuse even root
    except OSError as error:
        raise ValueError(
            f"{option} {path} is not a file that can be written ({error.strerror}): give a file in a folder that exists"
        ) from error


def check_folder(out: Path, option: str = "--out") -> None:
    """Create the folder of an option; raise ``ValueError`` if no files can be written into it."""
    local_path(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()  # some folders refuse even root
    except OSError as error:
        raise ValueError(
            f"{option} {out} is not a folder that can be written ({error.strerror}): give another"
        ) from error


def check_plot(path: Path | None) -> None:
    """Raise ``ValueError`` unless ``--plot`` can be written: known file type, library installed, folder exists."""
    from thinwire.tools.pictures import check_plot as check_type

    check_type(path)
    check_output("--plot", path)


def write_drawing(picture: Picture, path: Path, console: Console) -> list[Path]:
    """Write a picture; where that is not possible, say why instead. Return what was written."""
    from thinwire.tools.pictures import write_picture

    try:
        write_picture(picture, path)
    except ValueError as error:
        console.print(f"no picture: {error}", markup=False)
        return []
    return [path]


@dataclass
class Watched:
    """The load, for JSON, once the block of ``watched_load`` has ended; empty if the system does not report it."""

    record: dict[str, Any] = field(default_factory=dict)

    def with_load(self, data: dict[str, Any]) -> dict[str, Any]:
        return {**data, "load": self.record}


@contextmanager
def watched_load(processes: int, *, quiet: bool = False) -> Iterator[Watched]:
    """Watch the load during a measurement with that many processes; warn on stderr if the machine was too busy."""
    from rich.console import Console

    from thinwire.predict.measure.machine import LoadWatch

    watch, seen = LoadWatch(), Watched()
    yield seen
    load = watch.load()
    if load is not None:
        seen.record = asdict(load)
        if said := load.sentence(processes):
            Console(stderr=True, quiet=quiet).print(said, style="yellow", markup=False, highlight=False, soft_wrap=True)


class RunFailed(RuntimeError):
    """A verb whose options were valid but whose run failed."""


def exit_code(error: Exception) -> int | None:
    """Return 2 for invalid options, 1 for a run that failed in a known way; None for a bug, shown with a traceback."""
    if isinstance(error, OSError):
        return 1 if error.errno in _FULL else 2 if error.filename is not None else None
    if isinstance(error, _USAGE):
        return None if type(error).__name__ == "NoArgsIsHelpError" else 2
    if isinstance(error, ValueError):
        return 2
    ours = type(error).__module__.partition(".")[0] == "thinwire"
    return 1 if isinstance(error, RuntimeError) and ours else None


def sentence(error: Exception) -> str:
    if isinstance(error, OSError):
        return ": ".join(filter(None, (error.filename and str(error.filename), error.strerror)))
    if isinstance(error, _USAGE):
        ctx = getattr(error, "ctx", None)
        words = error.format_message().partition(", unable to")[0].rstrip(".")  # type: ignore[attr-defined]
        return f"{words[:1].lower()}{words[1:]} (see {ctx.command_path if ctx else 'thinwire'} --help)"
    return str(error).strip().partition("\n")[0] if isinstance(error, ValueError) else str(error)


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def torchrun_group() -> Iterator[tuple[int, int]]:
    """Yield this process's rank and the number of ranks: of torchrun's group, opened and closed here, or (0, 1)."""
    if not under_torchrun():
        yield 0, 1
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def slowest_link(cluster: Cluster) -> int | None:
    return min((rate for rate in cluster.links if rate), default=None)


def slow_wire(cluster: Cluster) -> str | None:
    """Return the links in words; None if nothing slows them."""
    return None if cluster.wire == "unlimited" else cluster.wire


def run_ranks(spec: BenchSpec, cluster: Cluster, *, total_steps: int) -> tuple[RunRecord, Launched]:
    from thinwire.tools import lab
    from thinwire.tools.bench.session import run_session

    with progress("starting ranks", total_steps) as bar:
        return run_session(spec, functools.partial(lab.run, cluster), moving(bar))


def moving(bar: Bar) -> Callable[[dict[str, Any]], None]:
    """Return a function that updates a bar from events of bench ranks: a step, a failure."""

    def on_progress(event: dict[str, Any]) -> None:
        if "step" in event:
            bar(completed=bar.completed + 1, description=f"{event['row']:<22} loss {event['loss']:.3f}")
        elif "error" in event:
            bar.say(f"{event['row']} failed: {event['error']}", "red")

    return on_progress


def follow(cluster: Cluster, command: list[str], *, timeout_seconds: float) -> LabResult:
    """Run ranks in the lab with a progress bar that their events ``{"done": share, "text": ...}`` update."""
    from thinwire.tools import lab

    with progress("starting ranks", 100) as bar:
        words = LastWords(lambda rank, event: bar(completed=round(100 * event["done"]), description=event["text"]))
        launched = lab.run(cluster, command, on_line=words, timeout_seconds=timeout_seconds)
    if launched.exit_code == 124:
        raise RunFailed(f"the ranks took longer than {timeout_seconds:g} s and were stopped")
    if launched.exit_code:
        raise RunFailed(words.after(f"the ranks ended with exit code {launched.exit_code}"))
    return launched
