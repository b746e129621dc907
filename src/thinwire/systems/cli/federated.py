"""``thinwire federated``: simulate a federation, predict its rounds, deploy it on Flower."""

from __future__ import annotations

import json as json_module
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.core.checks import check_number
from thinwire.core.words import counted
from thinwire.tools.cli.console import (
    Plot,
    RunFailed,
    check_folder,
    check_output,
    check_plot,
    exit_code,
    plain_table,
    progress,
    torchrun_group,
)

if TYPE_CHECKING:
    from rich.table import Table

    from thinwire.systems.federated import Federation, History, Prediction, RoundRecord

_MOST_ROWS = 25


def _help(text: str) -> Any:
    return typer.Option(help=text)


app = typer.Typer(help="Federated learning: many clients, few devices.", no_args_is_help=True)

_FEDERATION = Annotated[
    str, typer.Argument(help="digits, text, million, or module:function of your own; options as in digits:clients=50.")
]


@app.command(epilog="Example: thinwire federated run digits --algorithm fedavg,scaffold --rounds 20")
def run(
    federation: _FEDERATION = "digits",
    algorithm: Annotated[
        str | None,
        typer.Option(
            help="fedavg, fedprox, fedopt, fednova, mime, scaffold, feddyn, fedrobust; options as in scaffold:lr=0.1; "
            "several, separated by commas, run side by side. Options not named stay as the federation has them."
        ),
    ] = None,
    compress: Annotated[str | None, _help("Method for the clients' changes, such as topk:density=0.01.")] = None,
    rounds: Annotated[int | None, _help("Total number of rounds; a resumed run continues up to it.")] = None,
    clients_per_round: Annotated[int | None, _help("How many clients train in each round.")] = None,
    devices: Annotated[
        int | None, _help("Number of emulated devices. Not under torchrun, where each rank is one.")
    ] = None,
    schedule: Annotated[str, _help("auto, equal, lpt or pull.")] = "auto",
    reduction: Annotated[str | None, _help("fp32, fp64 or exact.")] = None,
    seed: Annotated[int | None, _help("Seed of cohorts and clients.")] = None,
    evaluate_every: Annotated[
        int | None, _help("Rounds between evaluations; by default at most 20 evaluations.")
    ] = None,
    per_client: Annotated[
        bool, typer.Option("--per-client", help="Also show the accuracy of the median client and of the worst tenth.")
    ] = False,
    checkpoint_dir: Annotated[Path | None, _help("Folder for checkpoints; a run found there is continued.")] = None,
    checkpoint_every: Annotated[int, _help("Rounds between checkpoints.")] = 1,
    state_memory: Annotated[int, _help("Bytes of client states in memory; the rest is on disk.")] = 1 << 30,
    threads: Annotated[int, _help("torch's threads in each process; more than 1 pays off for large models.")] = 1,
    trace: Annotated[
        Path | None, _help("File with the speeds of the clients' own devices, to compute their seconds.")
    ] = None,
    out: Annotated[Path | None, _help("File for the weights, by name, as safetensors.")] = None,
    plot: Plot = None,
    json: Annotated[bool, typer.Option("--json", help="Print the history as JSON on stdout.")] = False,
) -> None:
    """Train a federation here: in this process, or on the ranks that torchrun has started."""
    import torch
    from rich.console import Console

    from thinwire.systems.federated import ClientStateStore, ClientTrace
    from thinwire.systems.federated.history import history_picture
    from thinwire.systems.federated.schedule import check_schedule
    from thinwire.systems.federated.simulate import use_ranks
    from thinwire.tools.pictures import write_picture

    check_plot(plot)
    check_output("--out", out)
    if threads < 1:
        raise ValueError(f"--threads {threads} must be at least 1")
    given = {
        "rounds": rounds, "clients_per_round": clients_per_round, "seed": seed, "reduction": reduction,
        "evaluate_every": evaluate_every,
    }  # fmt: skip
    asked = federations(federation, algorithm, compress, given, checkpoint_every, per_client=per_client)
    use_ranks("auto", devices, None, None)
    check_schedule(schedule)
    if checkpoint_dir is not None:
        check_folder(checkpoint_dir, "--checkpoint-dir")
    if out is not None and len(asked) > 1:
        raise ValueError("--out takes the weights of one algorithm: name only one")
    torch.set_num_threads(threads)
    options: dict[str, Any] = {"checkpoint_every": checkpoint_every, "schedule": schedule, "devices": devices}
    options["trace"] = None if trace is None else ClientTrace.read(trace)
    console = Console(quiet=json)
    runs: dict[str, History] = {}
    with torchrun_group() as (rank, _):
        console.quiet = json or rank != 0
        for name, made in asked.items():
            folder = checkpoint_dir
            if folder is not None and len(asked) > 1:  # each run has its own
                folder /= re.sub(r"[^\w.=-]+", "-", name).lower()
            store = {}
            if made.algorithm.stateful:
                states = None if folder is None else folder / "states"
                store["state"] = ClientStateStore(len(made.clients), states, state_memory)
            console.print(in_force(made.algorithm), markup=False, highlight=False)
            runs[name] = train(name, made, rank, checkpoint_dir=folder, **options, **store)
    if rank != 0:
        return
    made = list(asked.values())[-1]
    title = f"{federation}, {made.clients_per_round} of {len(made.clients)} clients a round"
    picture = history_picture(runs, title, made.chance)
    if json:
        only = [json_module.loads(history.to_json()) for history in runs.values()]
        data = only[0] if len(runs) == 1 else {"runs": dict(zip(runs, only))}
        typer.echo(json_module.dumps({**data, "picture": asdict(picture)}))
    for name, history in runs.items():
        if len(runs) == 1:
            console.print(rounds_table(history, console.width))
            console.print(traffic(history), markup=False)
        for sentence in failures(history):
            console.print(sentence if len(runs) == 1 else f"{name}, {sentence}", style="yellow", markup=False)
    if len(runs) > 1:
        console.print(algorithms_table(runs, f"{title}, {counted(made.rounds, 'round')}", console.width))
    if out is not None:
        from thinwire.core.durable import write_whole
        from thinwire.systems.federated.state import pack

        write_whole(out, pack({**dict(made.model.named_parameters()), **dict(made.model.named_buffers())}))
        console.print(f"written: {out}", markup=False)
    if plot is not None:
        write_picture(picture, plot)
        console.print(f"written: {plot}", markup=False)
    said = [(name, spent(one)) for name, one in asked.items()]
    said += [(name, outcome(history, made.chance)) for name, history in runs.items()]
    for name, words in said:
        if words is not None:
            console.print(words if len(runs) == 1 else f"{name}, {words}", markup=False, highlight=False)


@app.command(epilog="Example: thinwire federated predict --fast 4 --slow 4")
def predict(
    devices: Annotated[
        Path | None, _help('File with speeds, a JSON list such as [{"seconds_per_sample": 0.01}, ...].')
    ] = None,
    fast: Annotated[int, _help("Without --devices: number of devices that take 10 ms per sample.")] = 4,
    slow: Annotated[int, _help("Without --devices: number of devices that are four times slower.")] = 4,
    clients: Annotated[int, _help("Total number of clients.")] = 1000,
    clients_per_round: Annotated[int, _help("How many clients train in each round.")] = 100,
    mean: Annotated[float, typer.Option(help="Mean number of samples per client, log-normally distributed.")] = 50.0,
    spread: Annotated[
        float, typer.Option(help="Standard deviation of that number's logarithm; 0: all the same.")
    ] = 1.0,
    rounds: Annotated[int, _help("Number of rounds to average over.")] = 50,
    seed: Annotated[int, _help("Seed of sizes and cohorts.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print all rounds as JSON on stdout.")] = False,
) -> None:
    """Predict the seconds per round under each schedule, by the clock alone: nothing is trained."""
    import numpy as np
    from rich.console import Console

    from thinwire.systems.federated import Speed
    from thinwire.systems.federated import predict as predicted
    from thinwire.systems.federated.clocks import read_speeds

    check_number("--mean", mean, above=0, most=1e9)
    check_number("--spread", spread, least=0, most=10)
    if min(fast, slow) < 0 or clients < 1:
        raise ValueError("--fast and --slow must be at least 0, and --clients at least 1")
    speeds = read_speeds(devices) if devices else [Speed(0.01)] * fast + [Speed(0.04)] * slow
    draw = np.random.default_rng(seed).lognormal(math.log(mean) - spread**2 / 2, spread, size=clients)
    sizes = np.maximum(1, np.rint(draw)).astype(int)
    numbers: dict[str, Any] = {"rounds": rounds, "clients_per_round": clients_per_round, "seed": seed}
    schedules = ("equal", "lpt", "pull", "auto")
    found = [predicted(name, clients, lambda i: int(sizes[i]), speeds, **numbers) for name in schedules]
    if json:
        typer.echo(json_module.dumps([{**asdict(one), "seconds": one.seconds, "ratio": one.ratio} for one in found]))
        return
    title = f"{clients_per_round} of {clients} clients a round, {counted(len(speeds), 'device')}"
    title += f", {counted(rounds, 'round')}"
    Console().print(schedules_table(found, title))


@app.command(epilog="Example: thinwire federated new mine")
def new(
    folder: Annotated[Path, typer.Argument(help="Folder to write to; created if it does not exist.")],
) -> None:
    """Start a federation of your own: a folder with a working one, whose data, model and algorithm you replace."""
    template = resources.files("thinwire.systems.federated") / "template"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} already exists and is not empty: give another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("README.md", "federation.py", "speeds.json"):
            (folder / name).write_bytes(template.joinpath(name).read_bytes())
            typer.echo(f"written: {folder / name}")
    except OSError as error:
        raise ValueError(f"{folder} cannot be written: {error.strerror}") from error
    typer.echo(f"next: cd {shlex.quote(str(folder))} && thinwire federated run federation:build")


@app.command(epilog="Example: thinwire federated serve federation:build --nodes 2 --local")
def serve(
    federation: Annotated[str, typer.Argument(help="module:function of your own, from a file in this folder.")],
    nodes: Annotated[int, _help("SuperNodes to wait for.")] = 2,
    local: Annotated[bool, typer.Option("--local", help="Also start these SuperNodes here.")] = False,
    host: Annotated[str, _help("Address of the SuperLink.")] = "127.0.0.1",
    port: Annotated[int, _help("Port of the SuperLink; 0: a free one.")] = 0,
    certificates: Annotated[
        Path | None, _help("Folder of ca.crt, server.pem, server.key; created if it does not exist.")
    ] = None,
    out: Annotated[Path, _help("Folder for weights and history.")] = Path("federated-result"),
    timeout: Annotated[float, _help("Seconds for nodes to connect and to answer.")] = 600.0,
    json: Annotated[bool, typer.Option("--json", help="Print the history as JSON on stdout.")] = False,
) -> None:
    """Deploy a federation on Flower: a SuperLink with TLS here, SuperNodes here or elsewhere."""
    from rich.console import Console

    from thinwire.systems.federated import History
    from thinwire.systems.federated.flower.deploy import Deployment

    check_folder(out)
    deployment = Deployment(federation, nodes, local, host, port, certificates, out, timeout)
    with progress("starting the SuperLink") as bar:
        deployment.run(lambda text: bar(description=text), bar.log)
    history = History.from_json((out / "history.json").read_text())
    if json:
        typer.echo(history.to_json())
        return
    typer.echo(f"{outcome(history)}, on {history.about['nodes']} nodes; written: {out}")
    for sentence in failures(history):
        Console(stderr=True).print(sentence, style="yellow", markup=False)


def federations(
    federation: str, algorithms: str | None, compress: str | None, given: Mapping[str, Any], checkpoint_every: int, *,
    per_client: bool,
) -> dict[str, Federation]:  # fmt: skip
    from thinwire.core.checks import check_choice
    from thinwire.systems.federated.builtin import build_algorithm, build_federation, compressed
    from thinwire.systems.federated.device import REDUCTIONS
    from thinwire.systems.federated.simulate import check_numbers

    texts = [None] if algorithms is None else [text.strip() for text in algorithms.split(",") if text.strip()]
    if not texts:
        raise ValueError("--algorithm: name one, or several separated by commas, such as scaffold,fedavg")
    found: dict[str, Federation] = {}
    for text in texts:
        made = build_federation(federation)
        own = made.algorithm
        made.algorithm = compressed(own, compress) if text is None else build_algorithm(text, own, compress)
        for option, value in given.items():
            if value is not None:
                setattr(made, option, value)
        check_choice("reduction", made.reduction, REDUCTIONS)
        check_numbers(made.rounds, made.clients_per_round, len(made.clients), made.evaluate_every, checkpoint_every)
        if per_client:
            if made.per_client is None:
                raise ValueError(
                    f"--per-client: give {federation} a per_client=, such as fl.over_clients(right, clients)"
                )
            parts = [part for part in (made.evaluate, made.per_client) if part is not None]
            made.evaluate = lambda model, round, parts=parts: {k: v for f in parts for k, v in f(model, round).items()}
        name = " ".join([type(getattr(made.algorithm, "inner", made.algorithm)).__name__, *(text or "").split(":")[1:]])
        if name in found:
            raise ValueError(f"--algorithm names {name} twice")
        found[name] = made
    return found


def spent(made: Federation) -> str | None:
    """Return how much of its clients' privacy a run with DP-SGD has spent; None: it ran without."""
    from thinwire.systems.federated.private import epsilons

    algorithm = getattr(made.algorithm, "inner", made.algorithm)
    if getattr(algorithm, "noise_multiplier", None) is None:
        return None
    found = epsilons(
        algorithm, made.clients, rounds=made.rounds, clients_per_round=made.clients_per_round, seed=made.seed
    ).values()
    return f"privacy spent, at delta 1e-05: epsilon {median(found):.3g} for the median client, {max(found):.3g} at most"


def train(name: str, made: Federation, rank: int, **options: Any) -> History:
    """Run one federation here; ``RunFailed``: not to its end, by an error of the machine's or of the user's code."""
    from thinwire.tools.bench.words import in_words, is_users

    first: int | None = None
    with progress(f"{name}, first round", made.rounds, quiet=rank != 0) as bar:

        def shown(row: RoundRecord) -> None:
            nonlocal first
            if first is None:
                first = row.round
                if first:
                    bar.log(f"{name}: continuing from round {first}")
            words = f"{name}  " + ", ".join(f"{key} {value:.3g}" for key, value in list(row.numbers.items())[:3])
            bar(completed=row.round + 1, description=words)
            if row.evaluation and bar.hidden:
                bar.log(f"round {row.round + 1} of {made.rounds}  {words}")

        try:
            history = made.simulate(on_round=shown, **options)
        except (OverflowError, OSError) as error:
            raise RunFailed(str(error)) from error
        except Exception as error:
            if exit_code(error) is None and is_users(error):
                raise RunFailed(in_words(error)) from error
            raise
        if first is None:
            done, folder = len(history.rounds), options["checkpoint_dir"]
            bar.log(f"{name}: {folder} already contains {done} rounds, none was trained")
    return history


def in_force(algorithm: Any) -> str:
    from thinwire.systems.federated.aggregator import facts_of

    def words(options: Mapping[str, Any]) -> str:  # a constant learning rate is not worth a word
        off = (None, False, 0)
        on = {k: v for k, v in options.items() if v not in off and (k, v) != ("lr_decay", 1.0)}
        return ", ".join(f"{key}={value}" for key, value in on.items())

    inner = getattr(algorithm, "inner", algorithm)
    found = facts_of(inner)
    said = f"{found.pop('algorithm')} with {words(found)}"
    if inner is not algorithm:
        said += f"; changes compressed by {algorithm.method.name} with {words(algorithm.method.options())}"
    return said


def outcome(history: History, chance: Mapping[str, float] | None = None) -> str:
    last = history.rounds[-1]
    guessed = {name: f" (chance: {value:.3g})" for name, value in (chance or {}).items()}
    words = [f"{name} {value:.4g}{guessed.get(name, '')}" for name, value in last.numbers.items()]
    return f"after {counted(len(history.rounds), 'round')}: {', '.join(words)}"


def rounds_table(history: History, width: int) -> Table:
    """Return a table of rounds, from the untrained model on; in a long run only evaluated rounds, or every N-th."""
    from thinwire.systems.federated.history import TRAINING_LOSS

    about, rows = history.about, history.rounds
    shown = list(rows)
    if len(shown) > _MOST_ROWS:
        shown = [row for row in rows if row.evaluation or row is rows[-1]]
        shown = shown[:: -(-len(shown) // _MOST_ROWS)]
        shown += [rows[-1]] * (shown[-1] is not rows[-1])
    numbers = _evaluated(history)
    columns = {"round": [str(row.round + 1) for row in shown]}
    columns |= {name: [_number(row.numbers.get(name)) for row in shown] for name in (TRAINING_LOSS, *numbers)}
    if any(row.failed for row in rows):
        columns["failed"] = [str(len(row.failed) or "") for row in shown]
    if any(row.client_seconds is not None for row in rows):
        columns["clients' s"] = [f"{row.client_seconds or 0:.1f}" for row in shown]
    columns["seconds"] = [f"{row.seconds:.3f}" for row in shown]
    if about["devices"] > 1:
        columns["schedule"] = [" ".join(dict.fromkeys(row.schedule.split())) for row in shown]
        columns["busy"] = [
            f"{fmean(row.busy_seconds) / row.device_seconds:.0%}" if row.device_seconds else "-" for row in shown
        ]
    columns["MB up"] = [f"{_sent(row) / 1e6:.3f}" for row in shown]
    if history.start:
        untrained = {"round": "0", **{name: _number(history.start.get(name)) for name in numbers}}
        columns = {name: [untrained.get(name, ""), *cells] for name, cells in columns.items()}
    devices = counted(about["devices"], "device")
    name = f"{about['inner']['algorithm']}, compressed" if "inner" in about else about["algorithm"]
    return _fitting(
        f"{name}: {about['clients_per_round']} of {about['clients']} clients a round, {devices}", columns, width
    )


def algorithms_table(runs: Mapping[str, History], title: str, width: int) -> Table:
    from thinwire.systems.federated.history import TRAINING_LOSS

    numbers = list(dict.fromkeys(name for history in runs.values() for name in _evaluated(history)))
    last = [history.rounds[-1] for history in runs.values()]
    columns = {"algorithm": list(runs)}
    columns |= {name: [_number(row.numbers.get(name)) for row in last] for name in (*numbers, TRAINING_LOSS)}
    rounds = [history.rounds for history in runs.values()]
    if any(row.client_seconds is not None for rows in rounds for row in rows):
        columns["clients' s"] = [f"{sum(row.client_seconds or 0 for row in rows):.1f}" for rows in rounds]
    columns["seconds"] = [f"{sum(row.seconds for row in rows):.1f}" for rows in rounds]
    columns["MB a client"] = [f"{fmean(row.client_bytes / row.clients for row in rows) / 1e6:.3f}" for rows in rounds]
    return _fitting(title, columns, width)


def _sent(row: RoundRecord) -> int:
    return row.bytes_up + row.control_bytes


def _evaluated(history: History) -> list[str]:
    return sorted({name for row in history.rounds for name in row.evaluation})


def _fitting(title: str, columns: Mapping[str, Sequence[str]], width: int) -> Table:
    """Return a table of the first columns that fit, which says what it leaves out."""
    names = list(columns)
    needed = {name: max(map(len, (name, *cells))) for name, cells in columns.items()}
    while len(names) > 2 and sum(needed[name] + 1 for name in names) + 1 > width:
        names.pop()
    table = plain_table(title, names, ("schedule",), close=sum(needed[name] + 3 for name in names) > width)
    for cells in zip(*(columns[name] for name in names), strict=True):
        table.add_row(*cells)
    if left_out := [name for name in columns if name not in names]:
        table.caption = f"no room here for: {', '.join(left_out)} (--json has all)"
        table.caption_justify = "left"
    return table


def traffic(history: History) -> str:
    row = history.rounds[-1]
    sent, alone = (f"{count / 1e6:.3g} MB" for count in (_sent(row), row.client_bytes))
    return f"the devices sent {sent} in the last round; its clients, each on its own, would have sent {alone}"


def failures(history: History, most: int = 5) -> list[str]:
    failed = [(row.round + 1, *one) for row in history.rounds for one in row.failed.items()]
    more = [f"... and {len(failed) - most} more"] if len(failed) > most else []
    return [f"round {round}, client {client}: {why}" for round, client, why in failed[:most]] + more


def schedules_table(found: Sequence[Prediction], title: str) -> Table:
    table = plain_table(title, ("schedule", "seconds a round", "to the bound", "devices busy"))
    table.caption = "Means. lpt and auto deal out the first 2 rounds as equal does."
    table.caption_justify = "left"
    for one in found:
        table.add_row(one.schedule, f"{one.seconds:.3g}", f"{one.ratio:.2f}", f"{one.busy_share:.0%}")
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
