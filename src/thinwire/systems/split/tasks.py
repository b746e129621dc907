"""Data of an edge to fine-tune on: batches, tokenisers, GLUE's files, lines of the standard library, metrics."""

from __future__ import annotations

import csv
import random
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.systems.split.codecs import Visit
from thinwire.systems.split.models import require

PACKAGES = ("asyncio", "email", "unittest", "json", "http", "multiprocessing", "importlib", "logging")
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_SHORTEST = 16  # characters: shorter lines do not tell where they come from


@dataclass(frozen=True)
class Batch:
    """Samples of the edge's data.

    Attributes:
        inputs: by the names of the model's embedding inputs: ``input_ids`` [B, L], ``pixel_values`` [B, C, H, W].
        labels: ``[B]`` (``[B, L]`` with ``loss="next_token"``).
        lengths: real tokens per sample, int64 ``[B]``; padding is on the right. None: no padding.
        slots: the samples' indices in the data set, ``[B]``.
    """

    inputs: Mapping[str, Tensor]
    labels: Tensor
    lengths: Tensor | None
    slots: Tensor

    def __post_init__(self) -> None:
        if self.lengths is None:
            return
        length = next(iter(self.inputs.values())).shape[1]
        if len(self.lengths) != len(self.labels) or int(self.lengths.min()) < 1 or int(self.lengths.max()) > length:
            raise ValueError(f"lengths must be {len(self.labels)} numbers from 1 to {length}, the length of the batch")
        if length >= 1 << 16:
            raise ValueError(f"sequences of {length} tokens are too long: lengths travel in 16 bits")

    def visit(self, training: bool) -> Visit:
        """Return what the codecs need to know about the batch."""
        lengths = None if self.lengths is None else self.lengths.tolist()
        return Visit(lengths, self.slots.tolist(), training)

    def to(self, device: torch.device) -> Batch:
        """Return the batch with inputs and labels on a device."""
        inputs = {name: tensor.to(device) for name, tensor in self.inputs.items()}
        return Batch(inputs, self.labels.to(device), self.lengths, self.slots)


@dataclass(frozen=True)
class TextData:
    """Tokenised samples.

    Attributes:
        tokens: ids per sample, at least one.
        labels: a class (int) or a number (float) per sample.
        pad: id that pads a batch; masked.
        types: token types per sample (second sentence: 1), or None.
        truncated: how many samples were cut to the maximum length.
    """

    tokens: Sequence[Sequence[int]]
    labels: Sequence[int | float]
    pad: int = 0
    types: Sequence[Sequence[int]] | None = None
    truncated: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return these samples as a batch, padded to the longest."""
        lengths = [len(self.tokens[i]) for i in indices]

        def padded(rows: Sequence[Sequence[int]], fill: int) -> Tensor:
            out = torch.full((len(indices), max(lengths)), fill)
            for place, i in zip(out, indices):
                place[: len(rows[i])] = torch.tensor(list(rows[i]))
            return out

        inputs = {"input_ids": padded(self.tokens, self.pad)}
        if self.types is not None:
            inputs["token_type_ids"] = padded(self.types, 0)
        labels = torch.tensor([self.labels[i] for i in indices])
        return Batch(inputs, labels, torch.tensor(lengths), torch.tensor(list(indices)))

    def part(self, indices: Sequence[int]) -> TextData:
        """Return a data set of some of the samples, such as one edge's share."""
        types = None if self.types is None else [self.types[i] for i in indices]
        return TextData([self.tokens[i] for i in indices], [self.labels[i] for i in indices], self.pad, types)


@dataclass(frozen=True)
class Task:
    """What is to be learned.

    Attributes:
        name, describe: for display; one line.
        train, held_out: samples to learn from, and for the score.
        classes, vocabulary: numbers of outputs and of token ids.
        metric: "accuracy", "matthews" or "spearman".
    """

    name: str
    train: TextData
    held_out: TextData
    classes: int
    vocabulary: int
    metric: str
    describe: str

    def score(self, logits: Tensor) -> float:
        """Return the metric on the held-out samples, given their logits in order."""
        labels = torch.tensor(list(self.held_out.labels))
        if self.metric == "spearman":
            stats = require("scipy.stats")
            return float(stats.spearmanr(logits.squeeze(-1).numpy(), labels.numpy()).statistic)
        guessed = logits.argmax(-1)
        if self.metric == "matthews":
            metrics = require("sklearn.metrics")
            return float(metrics.matthews_corrcoef(labels.numpy(), guessed.numpy()))
        return float((guessed == labels).double().mean())


def trained_tokenizer(lines: Iterable[str], vocabulary: int = 2000) -> Any:
    """Train a byte-level BPE tokeniser on these lines; the same lines give the same tokens on every machine.

    It is byte-level because WordPiece training numbers its pieces in hash-table order, which differs from run to run.

    The ``vocabulary`` is at least 261 token ids: the special ones, the bytes and the merged pieces.
    """
    require("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(lines, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, made.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]")


def local_tokenizer(directory: Path) -> Any:
    """Load the tokeniser of a pre-trained model on disk; nothing is downloaded, no code from the directory is run.

    Raises:
        ValueError: the directory holds none.
    """
    transformers = require("transformers")
    try:
        return transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{directory} does not hold a transformers tokeniser: {error}") from error


def _tokens(
    tokenizer: Any, first: Sequence[str], second: Sequence[str] | None, labels: Sequence[int | float], length: int
) -> TextData:
    texts = (list(first),) if second is None else (list(first), list(second))
    whole = tokenizer(*texts, add_special_tokens=True, return_token_type_ids=second is not None)
    long = sum(len(ids) > length for ids in whole["input_ids"])
    if long:
        whole = tokenizer(*texts, truncation=True, max_length=length, return_token_type_ids=second is not None)
    return TextData(whole["input_ids"], labels, tokenizer.pad_token_id, whole.get("token_type_ids"), long)


@dataclass(frozen=True)
class _Columns:
    """Where a task's files keep texts and label: column names of the header, or numbers if there is no header."""

    first: str | int
    second: str | None
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
"""For each GLUE task, where its files keep texts and label."""


def read_tsv(path: Path, columns: _Columns) -> tuple[list[str], list[str] | None, list[int | float]]:
    if not path.is_file():
        raise ValueError(f"{path} does not exist: a GLUE task is a directory with train.tsv and {columns.held_out}")
    first: list[str] = []
    second: list[str] = []
    labels: list[int | float] = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        header = next(rows, []) if isinstance(columns.first, str) else []

        def place(column: str | int) -> int:
            if isinstance(column, int):
                return column
            if column not in header:
                raise ValueError(f"{path} has no column {column!r}, only {', '.join(header)}")
            return header.index(column)

        at_first, at_label = place(columns.first), place(columns.label)
        at_second = None if columns.second is None else place(columns.second)
        for row in rows:
            try:
                first.append(row[at_first])
                if at_second is not None:
                    second.append(row[at_second])
                word = row[at_label].strip()
                labels.append(columns.classes.index(word) if columns.classes else float(word))
            except (IndexError, ValueError) as error:
                raise ValueError(
                    f"{path} line {rows.line_num} does not have the columns of this task: {error}"
                ) from error
    if not labels:
        raise ValueError(f"{path} holds no samples")
    return first, (None if at_second is None else second), labels


def glue_task(name: str, directory: str | Path, tokenizer: Any, length: int = 128) -> Task:
    """Return a GLUE task from local files: ``train.tsv`` and ``dev.tsv``, as distributed by gluebenchmark.com.

    Samples over ``length`` tokens are cut and counted, also held-out ones.

    Raises:
        ValueError: the task is unknown, or the files do not belong to it.
    """
    if name not in COLUMNS:
        raise ValueError(f"GLUE task {name!r} is unknown; use one of {', '.join(COLUMNS)}")
    columns = COLUMNS[name]
    files = [Path(directory) / file for file in ("train.tsv", columns.held_out)]
    train, held_out = (_tokens(tokenizer, *read_tsv(file, columns), length) for file in files)
    said = f"GLUE {name}: {len(train)} samples to learn, {len(held_out)} held out"
    return Task(name, train, held_out, len(columns.classes) or 1, len(tokenizer), columns.metric, said)


def lines_of(packages: tuple[str, ...] = PACKAGES) -> dict[str, list[str]]:
    """Return each package's distinct source lines, without tests and without lines that two packages share."""
    root = Path(sysconfig.get_paths()["stdlib"])
    owners: dict[str, set[str]] = defaultdict(set)
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            if {"test", "tests", "__pycache__"} & set(path.relative_to(root).parts):
                continue
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                if len(text := line.strip()) >= _SHORTEST:
                    owners[text].add(package)
    kept = {package: sorted(text for text, of in owners.items() if of == {package}) for package in packages}
    if any(len(lines) < 50 for lines in kept.values()):
        raise ValueError(
            f"this Python has no sources of {', '.join(packages)} under {root}: use --task with GLUE files"
        )
    return kept


def stdlib_task(
    most: int = 1200, length: int = 32, vocabulary: int = 2000, seed: int = 0, tokenizer: Any | None = None,
    every: int = 10, packages: tuple[str, ...] = PACKAGES,
) -> Task:  # fmt: skip
    """Return a real task without a download: which package of the standard library does a source line come from?

    Args:
        most, length: lines per package, and tokens per line; longer lines are cut.
        vocabulary: of the tokeniser trained on the training lines; not used with ``tokenizer``.
        seed: for the choice of lines.
        tokenizer: of transformers, from a pre-trained model; None: one is trained.
        every: hold out every ``every``-th line; 2 holds out half of them, to measure small differences of accuracy.
        packages: the classes.

    Raises:
        ValueError: no line would be left to learn from, or this Python was installed without its sources.
    """
    if every < 2:
        raise ValueError(f"every={every!r} leaves no lines to learn from: use at least 2")
    draw = random.Random(seed)
    texts: tuple[list[str], list[str]] = ([], [])
    labels: tuple[list[int], list[int]] = ([], [])
    for label, lines in enumerate(lines_of(packages).values()):
        draw.shuffle(lines)
        for place, line in enumerate(lines[:most]):
            held_out = place % every == 0
            texts[held_out].append(line)
            labels[held_out].append(label)
    tokenizer = tokenizer or trained_tokenizer(texts[0], vocabulary)
    train, held = (_tokens(tokenizer, lines, None, classes, length) for lines, classes in zip(texts, labels))
    said = (
        f"which of {len(packages)} packages of the standard library a source line comes from: "
        f"{len(train)} lines to learn, {len(held)} held out"
    )
    return Task("stdlib", train, held, len(packages), len(tokenizer), "accuracy", said)
