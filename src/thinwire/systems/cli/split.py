"""``thinwire split``: fine-tune a model across a cut between an edge, which has the data, and a cloud."""

from __future__ import annotations

import json as json_module
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import stdev
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.tools.cli.console import (
    Json,
    Watched,
    check_folder,
    check_output,
    check_plot,
    plain_table,
    progress,
    watched_load,
)

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn

    from thinwire.systems.split import Credentials, Link, Recipe, SplitPlan, SplitReport
    from thinwire.systems.split.estimate import Estimate
    from thinwire.systems.split.finetune import ComparisonRow
    from thinwire.systems.split.tasks import Task


def _help(text: str) -> Any:
    return typer.Option(help=text)


app = typer.Typer(help="Fine-tune a model across a cut between an edge and a cloud (SFT).", no_args_is_help=True)

Model = Annotated[
    str, _help("bert-small, distilbert-base, bert:layers=2:hidden=128:heads=4 ..., or a pre-trained model's directory.")
]
TaskName = Annotated[str, typer.Option("--task", help="stdlib, or a GLUE task with --data: cola, sst2, mrpc, ...")]
Data = Annotated[Path | None, _help("Directory with the task's train.tsv and dev.tsv.")]
Length = Annotated[int, _help("Tokens per sample; longer samples are truncated.")]
Most = Annotated[int, typer.Option("--lines", min=1, help="With stdlib: lines per package.")]
Cut = Annotated[int, _help("The layer to cut, counted from 1.")]
Rank = Annotated[int, _help("With principal and lowrank: numbers per token that cross the cut.")]
Up = Annotated[str, _help("Codecs for what goes up: none, fp16, bf16, int8, int4, delta:4; then optionally pack.")]
FrontOn = Annotated[str, _help("edge, or cloud as in the published code, where token ids leave the edge.")]
Epochs = Annotated[int, _help("Passes over the data.")]
Batch = Annotated[int, _help("Samples per step.")]
Rate = Annotated[float, typer.Option("--lr", help="Peak learning rate; from random weights lowrank needs a low one.")]
LinkUp = Annotated[str, typer.Option("--link", help="Rate from the edge to the cloud, such as 10mbit.")]
LinkDown = Annotated[
    str | None, typer.Option("--link-down", help="Rate from the cloud to the edge; by default the same.")
]
Delay = Annotated[str, _help("One-way delay, such as 10ms.")]
Keys = Annotated[Path | None, _help("This machine's directory from thinwire keys new; without it, no TLS.")]
Fingerprint = Annotated[str | None, _help("SHA-256 of the other side's certificate; no other is accepted.")]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Allow other machines without keys: everything goes unencrypted.")
]
Checkpoints = Annotated[Path | None, _help("Directory for this side's checkpoints, to continue after a stop.")]
Out = Annotated[Path | None, _help("Write the trained half to this .safetensors file.")]


@app.command(epilog="Example: thinwire split plan --cut 1 --rank 8 --link 10mbit --out halves")
def plan(
    model: Model = "bert-small",
    task: TaskName = "stdlib",
    data: Data = None,
    length: Length = 32,
    lines: Most = 1200,
    cut: Cut = 1,
    kind: Annotated[str, _help("principal, lowrank (the paper), ffn or boundary.")] = "lowrank",
    rank: Rank = 8,
    residual: Annotated[str, _help("drop, keep or lowrank:q.")] = "drop",
    labels: Annotated[str, _help("edge, or cloud, where labels leave the edge.")] = "edge",
    init: Annotated[str, _help("svd or activation.")] = "svd",
    up: Up = "none",
    down: Annotated[str, _help("Codecs for what comes down; delta only if that is the activation.")] = "none",
    front_on: FrontOn = "edge",
    epochs: Epochs = 3,
    batch_size: Batch = 32,
    lr: Rate = 1e-3,
    seed: Annotated[int, _help("Seed of weights, order and dropout.")] = 0,
    link: LinkUp = "10mbit",
    link_down: LinkDown = None,
    delay: Delay = "0",
    measure: Annotated[int, typer.Option(min=0, help="Steps to run here first, to time the computation; 0: none.")] = 5,
    out: Annotated[Path | None, _help("Cut the model and write both halves to this directory.")] = None,
    json: Json = False,
) -> None:
    """Predict a step's bytes and seconds on a link before anything is sent; --out cuts the model for both machines."""
    import torch
    from rich.console import Console

    from thinwire.systems.split import Recipe, SplitPlan, prepare
    from thinwire.systems.split.estimate import advise, name_of
    from thinwire.systems.split.finetune import sample_inputs

    chosen = SplitPlan(cut, kind, rank, residual, labels, init, read_words(up), read_words(down), front_on)
    wire = read_link(link, link_down, delay)
    build = model_builder(model, length, [chosen])
    recipe = Recipe(learning_rate=lr, epochs=epochs, batch_size=batch_size, seed=seed)
    if out is not None:
        check_folder(out)
    found = read_task(task, data, model, length, lines, seed)
    if chosen.leaves:
        typer.echo(chosen.leaves, err=True)
    with (
        watched_load(torch.get_num_threads()) if measure else nullcontext(Watched()) as load,
        progress(f"cutting {model}"),
    ):
        built = build(found, seed)
        rows = advise(built, found, chosen, recipe, wire, measure)
    answer = load.with_load({"plan": asdict(chosen), "rows": {name: row.to_data() for name, row in rows.items()}})
    if out is not None:
        words = {"name": task, "model": model, "pretrained": Path(model).is_dir()}
        words |= {"length": length, "lines": lines, "seed": seed}  # so that the edge reads the same task
        notes = {"task": words, "recipe": asdict(recipe)}
        answer["pair"] = prepare(built, chosen, out, sample_inputs(chosen, found, recipe, 4), notes)
    if json:
        typer.echo(json_module.dumps(answer, indent=2))
        return
    console = Console()
    console.print(plan_table(rows, found, link, link_down))
    steps, step = recipe.steps(len(found.train)), rows[name_of(chosen)].step_seconds
    if step is not None:
        console.print(f"{steps} steps in {epochs} epochs: about {_long(steps * step)} on this link", highlight=False)
    if out is not None:
        console.print(f"written: {out / 'edge.safetensors'} and {out / 'cloud.safetensors'}", markup=False)


@app.command(epilog="Example: thinwire split cloud halves")
def cloud(
    half: Annotated[Path, typer.Argument(help="cloud.safetensors from thinwire split plan --out, or its directory.")],
    listen: Annotated[str, _help("host:port to listen on.")] = "127.0.0.1:7443",
    keys: Keys = None,
    fingerprint: Fingerprint = None,
    insecure: Insecure = False,
    edges: Annotated[int, _help("How many edges to serve, one after the other.")] = 1,
    checkpoint_dir: Checkpoints = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """Be the cloud: wait for an edge, train this half with it, and end when it says goodbye."""
    from thinwire.systems.link.listener import split_address
    from thinwire.systems.split import split_finetune
    from thinwire.systems.split.surgery import half_file, read_facts

    check_output("--out", out)
    facts = read_facts(half_file(half, "cloud"), "cloud")
    address, recipe = split_address(listen), recipe_of(facts["notes"])
    trust = read_keys(keys, fingerprint, address[0], insecure)
    with _steps(f"the cloud's half of {facts['class']}") as on_step:
        report = split_finetune(
            None, half, role="cloud", recipe=recipe, address=address, tls=trust, insecure=insecure,
            checkpoint_dir=checkpoint_dir, edges=edges, on_step=on_step, say=lambda words: typer.echo(words, err=True),
        )  # fmt: skip
    _finish(report, facts, out, json)


@app.command(epilog="Example: thinwire split edge halves")
def edge(
    half: Annotated[Path, typer.Argument(help="edge.safetensors from thinwire split plan --out, or its directory.")],
    cloud: Annotated[str, _help("host:port of the cloud.")] = "127.0.0.1:7443",
    keys: Keys = None,
    name: Annotated[str, _help("This edge's name, if no certificate gives it.")] = "edge",
    fingerprint: Fingerprint = None,
    insecure: Insecure = False,
    data: Data = None,
    tokenizer: Annotated[Path | None, _help("Directory of a pre-trained model's tokeniser.")] = None,
    share: Annotated[str, _help("With several edges, this one's part of the data, such as 1/4.")] = "1/1",
    checkpoint_dir: Checkpoints = None,
    checkpoint_every: Annotated[int, _help("Steps between checkpoints.")] = 100,
    reconnect: Annotated[float, _help("Seconds to keep trying to reach a lost cloud.")] = 30.0,
    patience: Annotated[float, _help("Seconds to wait for a reply from the cloud.")] = 60.0,
    out: Out = None,
    json: Json = False,
) -> None:
    """Be the edge: read the data, lead the training, evaluate the result."""
    from thinwire.systems.link.listener import split_address
    from thinwire.systems.split import SplitPlan, split_finetune
    from thinwire.systems.split.surgery import half_file, read_facts

    check_output("--out", out)
    facts = read_facts(half_file(half, "edge"), "edge")
    leaves = SplitPlan.from_json(facts["plan"]).leaves
    recipe = recipe_of(facts["notes"])
    address, (place, count) = split_address(cloud), read_share(share)
    trust = read_keys(keys, fingerprint, address[0], insecure)
    task = task_of(facts["notes"], data, tokenizer)
    if count > len(task.train):
        raise ValueError(f"share '{place}/{count}': there are only {len(task.train)} samples")
    task = replace(task, train=task.train.part(range(place - 1, len(task.train), count)))
    typer.echo(task.describe, err=True)
    if leaves:
        typer.echo(leaves, err=True)
    with _steps(f"the edge's half of {facts['class']}") as on_step, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "front_on='cloud'")  # already reported
        report = split_finetune(
            None, half, task, role="edge", recipe=recipe, address=address, tls=trust, insecure=insecure, name=name,
            checkpoint_dir=checkpoint_dir, checkpoint_every=checkpoint_every, reconnect_seconds=reconnect,
            receive_seconds=patience, on_step=on_step,
        )  # fmt: skip
    _finish(report, facts, out, json)


@app.command(epilog="Example: thinwire split compare --plans lowrank:int8,pack --seeds 3 --plot split.png")
def compare(
    model: Model = "bert:layers=2:hidden=128:heads=4",
    task: TaskName = "stdlib",
    data: Data = None,
    length: Length = 32,
    lines: Most = 600,
    cut: Cut = 1,
    rank: Rank = 8,
    plans: Annotated[
        str, _help("Rows, by blanks: boundary, principal, lowrank; codecs after a colon, as in lowrank:int8,pack.")
    ] = "boundary lowrank lowrank:int8,pack lowrank:int4,pack",
    front_on: FrontOn = "edge",
    epochs: Epochs = 3,
    batch_size: Batch = 32,
    lr: Rate = 1e-3,
    seeds: Annotated[int, _help("Number of seeds; the table shows mean and spread.")] = 1,
    link: LinkUp = "10mbit",
    link_down: LinkDown = None,
    delay: Delay = "0",
    plot: Annotated[
        Path | None, _help("Also plot score against bytes and loss against seconds: .png or .html.")
    ] = None,
    json: Json = False,
) -> None:
    """Train with and without cuts on the same data, seeds and initial weights: accuracy, bytes, seconds."""
    import torch
    from rich.console import Console

    from thinwire.systems.split import Recipe
    from thinwire.systems.split import compare as compare_plans
    from thinwire.systems.split.finetune import compare_picture
    from thinwire.tools.pictures import write_picture

    if seeds < 1:
        raise ValueError("--seeds must be at least 1")
    check_plot(plot)
    rows = read_rows(plans, cut, rank, front_on)
    wire = read_link(link, link_down, delay)
    build = model_builder(model, length, rows.values())
    recipe = Recipe(learning_rate=lr, epochs=epochs, batch_size=batch_size)
    found = read_task(task, data, model, length, lines, 0)
    losses: dict[str, list[float]] = {}
    now = {"row": "", "seed": 0}
    about = f"training {model} with and without cuts"
    with watched_load(torch.get_num_threads()) as load, _steps(about) as show:

        def on_step(done: int, total: int, loss: float) -> None:
            show(done, total, loss, f"{now['row']}, seed {now['seed']}")
            if now["seed"] == 0:
                losses.setdefault(str(now["row"]), []).append(loss)

        made = compare_plans(
            partial(build, found), found, rows, recipe, wire, range(seeds), on_step,
            lambda name, seed: now.update(row=name, seed=seed),
        )  # fmt: skip
    title = f"{model}, {found.describe}, link {link}"
    picture = compare_picture(made, losses, found.metric, title)
    if plot is not None:
        write_picture(picture, plot)
    if json:
        answer = {"task": found.describe, "rows": [row.to_data() for row in made], "picture": asdict(picture)}
        typer.echo(json_module.dumps(load.with_load(answer), indent=2))
    else:
        Console().print(compare_table(made, found, link, link_down, seeds))
        if plot is not None:
            typer.echo(f"written: {plot}")


@contextmanager
def _steps(begins: str) -> Iterator[Callable[..., None]]:
    with progress(begins) as shown:

        def on_step(done: int, total: int, loss: float, what: str = "steps") -> None:
            words = f"{what}, loss {loss:.3f}" if loss == loss else what
            shown(completed=done, total=total or None, description=words)

        yield on_step


def _long(seconds: float) -> str:
    for unit, size in (("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def _finish(report: SplitReport, facts: dict[str, Any], out: Path | None, json: bool) -> None:
    from thinwire.systems.split.surgery import write_half

    if out is not None:
        write_half(report.half[0], facts, out)
    if json:
        typer.echo(json_module.dumps(report.to_data(), indent=2))
        return
    seen = f"{report.steps} steps in {report.seconds:.1f} s"
    if report.steps:
        seen += f", {report.training.wire / report.steps / 1e3:.1f} kB per step through the socket"
        seen += ", evaluation included" if report.score is None else ""  # the cloud's counters do not separate them
    typer.echo(seen)
    if report.score is not None:
        typer.echo(f"score on the held-out samples: {report.score:.4f}")
    if out is not None:
        typer.echo(f"written: {out}")


def read_words(text: str) -> tuple[str, ...]:
    """Parse ``"int8,pack"`` as codecs; "none" or "" means none. The plan checks them."""
    return tuple(word.strip() for word in text.split(",") if word.strip() and word.strip() != "none")


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
    from thinwire.systems.split import tasks

    columns = tasks.COLUMNS
    if name != "stdlib" and name not in columns:
        from thinwire.core.checks import meant

        ask = meant(name, ["stdlib", *columns])
        raise ValueError(
            f"task {name!r} is unknown; {ask}use stdlib, or one of GLUE's {', '.join(columns)} with --data"
        )
    if name != "stdlib" and data is None:
        raise ValueError(f"task {name!r} needs --data, the directory with its train.tsv")
    if length < 3:
        raise ValueError(f"--length {length} must be at least 3: two tokens of each sample mark its ends")
    with progress(f"reading task {name}"):
        tokenizer = tasks.local_tokenizer(Path(model)) if Path(model).is_dir() else None
        if data is None or name == "stdlib":
            return tasks.stdlib_task(most, length, seed=seed, tokenizer=tokenizer)
        if tokenizer is None:
            first, second, _ = tasks.read_tsv(data / "train.tsv", columns[name])
            tokenizer = tasks.trained_tokenizer([*first, *(second or [])], 8000)
        return tasks.glue_task(name, data, tokenizer, length)


def model_builder(text: str, length: int, plans: Iterable[SplitPlan] = ()) -> Callable[[Task, int], nn.Module]:
    """Return what makes the model of a task and a seed, which all of the plans must be able to cut."""
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


def read_link(up: str, down: str | None, latency: str) -> Link:
    from thinwire.systems.split import Link
    from thinwire.tools.lab import parse_delay, parse_rate

    return Link(parse_rate(up), parse_rate(down or up), parse_delay(latency))


def read_keys(directory: Path | None, fingerprint: str | None, host: str, insecure: bool) -> Credentials | None:
    """Read what ``thinwire keys new`` wrote for a machine; None: no TLS, for this machine only or on request."""
    from thinwire.systems.split import Credentials
    from thinwire.systems.split.connection import trust_of

    if directory is None:
        trust_of(host, None, insecure)
        if fingerprint is not None:
            raise ValueError("--fingerprint belongs to a TLS certificate: give --keys too")
        return None
    found = Credentials.of(directory)
    return found if fingerprint is None else found.pinned(fingerprint)


def recipe_of(notes: dict[str, Any]) -> Recipe:
    from thinwire.systems.split import Recipe

    try:
        return Recipe(**notes["recipe"])
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"this file contains no training options: give one that thinwire split plan --out wrote ({error})"
        ) from error


def plan_table(rows: Mapping[str, Estimate], task: Task, link: str, link_down: str | None) -> Table:
    columns = ("cut", "kB up", "kB down", "messages", "of boundary", "link s", "compute s", "step s")
    table = plain_table(f"{task.describe}; {_link(link, link_down)}", columns, close=True)
    base = rows["boundary"].wire
    for name, row in rows.items():
        seconds = [row.link_seconds, row.compute_seconds, row.step_seconds]
        sizes = _kilo(row.bytes_up), _kilo(row.bytes_down), str(row.messages), f"1/{base / row.wire:.1f}"
        table.add_row(name, *sizes, *("-" if value is None else f"{value:.3f}" for value in seconds))
    return table


def compare_table(rows: Sequence[ComparisonRow], task: Task, link: str, link_down: str | None, seeds: int) -> Table:
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
                ratios = plain.state_bytes / row.state_bytes, plain.wire_bytes / row.wire_bytes
                cells[1:] = [f"1/{ratio:.1f}" for ratio in ratios]
        table.add_row(row.name, score, *cells, f"{row.compute_seconds:.3f}", f"{row.step_seconds:.3f}")
    return table


def _link(up: str, down: str | None) -> str:
    return up if down is None else f"{up} up, {down} down"


def _kilo(count: float) -> str:
    return f"{count / 1e3:.2f}" if count < 1e5 else f"{count / 1e3:,.0f}"
