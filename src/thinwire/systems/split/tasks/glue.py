"""GLUE tasks from files: ``train.tsv`` and ``dev.tsv`` in a directory, as distributed by gluebenchmark.com."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.systems.split.tasks.base import Task, TextData
from thinwire.systems.split.tasks.tokens import encode


@dataclass(frozen=True)
class _Columns:
    """Where a task's files keep texts and label: column names of the header, or numbers if there is no header."""

    first: str | int
    second: str | int | None
    label: str | int
    classes: tuple[str, ...] = ("0", "1")  # empty: a number
    metric: str = "accuracy"
    held_out: str = "dev.tsv"


COLUMNS = {
    "cola": _Columns(3, None, 1, metric="matthews"),
    "sst2": _Columns("sentence", None, "label"),
    "mrpc": _Columns("#1 String", "#2 String", "Quality"),
    "qqp": _Columns("question1", "question2", "is_duplicate"),
    "stsb": _Columns("sentence1", "sentence2", "score", (), "spearman"),
    "mnli": _Columns(
        "sentence1", "sentence2", "gold_label", ("contradiction", "neutral", "entailment"), held_out="dev_matched.tsv"
    ),
    "qnli": _Columns("question", "sentence", "label", ("entailment", "not_entailment")),
    "rte": _Columns("sentence1", "sentence2", "label", ("entailment", "not_entailment")),
}
"""For each task, where its files keep texts and label."""


def read_tsv(path: Path, columns: _Columns) -> tuple[list[str], list[str] | None, list[int | float]]:
    """Read sentences and labels from one file.

    Raises:
        ValueError: the file is missing or empty, or a line lacks the task's columns; names file and line.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist: a GLUE task is a directory with train.tsv and {columns.held_out}")
    first: list[str] = []
    second: list[str] = []
    labels: list[int | float] = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        header = next(rows, []) if isinstance(columns.first, str) else None
        places = [_place(column, header, path) for column in (columns.first, columns.second, columns.label)]
        for row in rows:
            try:
                first.append(row[places[0] or 0])
                if places[1] is not None:
                    second.append(row[places[1]])
                word = row[places[2] or 0].strip()
                labels.append(columns.classes.index(word) if columns.classes else float(word))
            except (IndexError, ValueError) as error:
                raise ValueError(
                    f"{path} line {rows.line_num} does not have the columns of this task: {error}"
                ) from error
    if not labels:
        raise ValueError(f"{path} holds no samples")
    return first, (second if columns.second is not None else None), labels


def glue_task(name: str, directory: str | Path, tokenizer: Any, length: int = 128) -> Task:
    """Return a task from local files. Samples over ``length`` tokens are cut and counted, also held-out ones.

    Raises:
        ValueError: the task is unknown, or the files do not belong to it.
    """
    if name not in COLUMNS:
        raise ValueError(f"GLUE task {name!r} is unknown; use one of {', '.join(COLUMNS)}")
    columns = COLUMNS[name]
    parts = []
    for file in ("train.tsv", columns.held_out):
        first, second, labels = read_tsv(Path(directory) / file, columns)
        ids, types, long = encode(tokenizer, first, second, length)
        parts.append(TextData(ids, labels, tokenizer.pad_token_id, types, long))
    train, held_out = parts
    return Task(
        name,
        train,
        held_out,
        len(columns.classes) or 1,
        len(tokenizer),
        columns.metric,
        f"GLUE {name}: {len(train)} samples to learn, {len(held_out)} held out",
    )


def _place(column: str | int | None, header: list[str] | None, path: Path) -> int | None:
    if header is None or not isinstance(column, str):
        return column if not isinstance(column, str) else None
    if column not in header:
        raise ValueError(f"{path} has no column {column!r}, only {', '.join(header)}")
    return header.index(column)
