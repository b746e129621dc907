"""Compressed updates: thinwire's methods applied to what a client sends, with the residual in the client's state.

A method's program is run for a group of one: its result is what the client's message decodes to, and its memory is what
the client has not sent yet. The device adds decoded messages as it would add changes, so the sum that a device sends is
as large as before: compression helps if every client has its own link, and shows in ``client_bytes``.

Differences from the methods' papers: a client takes part only now and then, so its residual may be old when it is
sent; factors that ranks share in training (PowerSGD's, ACP's) are separate for each client here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.core import program
from thinwire.core.methods.registry import resolve
from thinwire.core.program import Bucket, Method, Slot, State
from thinwire.core.program.ops import Op, drive
from thinwire.engine.executors.alone import result_alone
from thinwire.systems.federated.aggregator import ClientContext, ClientResult

_INNER, _OWN = "inner/", "compression/"


class Compressed:
    """An algorithm whose clients send compressed changes.

    Args:
        inner: the algorithm.
        method: a name with ``options``, or an instance, such as ``"topk", density=0.01``.

    Raises:
        ValueError: the algorithm sends weights, which must arrive whole, or the method is of no use here.
    """

    stateful = True
    compressible: frozenset[str] = frozenset()

    def __init__(self, inner: Any, method: Method | str, **options: Any) -> None:
        self.inner = inner
        self.method = resolve(method, **options)
        if not inner.compressible:
            raise ValueError(
                f"{type(inner).__name__} sends weights, gradients, or changes that must arrive intact; FedAvg, "
                "FedProx, FedOpt, FedNova and Scaffold send changes, which can be compressed"
            )
        if why := self.method.unfit.get("federated"):
            raise ValueError(f"{self.method.name} is of no use for clients' changes: {why}")
        self.description = f"{self.method.name} {dict(self.method.options())}"

    def __getattr__(self, name: str) -> Any:  # in all other respects it is the inner algorithm
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def train(
        self, context: ClientContext, payload: Mapping[str, Tensor], state: Mapping[str, Tensor] | None
    ) -> ClientResult:
        held = state or {}
        own = {name[len(_INNER) :]: x for name, x in held.items() if name.startswith(_INNER)}
        result: ClientResult = self.inner.train(context, payload, own if own else None)
        kept = {f"{_INNER}{name}": x for name, x in (own if result.state is None else result.state).items()}
        reduce, sent = dict(result.reduce), 0
        for name, x in reduce.items():
            if name not in self.inner.compressible:
                sent += x.numel() * x.element_size()
                continue
            prefix = f"{_OWN}{name}/"
            before = {key[len(prefix) :]: value for key, value in held.items() if key.startswith(prefix)}
            reduce[name], after, size = self._compress(context, x, before)
            kept.update({f"{prefix}{key}": value for key, value in after.items()})
            sent += size
        return ClientResult(reduce, result.collect, kept, result.samples, result.metrics, sent)

    def _compress(
        self, context: ClientContext, x: Tensor, before: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor], int]:
        """Return what the message decodes to, the new memory, and the message's bytes."""
        state = State(0, program.Topology(1))
        if before:
            state.restore(_snapshot(before))
        work = context.workspace
        slots = [
            Slot(name, piece.shape, piece, x.dtype, x.device) for name, piece in work.named(x.detach().clone()).items()
        ]
        bucket, size = Bucket(0, slots), [0]
        with torch.no_grad():
            drive(self.method.reduce(bucket, state), _counting(size))
            if not state.end_step():
                raise ValueError("the change is not finite")
            found = [slot.value_or_zeros() if slot.result is None else slot.result for slot in slots]
        return torch.cat([piece.reshape(-1) for piece in found]), _plain(state), size[0]


def _counting(size: list[int]) -> Callable[[Op], Tensor | None]:
    """Answer as a group of one, and add up the bytes that this client sends, not those that others would send."""
    scattered = False

    def answer(op: Op) -> Tensor | None:
        nonlocal scattered
        if isinstance(op, program.Collective) and not (scattered and isinstance(op, program.AllGather)):
            size[0] += op.tensor.numel() * op.tensor.element_size()
        scattered = scattered or isinstance(op, (program.AllToAll, program.ReduceScatter))
        return result_alone(op)

    return answer


def _plain(state: State) -> dict[str, Tensor]:
    found = state.snapshot()
    rows = {"step": torch.tensor(found["step"])}
    rows.update({f"residual/{name}": x for name, x in found["residual"].items()})
    for kind in ("shared", "local"):
        rows.update({f"{kind}/{field}/{name}": x for field, row in found[kind].items() for name, x in row.items()})
    return rows


def _snapshot(rows: Mapping[str, Tensor]) -> dict[str, Any]:
    found: dict[str, Any] = {"step": int(rows["step"]), "residual": {}, "shared": {}, "local": {}}
    for key, x in rows.items():
        kind, _, rest = key.partition("/")
        if kind == "residual":
            found[kind][rest] = x
        elif rest:
            field, _, name = rest.partition("/")
            found[kind].setdefault(field, {})[name] = x
    return found
