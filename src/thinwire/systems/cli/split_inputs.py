"""Command-line inputs of ``thinwire split``, such as a model, a task, a plan, a link, and its tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import stdev
from typing import TYPE_CHECKING, Any

from thinwire.tools.cli.console import plain_table, progress

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn

    from thinwire.systems.split import Credentials, Link, SplitPlan
    from thinwire.systems.split.compare import ComparisonRow
    from thinwire.systems.split.estimate import Estimate
    from thinwire.systems.split.tasks import Task


def read_words(text: str) -> tuple[str, ...]:
    """Parse ``"int8,pack"`` as codecs; "none" or "" means none. The plan checks them."""
    return tuple(word.strip() for word in text.split(",") if word.strip() and word.strip() != "none")


def task_words(name: str, model: str, length: int, lines: int, seed: int) -> dict[str, Any]:
    """Return what is stored next to the halves, so that the edge reads the same task."""
    words: dict[str, Any] = {"name": name, "model": model, "pretrained": Path(model).is_dir()}
    return words | {"length": length, "lines": lines, "seed": seed}


def task_of(notes: dict[str, Any], data: Path | None, tokenizer: Path | None) -> Task:
    """Read the task stored next to a half; for a pre-trained model the tokeniser's directory must exist here."""
    words = notes.get("task", {})
    try:
        name, length, lines, seed = words["name"], words["length"], words["lines"], words["seed"]
        model = str(tokenizer or words["model"])
        if words["pretrained"] and not Path(model).is_dir():
            raise ValueError(f"the tokeniser of {words['model']} is not here: give its directory as --tokenizer")
    except KeyError as error:
        raise ValueError("this file names no task: give one that thinwire split plan --out wrote") from error
    return read_task(name, data, model, length, lines, seed)


def read_task(name: str, data: Path | None, model: str, length: int, most: int, seed: int) -> Task:
    """Return ``stdlib``, or a GLUE task with its files in ``data``; the tokeniser is the model's, or a trained one."""
    from thinwire.systems.split.tasks import (
        COLUMNS,
        glue_task,
        local_tokenizer,
        read_tsv,
        stdlib_task,
        trained_tokenizer,
    )

    if name != "stdlib" and name not in COLUMNS:
        raise ValueError(f"task {name!r} is unknown: use stdlib, or one of GLUE's {', '.join(COLUMNS)} with --data")
    if name != "stdlib" and data is None:
        raise ValueError(f"task {name!r} needs --data, the directory with its train.tsv")
    if length < 3:
        raise ValueError(f"--length {length} must be at least 3: two tokens of each sample mark its ends")
    with progress(f"reading task {name}"):
        tokenizer = local_tokenizer(Path(model)) if Path(model).is_dir() else None
        if data is None or name == "stdlib":
            return stdlib_task(most, length, seed=seed, tokenizer=tokenizer)
        if tokenizer is None:
            first, second, _ = read_tsv(data / "train.tsv", COLUMNS[name])
            tokenizer = trained_tokenizer([*first, *(second or [])], 8000)
        return glue_task(name, data, tokenizer, length)


def model_builder(text: str, length: int, plans: Iterable[SplitPlan] = ()) -> Callable[[Task, int], nn.Module]:
    """``bert-small``, ``bert:layers=2:hidden=128:heads=4``, or a directory: makes the model of a task and a seed.

    Raises:
        ValueError: there is no such model, or one of the plans cannot cut it.
    """
    from thinwire.systems.split.models import preset, pretrained, sizes_of
    from thinwire.tools.bench.words import split_options

    if Path(text).is_dir():
        return lambda task, seed: pretrained(text, task.classes, seed)
    name, options = split_options(text)
    known = {"layers": int, "hidden": int, "heads": int, "intermediate": int, "dropout": (int, float)}
    for key, value in options.items():
        if key not in known or isinstance(value, bool) or not isinstance(value, known[key]):  # type: ignore[arg-type]
            raise ValueError(f"model option {key}={value!r} is unknown: use {', '.join(known)} with numbers")
        if value < 0 or (value == 0 and key != "dropout"):  # type: ignore[operator]
            raise ValueError(f"model option {key}={value!r} must be above 0")
    if name.startswith("vit"):
        raise ValueError("the command line has only text tasks: split a ViT from Python, with thinwire.systems.split")
    numbers: dict[str, Any] = options
    _, (layers, hidden, *_) = sizes_of(name, **{key: size for key, size in numbers.items() if key != "dropout"})
    for plan in plans:
        plan.check(layers, hidden)

    def build(task: Task, seed: int) -> nn.Module:
        sizes: dict[str, Any] = {"classes": task.classes, "vocabulary": task.vocabulary, "length": length}
        return preset(name, **sizes, pad=task.train.pad, seed=seed, **numbers)

    return build


def read_plan(
    cut: int, kind: str, rank: int, residual: str, labels: str, init: str, up: str, down: str, front_on: str
) -> SplitPlan:
    """Return the plan that the options describe."""
    from thinwire.systems.split import SplitPlan

    return SplitPlan(cut, kind, rank, residual, labels, init, read_words(up), read_words(down), front_on)


def read_rows(text: str, cut: int, rank: int, front_on: str = "edge") -> dict[str, SplitPlan]:
    """Parse ``"boundary lowrank lowrank:int8,pack"`` as plans by name; codecs go both ways, delta activation only."""
    from thinwire.systems.split import SplitPlan

    rows = {}
    for word in text.split():
        kind, _, codecs = word.partition(":")
        activation = read_words(codecs)
        gradient = tuple("int8" if codec.startswith("delta") else codec for codec in activation)
        up, down = (activation, gradient) if front_on == "edge" else (gradient, activation)
        rows[word] = SplitPlan(cut, kind, rank, up=up, down=down, front_on=front_on)
    if not rows:
        raise ValueError("--plans is empty: use for example --plans 'boundary lowrank'")
    return rows


def read_share(text: str) -> tuple[int, int]:
    """Parse ``"2/4"``: the second of four edges."""
    place, slash, count = text.partition("/")
    if not slash or not place.isdecimal() or not count.isdecimal() or not 1 <= int(place) <= int(count):
        raise ValueError(f"share {text!r} is not a part of a whole: use for example 1/4")
    return int(place), int(count)


def part_of(task: Task, place: int, count: int) -> Task:
    """Select the samples of edge ``place`` (from 1) of ``count``: every ``count``-th one."""
    from dataclasses import replace

    if count > len(task.train):
        raise ValueError(f"share '{place}/{count}': there are only {len(task.train)} samples")
    return replace(task, train=task.train.part(range(place - 1, len(task.train), count)))


def read_link(up: str, down: str | None, latency: str) -> Link:
    """Parse rates and a one-way delay in the syntax of ``tc``."""
    from thinwire.systems.split import Link
    from thinwire.tools.lab import parse_delay, parse_rate

    return Link(parse_rate(up), parse_rate(down or up), parse_delay(latency))


def read_address(text: str) -> tuple[str, int]:
    """Parse ``host:port``."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"address {text!r} is not host:port: use for example cloud.example.org:7443")
    return host.strip("[]"), int(port)


def read_keys(directory: Path | None, fingerprint: str | None, host: str, insecure: bool) -> Credentials | None:
    """Read what ``thinwire keys new`` wrote for a machine; None: no TLS, for this machine only or on request."""
    from thinwire.systems.split import Credentials
    from thinwire.systems.split.connection import check_plain

    if directory is None:
        check_plain(host, insecure)
        if fingerprint is not None:
            raise ValueError("--fingerprint belongs to a TLS certificate: give --keys too")
        return None
    found = Credentials.of(directory)
    return found if fingerprint is None else found.pinned(fingerprint)


def recipe_of(notes: dict[str, Any]) -> Any:
    """Read the recipe stored next to a half."""
    from thinwire.systems.split import Recipe

    try:
        return Recipe(**notes["recipe"])
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"this file contains no training options: give one that thinwire split plan --out wrote ({error})"
        ) from error


def plan_table(rows: Mapping[str, Estimate], task: Task, link: str, link_down: str | None) -> Table:
    """Return a table with a step of each kind of cut."""
    columns = ("cut", "kB up", "kB down", "messages", "of boundary", "link s", "compute s", "step s")
    table = plain_table(f"{task.describe}; {_link(link, link_down)}", columns, close=True)
    base = rows["boundary"].wire
    for name, row in rows.items():
        table.add_row(
            name,
            _kilo(row.bytes_up),
            _kilo(row.bytes_down),
            str(row.messages),
            f"1/{base / row.wire:.1f}",
            f"{row.link_seconds:.3f}",
            "-" if row.compute_seconds is None else f"{row.compute_seconds:.3f}",
            "-" if row.step_seconds is None else f"{row.step_seconds:.3f}",
        )
    return table


def compare_table(rows: Sequence[ComparisonRow], task: Task, link: str, link_down: str | None, seeds: int) -> Table:
    """Return a table of accuracy, bytes and seconds of each way of training."""
    title = f"{task.describe}; {_link(link, link_down)}; {seeds} seed{'s' * (seeds > 1)}"
    columns = ("training", task.metric, "kB/step", "payload", "socket", "compute s", "step s")
    table = plain_table(title, columns, close=True)
    plain = next((row for row in rows if row.name == "boundary"), None)
    for row in rows:
        score = f"{row.score:.4f}" + (f" ±{stdev(row.scores):.4f}" if len(row.scores) > 1 else "")
        cells = ["-", "-", "-"]
        if row.wire_bytes is not None and row.state_bytes is not None:
            cells[0] = _kilo(row.wire_bytes)
            if plain is not None and plain.wire_bytes and plain.state_bytes:
                cells[1:] = [
                    f"1/{plain.state_bytes / row.state_bytes:.1f}",
                    f"1/{plain.wire_bytes / row.wire_bytes:.1f}",
                ]
        table.add_row(row.name, score, *cells, f"{row.compute_seconds:.3f}", f"{row.step_seconds:.3f}")
    return table


def _link(up: str, down: str | None) -> str:
    return up if down is None else f"{up} up, {down} down"


def _kilo(count: float) -> str:
    return f"{count / 1e3:.2f}" if count < 1e5 else f"{count / 1e3:,.0f}"
