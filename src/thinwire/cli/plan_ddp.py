"""The advice of ``thinwire plan`` for users who stay with DDP: the sizes of its buckets."""

from __future__ import annotations

import math
from typing import Any

from thinwire.adapters.ddp_buckets import bucket_arguments
from thinwire.bench.words import arguments, split_options
from thinwire.cli.plan_inputs import Question
from thinwire.planner.choose import Ranking
from thinwire.planner.timeline.local_steps import Periodic
from thinwire.planner.timeline.simulate import plan_of

_SHOWN = 12


def ddp_answer(question: Question, ranking: Ranking) -> dict[str, Any] | None:
    """Return ``{"label": ..., "arguments": ...}`` of the recommendation, or ``"why_not"`` instead; None: one rank."""
    label = ranking.best.label
    method, profile = dict(question.candidates).get(label), question.profile
    if method is None or ranking.workers == 1:
        return None
    if isinstance(method, Periodic):
        return {
            "label": label,
            "why_not": "it exchanges weights, whereas DDP averages gradients: attach to the bare model",
        }
    if method.decoupled:
        return {"label": label, "why_not": "it leaves part of the exchange for the next forward pass"}
    plan = plan_of(method, profile, question.device.backend, question.topology, question.costs())
    size = {tensor.name: math.prod(tensor.shape) * profile.dtype_bytes for tensor in profile.tensors}
    try:
        return {"label": label, "arguments": bucket_arguments(plan, size)}
    except ValueError as error:
        return {"label": label, "why_not": str(error)}


def ddp_sentence(answer: dict[str, Any]) -> str:
    """Return one line to paste, or why there is none; a long list is cut, but complete in the JSON."""
    name, options = split_options(answer["label"])
    if "why_not" in answer:
        return f"with DDP: not {name}: {answer['why_not']}"
    ((argument, caps),) = answer["arguments"].items()
    shown = [f"{cap:.6g}" for cap in (caps if isinstance(caps, list) else [caps])]
    rest = f", ... {len(shown) - _SHOWN} more in --json" if len(shown) > _SHOWN else ""
    value = ", ".join(shown[:_SHOWN]) + rest
    value = f"[{value}]" if isinstance(caps, list) else value
    return f"or with DDP: {argument}={value}, and model.register_comm_hook(*tw.ddp_hook({arguments(name, options)}))"
