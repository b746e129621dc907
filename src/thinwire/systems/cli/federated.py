"""``thinwire federated``: simulate a federation, predict its rounds, deploy it on Flower."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from thinwire.core.records import plain
from thinwire.core.words import counted
from thinwire.tools.cli.console import Output, RunFailed, exit_code, note, plain_table, progress, torchrun_group
from thinwire.tools.cli.options import JsonOption, PlotOption
from thinwire.tools.cli.verb import Verb, argument, option

if TYPE_CHECKING:
    from rich.table import Table

    from thinwire.systems.federated import Federation, History, Prediction, RoundRecord

_MOST_ROWS = 25
_OF_A_FEDERATION = ["rounds", "clients_per_round", "seed", "reduction", "evaluate_every"]


class FederatedRunVerb(PlotOption, JsonOption):
    """Train a federation here: in this process, or on the ranks that torchrun has started.

    Example: thinwire federated run digits --algorithm fedavg,scaffold --rounds 20
    """

    federation: str = argument("digits", "digits, text, million or module:function; options as in digits:clients=50.")
    algorithm: str | None = option(
        None,
        "fedavg, fedprox, fedopt, fednova, mime, scaffold, feddyn, fedrobust; options as in scaffold:lr=0.1; several, "
        "separated by commas, run side by side. Options not named stay as the federation has them.",
    )
    compress: str | None = option(None, "Method for the clients' changes, such as topk:density=0.01.")
    rounds: int | None = option(None, "Total number of rounds; a resumed run continues up to it.")
    clients_per_round: int | None = option(None, "How many clients train in each round.")
    devices: int | None = option(None, "Number of emulated devices. Not under torchrun, where each rank is one.")
    schedule: str = option("auto", "auto, equal, lpt or pull.")
    reduction: str | None = option(None, "fp32, fp64 or exact.")
    seed: int | None = option(None, "Seed of cohorts and clients.")
    evaluate_every: int | None = option(None, "Rounds between evaluations; by default at most 20 evaluations.")
    per_client: bool = option(False, "Also show the accuracy of the median client and of the worst tenth.")
    checkpoint_dir: Path | None = option(None, "Folder for checkpoints; a run found there goes on.", writes="folder")
    checkpoint_every: int = option(1, "Rounds between checkpoints.")
    state_memory: int = option(1 << 30, "Bytes of client states in memory; the rest is on disk.")
    threads: int = option(1, "torch's threads in each process; more than 1 pays off for large models.", least=1)
    trace: Path | None = option(None, "File with the speeds of the clients' own devices, to compute their seconds.")
    out: Path | None = option(None, "File for the weights, by name, as safetensors.", writes="file")

    def run(self, output: Output) -> Any:
        import torch

        from thinwire.systems.federated import ClientStateStore, ClientTrace
        from thinwire.systems.federated.history import history_picture
        from thinwire.systems.federated.schedule import check_schedule
        from thinwire.systems.federated.simulate import use_ranks

        asked = self.federations()
        use_ranks("auto", self.devices, None, None)
        check_schedule(self.schedule)
        if self.out is not None and len(asked) > 1:
            raise ValueError("--out takes the weights of one algorithm: name only one")
        torch.set_num_threads(self.threads)
        options: dict[str, Any] = self.part(["checkpoint_every", "schedule", "devices"])
        options["trace"] = None if self.trace is None else ClientTrace.read(self.trace)
        runs: dict[str, History] = {}
        with torchrun_group() as (rank, _):
            output.console.quiet |= rank != 0
            for name, made in asked.items():
                folder = self.checkpoint_dir
                if folder is not None and len(asked) > 1:  # each run has its own
                    folder /= re.sub(r"[^\w.=-]+", "-", name).lower()
                store = {}
                if made.algorithm.stateful:
                    states = None if folder is None else folder / "states"
                    store["state"] = ClientStateStore(len(made.clients), states, self.state_memory)
                output.say(in_force(made.algorithm))
                runs[name] = train(name, made, rank, checkpoint_dir=folder, **options, **store)
        if rank != 0:
            return None
        made = list(asked.values())[-1]
        title = f"{self.federation}, {made.clients_per_round} of {len(made.clients)} clients a round"
        begins = {name: "" if len(runs) == 1 else f"{name}, " for name in runs}
        for name, history in runs.items():
            if len(runs) == 1:
                output.say(rounds_table(history, output.console.width))
                output.say(traffic(history))
            output.say(*(begins[name] + sentence for sentence in failures(history)), style="yellow")
        if len(runs) > 1:
            whole = f"{title}, {counted(made.rounds, 'round')}"
            output.say(algorithms_table(runs, whole, output.console.width))
        if self.out is not None:
            from thinwire.core.durable import write_whole
            from thinwire.systems.federated.state import pack

            write_whole(self.out, pack({**dict(made.model.named_parameters()), **dict(made.model.named_buffers())}))
            output.wrote(self.out)
        said = [(name, spent(one)) for name, one in asked.items()]
        said += [(name, outcome(history, made.chance)) for name, history in runs.items()]
        output.say(*(begins[name] + words for name, words in said if words is not None))
        data = plain(next(iter(runs.values()))) if len(runs) == 1 else {"runs": plain(runs)}
        return {**data, "picture": history_picture(runs, title, made.chance)}

    def federations(self) -> dict[str, Federation]:
        """Return what runs, by name: the federation with each of the algorithms."""
        from thinwire.core.checks import check_choice
        from thinwire.systems.federated.builtin import build_algorithm, build_federation, compressed
        from thinwire.systems.federated.device import REDUCTIONS
        from thinwire.systems.federated.simulate import check_numbers

        texts = (
            [None] if self.algorithm is None else [text.strip() for text in self.algorithm.split(",") if text.strip()]
        )
        if not texts:
            raise ValueError("--algorithm: name one, or several separated by commas, such as scaffold,fedavg")
        found: dict[str, Federation] = {}
        for text in texts:
            made = build_federation(self.federation)
            own, compress = made.algorithm, self.compress
            made.algorithm = compressed(own, compress) if text is None else build_algorithm(text, own, compress)
            for attribute, value in self.part(_OF_A_FEDERATION).items():
                if value is not None:
                    setattr(made, attribute, value)
            check_choice("reduction", made.reduction, REDUCTIONS)
            numbers = (made.rounds, made.clients_per_round, len(made.clients), made.evaluate_every)
            check_numbers(*numbers, self.checkpoint_every)
            if self.per_client:
                if made.per_client is None:
                    raise ValueError(
                        f"--per-client: give {self.federation} a per_client=, such as fl.over_clients(right, clients)"
                    )
                parts = [part for part in (made.evaluate, made.per_client) if part is not None]
                made.evaluate = lambda model, round, parts=parts: {
                    k: v for f in parts for k, v in f(model, round).items()
                }
            inner = getattr(made.algorithm, "inner", made.algorithm)
            name = " ".join([type(inner).__name__, *(text or "").split(":")[1:]])
            if name in found:
                raise ValueError(f"--algorithm names {name} twice")
            found[name] = made
        return found


class FederatedPredictVerb(JsonOption):
    """Predict the seconds per round under each schedule, by the clock alone: nothing is trained.

    Example: thinwire federated predict --fast 4 --slow 4
    """

    devices: Path | None = option(None, 'File with speeds, a JSON list such as [{"seconds_per_sample": 0.01}, ...].')
    fast: int = option(4, "Without --devices: number of devices that take 10 ms per sample.", least=0)
    slow: int = option(4, "Without --devices: number of devices that are four times slower.", least=0)
    clients: int = option(1000, "Total number of clients.", least=1)
    clients_per_round: int = option(100, "How many clients train in each round.")
    mean: float = option(50.0, "Mean number of samples per client, log-normally distributed.", above=0, most=1e9)
    spread: float = option(1.0, "Standard deviation of that number's logarithm; 0: all the same.", least=0, most=10)
    rounds: int = option(50, "Number of rounds to average over.")
    seed: int = option(0, "Seed of sizes and cohorts.")

    def run(self, output: Output) -> Any:
        import numpy as np

        from thinwire.systems.federated import Speed, predict
        from thinwire.systems.federated.clocks import read_speeds

        speeds = read_speeds(self.devices) if self.devices else [Speed(0.01)] * self.fast + [Speed(0.04)] * self.slow
        middle = math.log(self.mean) - self.spread**2 / 2
        draw = np.random.default_rng(self.seed).lognormal(middle, self.spread, size=self.clients)
        sizes = np.maximum(1, np.rint(draw)).astype(int)
        numbers = self.part(["rounds", "clients_per_round", "seed"])
        schedules = ("equal", "lpt", "pull", "auto")
        found = [predict(name, self.clients, lambda i: int(sizes[i]), speeds, **numbers) for name in schedules]
        title = f"{self.clients_per_round} of {self.clients} clients a round, {counted(len(speeds), 'device')}"
        output.say(schedules_table(found, f"{title}, {counted(self.rounds, 'round')}"))
        return [{**asdict(one), "seconds": one.seconds, "ratio": one.ratio} for one in found]


class FederatedNewVerb(Verb):
    """Start a federation of your own: a folder with a working one, whose data, model and algorithm you replace.

    Example: thinwire federated new mine
    """

    folder: Path = argument(..., "Folder to write to; created if it does not exist.")

    def run(self, output: Output) -> Any:
        template, folder = resources.files("thinwire.systems.federated") / "template", self.folder
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"{folder} already exists and is not empty: give another folder")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in ("README.md", "federation.py", "speeds.json"):
                (folder / name).write_bytes(template.joinpath(name).read_bytes())
                output.wrote(folder / name)
        except OSError as error:
            raise ValueError(f"{folder} cannot be written: {error.strerror}") from error
        output.line(f"next: cd {shlex.quote(str(folder))} && thinwire federated run federation:build")


class FederatedServeVerb(JsonOption):
    """Deploy a federation on Flower: a SuperLink with TLS here, SuperNodes here or elsewhere.

    Example: thinwire federated serve federation:build --nodes 2 --local
    """

    federation: str = argument(..., "module:function of your own, from a file in this folder.")
    nodes: int = option(2, "SuperNodes to wait for.")
    local: bool = option(False, "Also start these SuperNodes here.")
    host: str = option("127.0.0.1", "Address of the SuperLink.")
    port: int = option(0, "Port of the SuperLink; 0: a free one.")
    certificates: Path | None = option(None, "Folder of ca.crt, server.pem, server.key; created if it does not exist.")
    out: Path = option(Path("federated-result"), "Folder for weights and history.", writes="folder")
    timeout: float = option(600.0, "Seconds for nodes to connect and to answer.")

    def run(self, output: Output) -> Any:
        from thinwire.systems.federated import History
        from thinwire.systems.federated.flower.deploy import Deployment

        names = ["federation", "nodes", "local", "host", "port", "certificates", "out", "timeout"]
        with progress("starting the SuperLink") as bar:
            Deployment(**self.part(names)).run(lambda text: bar(description=text), bar.log)
        history = History.from_json((self.out / "history.json").read_text())
        output.line(f"{outcome(history)}, on {history.about['nodes']} nodes; written: {self.out}")
        for sentence in failures(history):
            note(sentence, "yellow")
        return history


VERBS = (FederatedRunVerb, FederatedPredictVerb, FederatedNewVerb, FederatedServeVerb)


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
    left_out = ", ".join(name for name in columns if name not in names)
    return plain_table(
        title, names, zip(*(columns[name] for name in names), strict=True), left=("schedule",),
        close=sum(needed[name] + 3 for name in names) > width,
        caption=f"no room here for: {left_out} (--json has all)" if left_out else "",
    )  # fmt: skip


def traffic(history: History) -> str:
    row = history.rounds[-1]
    sent, alone = (f"{count / 1e6:.3g} MB" for count in (_sent(row), row.client_bytes))
    return f"the devices sent {sent} in the last round; its clients, each on its own, would have sent {alone}"


def failures(history: History, most: int = 5) -> list[str]:
    failed = [(row.round + 1, *one) for row in history.rounds for one in row.failed.items()]
    more = [f"... and {len(failed) - most} more"] if len(failed) > most else []
    return [f"round {round}, client {client}: {why}" for round, client, why in failed[:most]] + more


def schedules_table(found: Sequence[Prediction], title: str) -> Table:
    rows = ((one.schedule, f"{one.seconds:.3g}", f"{one.ratio:.2f}", f"{one.busy_share:.0%}") for one in found)
    return plain_table(
        title, ("schedule", "seconds a round", "to the bound", "devices busy"), rows,
        caption="Means. lpt and auto deal out the first 2 rounds as equal does.",
    )  # fmt: skip


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
