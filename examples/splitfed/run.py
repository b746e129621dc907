"""Clients with unlike data train one transformer across the cut; their fronts are averaged after every round.

python examples/splitfed/run.py
python examples/splitfed/run.py --clients 8 --alpha 0.3 --codecs none
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from thinwire.split import Back, CloudEnd, Front, LocalPair, Recipe, SplitPlan, split_model
from thinwire.split.finetune import train
from thinwire.split.models import preset
from thinwire.split.tasks import Task, TextData, stdlib_task

from splitfed import SplitFed
from thinwire import federated as fl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--alpha", type=float, default=1.0, help="of the Dirichlet draw; small: few classes a client")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=1, help="of a client in a round")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lines", type=int, default=300, help="per class, a tenth of them held out")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--kind", default="boundary", help="of the cut; lowrank needs more rounds: see the README")
    parser.add_argument("--rank", type=int, default=8, help="of lowrank")
    parser.add_argument("--codecs", default="int8,pack", help="both ways; or none")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="store_true", help="SplitFed alone, without the rows to compare with")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = compare(options)
    print(json.dumps(found)) if options.json else show(found)


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """SplitFed, and one edge with all the data or with one client's part of it: as many epochs each."""
    task = stdlib_task(options.lines, seed=options.seed)
    codecs = () if options.codecs == "none" else tuple(options.codecs.split(","))
    plan = SplitPlan(1, options.kind, options.rank, up=codecs, down=codecs)
    model = preset(
        "bert", classes=task.classes, vocabulary=task.vocabulary, length=32, seed=options.seed,
        layers=2, hidden=options.hidden, heads=4,
    )  # fmt: skip
    recipe = Recipe(learning_rate=options.lr, epochs=options.epochs, batch_size=options.batch, seed=options.seed)
    halves = split_model(model, plan)
    parts = fl.partition.dirichlet(task.train.labels, options.clients, options.alpha, least=8, seed=options.seed)
    shares = [task.train.part(part.tolist()) for part in parts]
    algorithm, curve = splitfed(task, shares, *copy.deepcopy(halves), recipe, options.rounds)
    scores = {"SplitFed": curve[-1]}
    whole = replace(recipe, epochs=options.rounds * options.epochs)
    others = {} if options.only else {"one edge with all the data": task.train, "client 0 alone": shares[0]}
    for name, data in others.items():
        print(f"{name}: {whole.steps(len(data))} steps", file=sys.stderr, flush=True)
        pair = LocalPair(*copy.deepcopy(halves), whole, whole.steps(len(data)))
        scores[name] = train(pair, replace(task, train=data), pair.ledger, 0, None).score
    return {
        "task": task.describe,
        "samples": [len(share) for share in shares],
        "curve": curve,
        "scores": scores,
        "crossed_per_step": algorithm.ledger.wire / algorithm.ledger.messages["z"],
        "front_bytes_per_round": 2 * 4 * sum(p.numel() for p in halves[0].parameters()),
    }


def splitfed(
    task: Task, shares: list[TextData], front: Front, back: Back, recipe: Recipe, rounds: int
) -> tuple[SplitFed, list[float]]:
    """Train; the accuracy after every round."""
    algorithm = SplitFed(cloud=CloudEnd(back, "pair", recipe), recipe=recipe, rounds=rounds)
    curve: list[float] = []

    def on_round(record: fl.RoundRecord) -> None:
        if record.failed:
            raise SystemExit(f"error: client {min(record.failed)}: {record.failed[min(record.failed)]}")
        curve.append(record.evaluation["accuracy"])
        words = f"loss {record.metrics['loss']:.3f}, accuracy of the averaged front {curve[-1]:.3f}"
        print(f"round {record.round + 1} of {rounds}: {words}", file=sys.stderr, flush=True)

    fl.simulate(
        algorithm,
        front,
        fl.FunctionClients(len(shares), shares.__getitem__, lambda client: len(shares[client])),
        rounds=rounds,
        clients_per_round=len(shares),
        evaluate=lambda model, round: {"accuracy": algorithm.score(model, task)},
        evaluate_every=1,
        schedule="equal",  # the order of the clients is part of the result: they train one back
        seed=recipe.seed,
        on_round=on_round,
    )
    return algorithm, curve


def show(found: dict[str, Any]) -> None:
    table = Table(title=found["task"])
    table.add_column("training")
    table.add_column("accuracy, held out", justify="right")
    for name, score in found["scores"].items():
        table.add_row(name, f"{score:.3f}")
    console = Console()
    console.print(table)
    console.print(f"samples per client: {', '.join(map(str, found['samples']))}; chance 0.125")
    step, front = found["crossed_per_step"] / 1e3, found["front_bytes_per_round"] / 1e6
    console.print(f"across the cut: {step:.1f} kB per step; fronts: {front:.2f} MB per client and round, both ways")


if __name__ == "__main__":
    main()
