"""Split fine-tuning: bytes, accuracy, and seconds on emulated links: ``python benchmarks/split.py``

Three parts. ``bytes``: what crosses per step for BERT-base at rank 8, by the formulas that the tests hold against
counted bytes. ``task``: accuracy of one model split and unsplit, on lines of the standard library; ``--model`` may be a
directory with a pre-trained encoder, such as ``--pretrain`` makes from lines of other packages. ``link``: seconds per
step in the lab between two machines over TLS at 10 and 100 Mb/s, measured and predicted. Each part, and each row of
``task`` and ``link``, can be run alone; ``benchmarks/results/split.json`` keeps what was run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from thinwire.systems.cli.split import FineTuningOptions
from thinwire.systems.link.keys import new_keys
from thinwire.systems.split import (
    Batch,
    CloudClient,
    CloudEnd,
    CloudServer,
    Credentials,
    EdgeEnd,
    Link,
    Recipe,
    Shape,
    SplitPlan,
    crossings,
    estimate,
    load_half,
    prepare,
    split_finetune,
)
from thinwire.systems.split.ends import LocalPair
from thinwire.systems.split.estimate import shape_of, steps_of
from thinwire.systems.split.finetune import remaining, train_unsplit, whole_forward
from thinwire.systems.split.models import preset, view_of
from thinwire.systems.split.programs import dropout_of
from thinwire.systems.split.tasks import lines_of, local_tokenizer, stdlib_task, trained_tokenizer
from thinwire.tools import lab

RESULTS = Path(__file__).parent / "results" / "split.json"
MODEL = "bert:layers=2:hidden=256:heads=4"
OTHERS = ("idlelib", "tkinter", "xml", "urllib", "ctypes", "wsgiref")
PORT = 7443
NODE_0 = "10.77.0.1"  # the lab's
CODED = {"int8": ("int8",), "int8,pack": ("int8", "pack"), "int4": ("int4",), "int4,pack": ("int4", "pack")}


def plans(cut: int, rank: int = 8) -> dict[str, SplitPlan]:
    made = {"boundary": SplitPlan(cut, "boundary"), "ffn": SplitPlan(cut, "ffn"), "lowrank": SplitPlan(cut, rank=rank)}
    made |= {f"lowrank:{name}": SplitPlan(cut, rank=rank, up=c, down=c) for name, c in CODED.items()}
    return made | {"lowrank:delta": SplitPlan(cut, rank=rank, up=("delta:4", "pack"), down=("int4", "pack"))}


def bytes_table() -> list[dict[str, Any]]:
    """BERT-base, rank 8, two classes; every sample full, so that pack gains nothing."""
    found = []
    for batch, length in ((32, 32), (32, 66), (32, 96), (32, 128)):
        steps = {
            name: estimate(crossings(plan, Shape(768, 3072, 2), [length] * batch, batch, length), Link(1e7, 1e7))
            for name, plan in (plans(6) | {"lowrank, front in the cloud": SplitPlan(6, front_on="cloud")}).items()
        }
        plain = steps["boundary"]
        for name, step in steps.items():
            row = {"batch": f"{batch}x{length}", "plan": name, "state": step.state, "wire": step.wire}
            found.append(row | {"state_ratio": plain.state / step.state, "wire_ratio": plain.wire / step.wire})
    return found


def pretrain(folder: Path, options: argparse.Namespace) -> None:
    """A small encoder with its tokeniser, that has learned to tell lines of other packages apart."""
    tokenizer = trained_tokenizer([line for lines in lines_of(OTHERS).values() for line in lines], 2000)
    task = stdlib_task(options.lines, options.length, tokenizer=tokenizer, packages=OTHERS)
    model = FineTuningOptions(model=options.model, length=options.length).builder()(task, options.seeds[0])
    recipe = Recipe(learning_rate=options.lr, epochs=options.epochs, seed=options.seeds[0])
    optimizer, total = recipe.optimizer(model), recipe.steps(len(task.train))
    for step, indices in enumerate(remaining(recipe, len(task.train), 0)):
        recipe.set_rate(optimizer, step, total)
        batch = task.train.batch(indices)
        with dropout_of(recipe, "unsplit", step):
            loss = recipe.loss_function(whole_forward(model.train(), batch), batch.labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            print(f"... {step + 1} of {total} steps, loss {float(loss.detach()):.3f}", file=sys.stderr, flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def task_row(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One way of training on one seed."""
    pretrained = Path(options.model).is_dir()
    tokenizer = local_tokenizer(Path(options.model)) if pretrained else None
    task = stdlib_task(options.lines, options.length, tokenizer=tokenizer, every=options.every)
    recipe = Recipe(learning_rate=options.lr, epochs=options.epochs, batch_size=32, seed=seed)
    model = FineTuningOptions(model=options.model, length=options.length).builder()(task, seed)
    total = recipe.steps(len(task.train))

    def show(step: int, of: int, loss: float) -> None:
        if step % 50 == 0:
            print(f"... {name}, seed {seed}: step {step} of {total}, loss {loss:.3f}", file=sys.stderr, flush=True)

    row: dict[str, Any] = {"learned": len(task.train), "held_out": len(task.held_out)}
    if name == "unsplit":
        score, seconds = train_unsplit(model, task, recipe, show)
        return row | {"score": score, "seconds": seconds / total}
    plan, shape = plans(options.cut)[name], shape_of(view_of(model), 8)
    report = split_finetune(plan, model, task, recipe=recipe, on_step=show)
    row |= {"score": report.score, "seconds": report.seconds / total}
    per_step = {
        kind: [estimate(step, Link(1e7, 1e7)) for step in steps_of(each, shape, task.train, recipe)]
        for kind, each in (("", plan), ("boundary", plans(options.cut)["boundary"]))
    }
    row |= {part: statistics.mean(getattr(step, part) for step in per_step[""]) for part in ("state", "wire")}
    plain = {part: statistics.mean(getattr(step, part) for step in per_step["boundary"]) for part in ("state", "wire")}
    return row | {f"{part}_ratio": plain[part] / row[part] for part in plain}


def link_batches(count: int) -> Iterable[Batch]:
    draw = torch.Generator().manual_seed(0)
    for i in range(count):
        ids = torch.randint(5, 2000, (8, 64), generator=draw)
        labels = torch.randint(0, 2, (8,), generator=draw)
        yield Batch({"input_ids": ids}, labels, torch.full((8,), 64), torch.arange(8) + 8 * i)


def child(folder: Path, steps: int) -> None:
    """A machine of the lab: rank 0 is the cloud, rank 1 the edge, which times the computation alone first."""
    torch.set_num_threads(1)
    recipe = Recipe(learning_rate=1e-4, batch_size=8)
    if os.environ["RANK"] == "0":
        half = load_half(folder, "cloud")
        server = CloudServer(
            CloudEnd(half.module, half.pair, recipe), "0.0.0.0", PORT, Credentials.of(folder / "keys" / "cloud")
        )
        server.serve(1)
        return
    front, back = load_half(folder, "edge"), load_half(folder, "cloud")
    batches = list(link_batches(steps + 1))

    def timed(edge: EdgeEnd, batch: Batch) -> float:
        start = time.perf_counter()
        edge.step(batch)
        return time.perf_counter() - start

    pair = LocalPair(front.module, back.module, recipe, 100)
    edge = EdgeEnd(load_half(folder, "edge").module, front.pair, recipe, 100)
    with CloudClient(os.environ["MASTER_ADDR"], PORT, Credentials.of(folder / "keys" / "edge")) as link:
        link.attach(edge)
        before, sent = link.ledger.wire, sum(link.ledger.messages.values())
        spent = [(timed(pair, batch), timed(edge, batch)) for batch in batches][
            1:
        ]  # in turns: both are disturbed alike
        wire = (link.ledger.wire - before) / len(batches)
        messages = (sum(link.ledger.messages.values()) - sent) / len(batches)
        edge.bye()
    compute, measured = (statistics.median(column) for column in zip(*spent))
    found = {"compute": compute, "measured": measured, "wire": wire, "messages": messages}
    (folder / "found.json").write_text(json.dumps(found))


def link_row(name: str, rate: str, delay: str, steps: int) -> dict[str, Any]:
    """Seconds of a step on an emulated link, measured and predicted."""
    plan = plans(1)[name]
    model = preset("bert", classes=2, vocabulary=2000, length=64, layers=2, hidden=768, heads=12)
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        prepare(model, plan, folder)
        cluster = lab.Cluster.parse(2, 1, rate, delay)
        new_keys(folder / "keys", ["cloud", "edge"], [NODE_0])
        command = [sys.executable, __file__, "--child", str(folder), "--steps", str(steps)]
        done = lab.run(cluster, command, timeout_seconds=500)
        if done.exit_code:
            raise SystemExit(f"the lab ended with {done.exit_codes}")
        found = json.loads((folder / "found.json").read_text())
    bits, spec = lab.parse_rate(rate), cluster.link(0)
    link = Link(bits, bits, spec.delay_seconds, spec.burst_bytes)
    messages = crossings(plan, shape_of(view_of(model), 2), [64] * 8, 8, 64, fresh_tokens=8 * 64)
    predicted = estimate(messages, link, found["compute"])
    found |= {"predicted": predicted.step_seconds, "link": predicted.link_seconds, "wire_predicted": predicted.wire}
    return found | {"off": predicted.step_seconds / found["measured"] - 1, "emulated": done.emulated}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["bytes", "task", "link"], action="append")
    parser.add_argument("--rows", help="of task or link, after commas; all by default")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--model", default=MODEL, help="as of the verbs, or a directory with a pre-trained one")
    parser.add_argument("--pretrain", type=Path, help="write a pre-trained --model to this directory, and end")
    parser.add_argument("--model-name", help="of a directory, under which its rows are kept")
    parser.add_argument("--cut", type=int, default=1)
    parser.add_argument("--length", type=int, default=32, help="tokens per line, at most")
    parser.add_argument("--lines", type=int, default=600)
    parser.add_argument("--every", type=int, default=10, help="which lines are held out; 2: every other one")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--rates", nargs="*", default=["10mbit", "100mbit"])
    parser.add_argument("--delay", default="0")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--child", type=Path)
    options = parser.parse_args()
    if options.child is not None:
        child(options.child, options.steps)
        return
    torch.set_num_threads(1)
    if options.pretrain is not None:
        pretrain(options.pretrain, options)
        return
    parts = options.part or ["bytes", "task", "link"]
    kept: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"task": {}, "link": {}}

    def save() -> None:
        """Beside what another run of this file has written meanwhile."""
        RESULTS.parent.mkdir(exist_ok=True)
        if RESULTS.exists():
            before = json.loads(RESULTS.read_text())
            for part in ("task", "link"):
                kept[part] = before[part] | kept[part]
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")

    if "bytes" in parts:
        kept["bytes"] = bytes_table()
        save()
    rows = options.rows.split(";") if options.rows else None
    if "task" in parts:
        for name in rows or ["unsplit", "boundary", "lowrank", "lowrank:int8,pack", "lowrank:int4,pack"]:
            for seed in options.seeds:
                words = f"{name}, seed {seed}, {options.lines} lines, {options.epochs} epochs, lr {options.lr:g}"
                if options.model != MODEL:
                    words += f", {options.model_name or options.model}, cut {options.cut}"
                kept["task"][words] = task_row(name, seed, options)
                save()
    if "link" in parts:
        for rate in options.rates:
            for name in rows or ["boundary", "lowrank", "lowrank:int8"]:
                words = f"{name}, {rate}, delay {options.delay}"
                kept["link"][words] = link_row(name, rate, options.delay, options.steps)
                save()
    show(kept)


def show(kept: dict[str, Any]) -> None:
    for part in ("bytes", "task", "link"):
        rows = kept.get(part)
        if not rows:
            continue
        table = Table(title=part)
        listed = rows if isinstance(rows, list) else [{"row": name, **row} for name, row in rows.items()]
        for column in dict.fromkeys(key for row in listed for key in row):
            table.add_column(column)
        for row in listed:
            table.add_row(*(_cell(row.get(column.header)) for column in table.columns))
        Console(width=160).print(table)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_cell, value))
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


if __name__ == "__main__":
    main()
