"""The runs of ``thinwire federated run``: one federation per named algorithm, one after another."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.tools.cli.console import RunFailed, exit_code, progress

if TYPE_CHECKING:
    from thinwire.systems.federated import Federation, History, RoundRecord
    from thinwire.systems.federated.workspace import Evaluate


def federations(
    federation: str,
    algorithms: str | None,
    compress: str | None,
    given: Mapping[str, Any],
    checkpoint_every: int,
    *,
    per_client: bool,
) -> dict[str, Federation]:
    """Return what each algorithm trains, by the name of its line, with the same initial weights and options.

    Raises:
        ValueError: an unknown name, one algorithm twice, or a federation that does not say how to look at its clients.
    """
    from thinwire.systems.federated.accumulate import check_mode
    from thinwire.systems.federated.builtin import build_algorithm, build_federation, compressed
    from thinwire.systems.federated.options import check_numbers

    texts = [None] if algorithms is None else [text.strip() for text in algorithms.split(",") if text.strip()]
    if not texts:
        raise ValueError("--algorithm: name one, or several separated by commas, such as scaffold,fedavg")
    found: dict[str, Federation] = {}
    for text in texts:
        made = build_federation(federation)
        if text is None:
            made.algorithm = compressed(made.algorithm, compress)
        else:
            made.algorithm = build_algorithm(text, made.algorithm, compress)
        for option, value in given.items():
            if value is not None:
                setattr(made, option, value)
        check_mode(made.reduction)
        check_numbers(made.rounds, made.clients_per_round, len(made.clients), made.evaluate_every, checkpoint_every)
        if per_client:
            if made.per_client is None:
                raise ValueError(
                    f"--per-client: give {federation} a per_client=, such as fl.over_clients(right, clients)"
                )
            made.evaluate = _both(made.evaluate, made.per_client)
        name = " ".join([type(getattr(made.algorithm, "inner", made.algorithm)).__name__, *(text or "").split(":")[1:]])
        if name in found:
            raise ValueError(f"--algorithm names {name} twice")
        found[name] = made
    return found


def _both(first: Evaluate | None, second: Evaluate) -> Evaluate:
    return lambda model, round: {**(first(model, round) if first else {}), **second(model, round)}


def folder_of(checkpoint_dir: Path | None, name: str, runs: int) -> Path | None:
    """Return the folder for the checkpoints of a run; with several runs, each has its own folder."""
    if checkpoint_dir is None or runs == 1:
        return checkpoint_dir
    return checkpoint_dir / re.sub(r"[^\w.=-]+", "-", name).lower()


def spent(made: Federation) -> str | None:
    """Return how much of its clients' privacy a run with DP-SGD has spent; None: it ran without."""
    from statistics import median

    from thinwire.systems.federated.private import epsilons

    algorithm = getattr(made.algorithm, "inner", made.algorithm)
    if getattr(algorithm, "noise_multiplier", None) is None:
        return None
    found = epsilons(
        algorithm, made.clients, rounds=made.rounds, clients_per_round=made.clients_per_round, seed=made.seed
    ).values()
    return f"privacy spent, at delta 1e-05: epsilon {median(found):.3g} for the median client, {max(found):.3g} at most"


def train(name: str, made: Federation, rank: int, **options: Any) -> History:
    """Run one federation here, with a bar that follows its rounds; without a bar, print a line per evaluation.

    Raises:
        RunFailed: it was not finished, by an error of the machine's or of the user's own code.
    """
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
