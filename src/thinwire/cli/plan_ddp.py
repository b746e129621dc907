"""What ``thinwire plan`` tells those who stay with DDP: the sizes of its buckets."""

from __future__ import annotations

import math
from typing import Any

from thinwire.adapters.ddp_buckets import bucket_arguments
from thinwire.bench.words import split_options
from thinwire.cli.plan_inputs import Question
from thinwire.planner.choose import Ranking
from thinwire.planner.timeline.simulate import plan_of

_SHOWN = 12


def ddp_answer(question: Question, ranking: Ranking) -> dict[str, Any] | None:
    """``{"label": ..., "arguments": ...}`` of the best method that DDP's buckets can hold; None: there is none.

    Decoupled methods cannot run there, and plans that keep some parameters apart cannot be written as such a list.
    """
    method_of, profile = dict(question.candidates), question.profile
    entries = sorted(ranking.entries, key=lambda entry: entry.step_seconds)
    for label in dict.fromkeys([ranking.best.label, ranking.best_exact.label, *(entry.label for entry in entries)]):
        method = method_of.get(label)
        if method is None or method.decoupled:
            continue
        plan = plan_of(method, profile, question.device.backend, question.topology, question.costs())
        size = {tensor.name: math.prod(tensor.shape) * profile.dtype_bytes for tensor in profile.tensors}
        try:
            return {"label": label, "arguments": bucket_arguments(plan, size)}
        except ValueError:
            continue
    return None


def ddp_sentence(answer: dict[str, Any]) -> str:
    """One line to paste; a long list is cut, all of it is in the JSON."""
    name, options = split_options(answer["label"])
    words = "".join(f", {key}={value!r}" for key, value in options.items())
    ((argument, caps),) = answer["arguments"].items()
    shown = [f"{cap:.6g}" for cap in (caps if isinstance(caps, list) else [caps])]
    rest = f", ... {len(shown) - _SHOWN} more in --json" if len(shown) > _SHOWN else ""
    value = ", ".join(shown[:_SHOWN]) + rest
    value = f"[{value}]" if isinstance(caps, list) else value
    return f'or with DDP: {argument}={value}, and model.register_comm_hook(*tw.ddp_hook("{name}"{words}))'
