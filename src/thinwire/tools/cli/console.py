"""What verbs do alike: print, write, show progress, warn of load, say errors in a sentence, run ranks in the lab."""

from __future__ import annotations

import errno
import functools
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from typer import BadParameter

from thinwire.core.checks import local_path
from thinwire.core.events import LastWords
from thinwire.core.records import Record, plain

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID
    from rich.table import Table

    from thinwire.tools.bench.session import BenchSpec, Launched, RunRecord
    from thinwire.tools.lab import Cluster, LabResult
    from thinwire.tools.pictures import Picture


EVERY_SECONDS = 15.0  # between two lines if there is no bar
_USAGE = BadParameter.__mro__[1]  # typer brings its own click, which has no public name
_Read = TypeVar("_Read", bound=Record)
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

    def log(self, text: str, style: str | None = None) -> None:
        """Print a line that stays, above the bar if there is one."""
        self.told = time.monotonic()
        self.shown.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress(
    description: str, total: float | None = None, *, quiet: bool = False, table: Callable[[], Any] = lambda: None
) -> Iterator[Bar]:
    """Show a bar on stderr, removed when its work ends; if stderr is no terminal, a line at once and more later.

    A ``table`` stands in place of the bar as soon as there is one, and its last state stays.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True, quiet=quiet)

    class BarOrTable(Progress):
        def get_renderables(self) -> Iterator[Any]:
            yield from (super().get_renderables() if (one := table()) is None else (one,))

    with BarOrTable(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        bar = Bar(shown, shown.add_task(description, total=total))
        if bar.hidden and description:
            bar.log(f"... {description}")
        yield bar
    if console.is_terminal and (last := table()) is not None:
        console.print(last)


class Output:
    """What a verb shows: text and tables, on stdout or beside JSON on stderr (``quiet``: nowhere), and its files.

    ``code``, and a ``failure`` in a sentence: how the verb ends although it has printed its result.
    """

    def __init__(self, *, quiet: bool = True, stderr: bool = False) -> None:
        from rich.console import Console

        self.console, self.code, self.failure = Console(quiet=quiet, stderr=stderr), 0, ""

    def say(self, *things: Any, style: str | None = None) -> None:
        """Print sentences, which may be wrapped, and tables."""
        for one in things:  # only our own tables have markup
            self.console.print(one, style=style, markup=not isinstance(one, str), highlight=False)

    def line(self, *lines: str) -> None:
        """Print lines as they are, however long."""
        for line in lines:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def wrote(self, *paths: Path, note: str = "") -> None:
        self.line(f"written: {', '.join(map(str, paths))}{note}")

    def write(self, path: Path, text: str, note: str = "") -> None:
        path.write_text(f"{text}\n", encoding="utf-8")
        self.wrote(path, note=note)

    def draw(self, picture: Picture, path: Path) -> list[Path]:
        """Write a picture; where that is not possible, say why instead. Return what was written."""
        from thinwire.tools.pictures import write_picture

        try:
            write_picture(picture, path)
        except ValueError as error:
            self.say(f"no picture: {error}")
            return []
        return [path]

    def keep(self, folder: Path, name: str, result: Any, picture: Picture | None = None) -> list[Path]:
        """Write a result and its picture into a folder, as ``name.json`` and ``name.png``; return what was written."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.json"
        path.write_text(json.dumps(plain(result), indent=2) + "\n", encoding="utf-8")
        return [path, *(self.draw(picture, path.with_suffix(".png")) if picture is not None else [])]


def note(text: str, style: str | None = None, *, quiet: bool = False) -> None:
    """Print a line on stderr, also beside JSON."""
    from rich.console import Console

    Console(stderr=True, quiet=quiet).print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def plain_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]] = (), *, left: Sequence[str] = (),
    close: bool = False, caption: str = "",
) -> Table:  # fmt: skip
    """Return a table with one line under its head: the first column and ``left`` are text, others numbers."""
    from rich import box

    from thinwire.tools.bench.summary import WholeTable

    table = WholeTable(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False,
                       padding=(0, 0 if close else 1), caption=caption or None, caption_justify="left")  # fmt: skip
    for i, name in enumerate(columns):
        words = i == 0 or name in left  # these wrap on a narrow screen; numbers must not be cut
        table.add_column(name, justify="left" if words else "right", no_wrap=not words, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def check_path(option: str, path: Path, kind: str) -> None:
    """Raise ``ValueError`` unless a "file" or "plot" can be written there, or a "folder" made, and files into it."""
    folder, there = kind == "folder", local_path(path).absolute()
    if kind == "plot":
        from thinwire.tools.pictures import check_plot

        check_plot(path)
    try:
        if there.exists() and not folder:
            os.close(os.open(there, os.O_WRONLY | os.O_NONBLOCK))
        else:  # some folders refuse even root
            found = (one for one in (there, *there.parents) if one.exists())
            tempfile.TemporaryFile(dir=next(found) if folder else there.parent).close()
    except OSError as error:
        what, give = ("folder", "another") if folder else ("file", "a file in a folder that exists")
        why = f"is not a {what} that can be written ({error.strerror}): give {give}"
        raise ValueError(f"{option} {path} {why}") from error


def read_record(path: Path, kind: type[_Read]) -> _Read:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {getattr(error, 'strerror', None) or 'not a text file'}") from error
    try:
        return kind.from_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


@dataclass
class Watched:
    """The load, for JSON, once the block of ``watched_load`` has ended; empty if the system does not report it."""

    record: dict[str, Any] = field(default_factory=dict)

    def with_load(self, result: Any) -> dict[str, Any]:
        return {**(result if isinstance(result, dict) else plain(result)), "load": self.record}


@contextmanager
def watched_load(processes: int, *, quiet: bool = False) -> Iterator[Watched]:
    """Watch the load during a measurement with that many processes; warn on stderr if the machine was too busy."""
    from thinwire.predict.measure.machine import LoadSample

    watch, seen = LoadSample(), Watched()
    yield seen
    load = watch.load()
    if load is not None:
        seen.record = asdict(load)
        if said := load.sentence(processes):
            note(said, "yellow", quiet=quiet)


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


@contextmanager
def known_errors() -> Iterator[None]:
    """Turn known errors into a sentence on stderr and an exit code; 130 is ctrl-C's."""
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        if (code := exit_code(error)) is None:
            raise
        print(f"error: {sentence(error)}", file=sys.stderr, flush=True)
        raise SystemExit(code) from error


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
            bar.log(f"{event['row']} failed: {event['error']}", "red")

    return on_progress


def follow(cluster: Cluster, command: list[str], *, timeout_seconds: float) -> LabResult:
    """Run ranks in the lab with a progress bar that events ``{"done": share, "text": ...}`` of the first update."""
    from thinwire.tools import lab

    with progress("starting ranks", 100) as bar:

        def on_event(rank: int, event: dict[str, Any]) -> None:
            if rank == 0:
                bar(completed=round(100 * event["done"]), description=event["text"])

        words = LastWords(on_event)
        launched = lab.run(cluster, command, on_line=words, timeout_seconds=timeout_seconds)
    if launched.exit_code == 124:
        raise RunFailed(f"the ranks took longer than {timeout_seconds:g} s and were stopped")
    if launched.exit_code:
        raise RunFailed(words.after(f"the ranks ended with exit code {launched.exit_code}"))
    return launched
