"""``thinwire split``: fine-tune a model across a cut between an edge, which has the data, and a cloud."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import stdev
from typing import TYPE_CHECKING, Any, ClassVar

from thinwire.core.checks import check_choice, check_count, check_number
from thinwire.core.words import counted, duration
from thinwire.tools.cli.console import Output, Watched, note, plain_table, progress, watched_load
from thinwire.tools.cli.options import JsonOption, KeysOption, PlotOption
from thinwire.tools.cli.verb import argument, option

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn

    from thinwire.systems.split import Credentials, Link, Recipe, SplitPlan, SplitReport
    from thinwire.systems.split.estimate import Estimate
    from thinwire.systems.split.finetune import ComparisonRow
    from thinwire.systems.split.tasks import Task


class DataOption(JsonOption):
    data: Path | None = option(None, "Directory with the task's train.tsv and dev.tsv.")


class FineTuningOptions(DataOption):
    """A model, a task, where the model is cut, how it is trained, and the link."""

    model: str = option(
        "bert-small",
        "bert-small, distilbert-base, bert:layers=2:hidden=128:heads=4 ..., or a pre-trained model's directory.",
    )
    task: str = option("stdlib", "stdlib, or a GLUE task with --data: cola, sst2, mrpc, ...")
    length: int = option(32, "Tokens per sample, two of which mark its ends; longer samples are truncated.", least=3)
    lines: int = option(1200, "With stdlib: lines per package.", least=1)
    cut: int = option(1, "The layer to cut, counted from 1.")
    rank: int = option(8, "With principal and lowrank: numbers per token that cross the cut.")
    front_on: str = option("edge", "edge, or cloud as in the published code, where token ids leave the edge.")
    epochs: int = option(3, "Passes over the data.")
    batch_size: int = option(32, "Samples per step.")
    lr: float = option(1e-3, "Peak learning rate; from random weights lowrank needs a low one.")
    link: str = option("10mbit", "Rate from the edge to the cloud, such as 10mbit.")
    link_down: str | None = option(None, "Rate from the cloud to the edge; by default the same.")
    delay: str = option("0", "One-way delay, such as 10ms.")

    @property
    def wire(self) -> Link:
        from thinwire.systems.split import Link
        from thinwire.tools.lab import parse_delay, parse_rate

        return Link(parse_rate(self.link), parse_rate(self.link_down or self.link), parse_delay(self.delay))

    @property
    def links(self) -> str:
        return self.link if self.link_down is None else f"{self.link} up, {self.link_down} down"

    def recipe(self, seed: int = 0) -> Recipe:
        from thinwire.systems.split import Recipe

        return Recipe(learning_rate=self.lr, epochs=self.epochs, batch_size=self.batch_size, seed=seed)

    def read_task(self, seed: int = 0) -> Task:
        """Return ``stdlib``, or a GLUE task with its files; the tokeniser is the model's, or a trained one."""
        from thinwire.systems.split import tasks

        check_choice("--task", self.task, ("stdlib", *tasks.COLUMNS))
        if self.task != "stdlib" and self.data is None:
            raise ValueError(f"task {self.task!r} needs --data, the directory with its train.tsv")
        with progress(f"reading task {self.task}"):
            tokenizer = tasks.local_tokenizer(Path(self.model)) if Path(self.model).is_dir() else None
            if self.data is None or self.task == "stdlib":
                return tasks.stdlib_task(self.lines, self.length, seed=seed, tokenizer=tokenizer)
            if tokenizer is None:
                first, second, _ = tasks.read_tsv(self.data / "train.tsv", tasks.COLUMNS[self.task])
                tokenizer = tasks.trained_tokenizer([*first, *(second or [])], 8000)
            return tasks.glue_task(self.task, self.data, tokenizer, self.length)

    def builder(self, plans: Iterable[SplitPlan] = ()) -> Callable[[Task, int], nn.Module]:
        """Return what makes the model of a task and a seed, which all of the plans must be able to cut."""
        from thinwire.systems.split.models import preset, pretrained, sizes_of
        from thinwire.tools.bench.words import split_options

        if Path(self.model).is_dir():
            return lambda task, seed: pretrained(self.model, task.classes, seed)
        name, options = split_options(self.model)
        if name.startswith("vit"):
            raise ValueError("the command line has only text tasks: split a ViT from Python, by thinwire.systems.split")
        numbers: dict[str, Any] = options
        for key, value in numbers.items():
            check_choice("model option", key, ("layers", "hidden", "heads", "intermediate", "dropout"))
            check_number(key, value, least=0) if key == "dropout" else check_count(key, value)
        _, (layers, hidden, *_) = sizes_of(name, **{key: size for key, size in numbers.items() if key != "dropout"})
        for plan in plans:
            plan.check(layers, hidden)

        def build(task: Task, seed: int) -> nn.Module:
            sizes: dict[str, Any] = {"classes": task.classes, "vocabulary": task.vocabulary, "length": self.length}
            return preset(name, **sizes, pad=task.train.pad, seed=seed, **numbers)

        return build


class SplitPlanVerb(FineTuningOptions):
    """Predict a step's bytes and seconds on a link before anything is sent; --out cuts the model for both machines.

    Example: thinwire split plan --cut 1 --rank 8 --link 10mbit --out halves
    """

    kind: str = option("lowrank", "principal, lowrank (the paper), ffn or boundary.")
    residual: str = option("drop", "drop, keep or lowrank:q.")
    labels: str = option("edge", "edge, or cloud, where labels leave the edge.")
    init: str = option("svd", "svd or activation.")
    up: str = option("none", "Codecs for what goes up: none, fp16, bf16, int8, int4, delta:4; then optionally pack.")
    down: str = option("none", "Codecs for what comes down; delta only if that is the activation.")
    seed: int = option(0, "Seed of weights, order and dropout.")
    measure: int = option(5, "Steps to run here first, to time the computation; 0: none.", least=0)
    out: Path | None = option(None, "Cut the model and write both halves to this directory.", writes="folder")

    def run(self, output: Output) -> Any:
        import torch

        from thinwire.systems.split import SplitPlan, prepare
        from thinwire.systems.split.estimate import advise, name_of
        from thinwire.systems.split.finetune import sample_inputs

        codecs = {"up": read_words(self.up), "down": read_words(self.down)}
        chosen, wire = SplitPlan(**{**self.part(SplitPlan), **codecs}), self.wire
        build = self.builder([chosen])
        recipe, found = self.recipe(self.seed), self.read_task(self.seed)
        if chosen.leaves:
            note(chosen.leaves)
        with (
            watched_load(torch.get_num_threads()) if self.measure else nullcontext(Watched()) as load,
            progress(f"cutting {self.model}"),
        ):
            built = build(found, self.seed)
            rows = advise(built, found, chosen, recipe, wire, self.measure)
        answer = load.with_load({"plan": chosen, "rows": {name: row.to_data() for name, row in rows.items()}})
        output.say(plan_table(rows, f"{found.describe}; {self.links}"))
        steps, step = recipe.steps(len(found.train)), rows[name_of(chosen)].step_seconds
        if step is not None:
            output.say(f"{steps} steps in {self.epochs} epochs: about {duration(steps * step)} on this link")
        if self.out is not None:
            about = {"name": self.task, "pretrained": Path(self.model).is_dir()}
            about |= self.part(["model", "length", "lines", "seed"])  # so that the edge reads the same task
            notes = {"task": about, "recipe": asdict(recipe)}
            answer["pair"] = prepare(built, chosen, self.out, sample_inputs(chosen, found, recipe, 4), notes)
            output.wrote(self.out / "edge.safetensors", self.out / "cloud.safetensors")
        return answer


class SideOptions(KeysOption, JsonOption):
    """One side of a training across two machines, called ``role``."""

    role: ClassVar[str]

    half: Path = argument(..., "Its half: a file from thinwire split plan --out, or the directory of both.")
    fingerprint: str | None = option(None, "SHA-256 of the other side's certificate; no other is accepted.")
    insecure: bool = option(False, "Allow other machines without keys: everything goes unencrypted.")
    checkpoint_dir: Path | None = option(None, "This side's checkpoints, to continue after a stop.", writes="folder")
    out: Path | None = option(None, "Write the trained half to this .safetensors file.", writes="file")

    def begin(self, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the facts of this half, and the options of a training with, or as, the cloud at an address."""
        from thinwire.systems.link.listener import split_address
        from thinwire.systems.split.surgery import half_file, read_facts

        facts = read_facts(half_file(self.half, self.role), self.role)
        address = split_address(where)
        options = {"recipe": recipe_of(facts["notes"]), "address": address, "tls": self.trust(address[0])}
        return facts, options | self.part(["role", "insecure", "checkpoint_dir"])

    def trust(self, host: str) -> Credentials | None:
        """Read what ``thinwire keys new`` wrote for a machine; None: no TLS, for this machine only or on request."""
        from thinwire.systems.split import Credentials
        from thinwire.systems.split.connection import trust_of

        if self.keys is None:
            trust_of(host, None, self.insecure)
            if self.fingerprint is not None:
                raise ValueError("--fingerprint belongs to a TLS certificate: give --keys too")
            return None
        found = Credentials.of(self.keys)
        return found if self.fingerprint is None else found.pinned(self.fingerprint)

    def train(self, output: Output, facts: dict[str, Any], task: Task | None, **options: Any) -> Any:
        from thinwire.systems.split import split_finetune
        from thinwire.systems.split.surgery import write_half

        with _steps(f"the {self.role}'s half of {facts['class']}") as on_step:
            report: SplitReport = split_finetune(None, self.half, task, on_step=on_step, **options)
        seen = f"{report.steps} steps in {report.seconds:.1f} s"
        if report.steps:
            seen += f", {report.training.wire / report.steps / 1e3:.1f} kB per step through the socket"
            seen += ", evaluation included" if report.score is None else ""  # the cloud's counters do not separate them
        output.line(seen)
        if report.score is not None:
            output.line(f"score on the held-out samples: {report.score:.4f}")
        if self.out is not None:
            write_half(report.half[0], facts, self.out)
            output.wrote(self.out)
        return report.to_data()


class SplitCloudVerb(SideOptions):
    """Be the cloud: wait for an edge, train this half with it, and end when it says goodbye.

    Example: thinwire split cloud halves
    """

    role: ClassVar[str] = "cloud"

    listen: str = option("127.0.0.1:7443", "host:port to listen on.")
    edges: int = option(1, "How many edges to serve, one after the other.")

    def run(self, output: Output) -> Any:
        facts, options = self.begin(self.listen)
        return self.train(output, facts, None, edges=self.edges, say=note, **options)


class SplitEdgeVerb(SideOptions, DataOption):
    """Be the edge: read the data, lead the training, evaluate the result.

    Example: thinwire split edge halves
    """

    role: ClassVar[str] = "edge"

    cloud: str = option("127.0.0.1:7443", "host:port of the cloud.")
    name: str = option("edge", "This edge's name, if no certificate gives it.")
    tokenizer: Path | None = option(None, "Directory of a pre-trained model's tokeniser.")
    share: str = option("1/1", "With several edges, this one's part of the data, such as 1/4.")
    checkpoint_every: int = option(100, "Steps between checkpoints.")
    reconnect: float = option(30.0, "Seconds to keep trying to reach a lost cloud.")
    patience: float = option(60.0, "Seconds to wait for a reply from the cloud.")

    def run(self, output: Output) -> Any:
        from thinwire.systems.split import SplitPlan

        (facts, options), (place, count) = self.begin(self.cloud), read_share(self.share)
        leaves = SplitPlan.from_json(facts["plan"]).leaves
        task = task_of(facts["notes"], self.data, self.tokenizer)
        if count > len(task.train):
            raise ValueError(f"share '{place}/{count}': there are only {len(task.train)} samples")
        task = replace(task, train=task.train.part(range(place - 1, len(task.train), count)))
        for words in filter(None, (task.describe, leaves)):
            note(words)
        options |= {"reconnect_seconds": self.reconnect, "receive_seconds": self.patience}
        options |= self.part(["name", "checkpoint_every"])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "front_on='cloud'")  # already reported
            return self.train(output, facts, task, **options)


class SplitCompareVerb(FineTuningOptions, PlotOption):
    """Train with and without cuts on the same data, seeds and initial weights: accuracy, bytes, seconds.

    Example: thinwire split compare --plans lowrank:int8,pack --seeds 3 --plot split.png
    """

    model: str = "bert:layers=2:hidden=128:heads=4"
    lines: int = 600
    plans: str = option(
        "boundary lowrank lowrank:int8,pack lowrank:int4,pack",
        "Rows, by blanks: boundary, principal, lowrank; codecs after a colon, as in lowrank:int8,pack.",
    )
    seeds: int = option(1, "Number of seeds; the table shows mean and spread.", least=1)

    def run(self, output: Output) -> Any:
        import torch

        from thinwire.systems.split import compare
        from thinwire.systems.split.finetune import compare_picture

        rows, wire = read_rows(self.plans, self.cut, self.rank, self.front_on), self.wire
        build = self.builder(rows.values())
        recipe, found = self.recipe(), self.read_task()
        losses: dict[str, list[float]] = {}
        now = {"row": "", "seed": 0}
        about = f"training {self.model} with and without cuts"
        with watched_load(torch.get_num_threads()) as load, _steps(about) as show:

            def on_step(done: int, total: int, loss: float) -> None:
                show(done, total, loss, f"{now['row']}, seed {now['seed']}")
                if now["seed"] == 0:
                    losses.setdefault(str(now["row"]), []).append(loss)

            made = compare(
                partial(build, found), found, rows, recipe, wire, range(self.seeds), on_step,
                lambda name, seed: now.update(row=name, seed=seed),
            )  # fmt: skip
        picture = compare_picture(made, losses, found.metric, f"{self.model}, {found.describe}, link {self.link}")
        output.say(compare_table(made, found, self.links, self.seeds))
        return load.with_load({"task": found.describe, "rows": [row.to_data() for row in made], "picture": picture})


VERBS = (SplitPlanVerb, SplitCloudVerb, SplitEdgeVerb, SplitCompareVerb)


@contextmanager
def _steps(begins: str) -> Iterator[Callable[..., None]]:
    with progress(begins) as shown:

        def on_step(done: int, total: int, loss: float, what: str = "steps") -> None:
            words = f"{what}, loss {loss:.3f}" if loss == loss else what
            shown(completed=done, total=total or None, description=words)

        yield on_step


def read_words(text: str) -> tuple[str, ...]:
    """Parse ``"int8,pack"`` as codecs; "none" or "" means none. The plan checks them."""
    return tuple(word.strip() for word in text.split(",") if word.strip() and word.strip() != "none")


def task_of(notes: dict[str, Any], data: Path | None, tokenizer: Path | None) -> Task:
    """Read the task stored next to a half; for a pre-trained model the tokeniser's directory must exist here."""
    try:
        words = notes["task"]
        model = str(tokenizer or words["model"])
        if words["pretrained"] and not Path(model).is_dir():
            raise ValueError(f"the tokeniser of {words['model']} is not here: give its directory as --tokenizer")
        options = FineTuningOptions(
            task=words["name"], data=data, model=model, length=words["length"], lines=words["lines"]
        )
        seed = words["seed"]
    except KeyError as error:
        raise ValueError("this file names no task: give one that thinwire split plan --out wrote") from error
    return options.read_task(seed)


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


def recipe_of(notes: dict[str, Any]) -> Recipe:
    from thinwire.systems.split import Recipe

    try:
        return Recipe(**notes["recipe"])
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"this file contains no training options: give one that thinwire split plan --out wrote ({error})"
        ) from error


def plan_table(rows: Mapping[str, Estimate], title: str) -> Table:
    columns = ("cut", "kB up", "kB down", "messages", "of boundary", "link s", "compute s", "step s")
    table = plain_table(title, columns, close=True)
    base = rows["boundary"].wire
    for name, row in rows.items():
        seconds = [row.link_seconds, row.compute_seconds, row.step_seconds]
        sizes = _kilo(row.bytes_up), _kilo(row.bytes_down), str(row.messages), f"1/{base / row.wire:.1f}"
        table.add_row(name, *sizes, *("-" if value is None else f"{value:.3f}" for value in seconds))
    return table


def compare_table(rows: Sequence[ComparisonRow], task: Task, links: str, seeds: int) -> Table:
    title = f"{task.describe}; {links}; {counted(seeds, 'seed')}"
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


def _kilo(count: float) -> str:
    return f"{count / 1e3:.2f}" if count < 1e5 else f"{count / 1e3:,.0f}"
