"""A real task without a download: from which package of the standard library does a source line come?"""

from __future__ import annotations

import random
import sysconfig
from collections import defaultdict
from pathlib import Path
from typing import Any

from thinwire.systems.split.tasks.base import Task, TextData
from thinwire.systems.split.tasks.tokens import encode, trained_tokenizer

PACKAGES = ("asyncio", "email", "unittest", "json", "http", "multiprocessing", "importlib", "logging")
_SHORTEST = 16  # characters: shorter lines do not tell where they come from


def lines_of(packages: tuple[str, ...] = PACKAGES) -> dict[str, list[str]]:
    """Return each package's distinct source lines, without tests and without lines that two packages share.

    Raises:
        ValueError: this Python was installed without its sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, set[str]] = defaultdict(set)
    owners: dict[str, set[str]] = defaultdict(set)
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            if {"test", "tests", "__pycache__"} & set(path.relative_to(root).parts):
                continue
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                text = line.strip()
                if len(text) >= _SHORTEST:
                    found[package].add(text)
                    owners[text].add(package)
    kept = {package: sorted(t for t in found[package] if len(owners[t]) == 1) for package in packages}
    if any(len(lines) < 50 for lines in kept.values()):
        raise ValueError(
            f"this Python has no sources of {', '.join(packages)} under {root}: use --task with GLUE files"
        )
    return kept


def stdlib_task(
    most: int = 1200,
    length: int = 32,
    vocabulary: int = 2000,
    seed: int = 0,
    tokenizer: Any | None = None,
    every: int = 10,
    packages: tuple[str, ...] = PACKAGES,
) -> Task:
    """Return the task: at most ``most`` lines of each package, every tenth of them held out.

    Args:
        most: lines per package.
        length: tokens per line; longer lines are cut.
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
    texts: dict[str, tuple[list[str], list[int]]] = {"train": ([], []), "held_out": ([], [])}
    for label, lines in enumerate(lines_of(packages).values()):
        draw.shuffle(lines)
        for place, line in enumerate(lines[:most]):
            where = texts["held_out" if place % every == 0 else "train"]
            where[0].append(line)
            where[1].append(label)
    tokenizer = tokenizer or trained_tokenizer(texts["train"][0], vocabulary)
    made = {}
    for part, (lines, labels) in texts.items():
        ids, _, long = encode(tokenizer, lines, None, length)
        made[part] = TextData(ids, labels, tokenizer.pad_token_id, truncated=long)
    return Task(
        "stdlib",
        made["train"],
        made["held_out"],
        len(packages),
        len(tokenizer),
        "accuracy",
        f"which of {len(packages)} packages of the standard library a source line comes from: "
        f"{len(made['train'])} lines to learn, {len(made['held_out'])} held out",
    )
