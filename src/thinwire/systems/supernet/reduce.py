"""ActiveReduce: any element-wise method, on the active part of the gradient only; as exact as the dense exchange.

Every rank knows the step's active set before backward, from the seed. A hash of eight bytes is compared across ranks
once, before any payload whose size depends on the set. Then each bucket's rectangles are packed one after another, and
the inner method's results are put back among zeros. Plans are made for the whole network: a bucket keeps its parameters
and its place, and only its message is shorter.

DDP has no equivalent: with ``find_unused_parameters=True`` it still reduces every bucket whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from thinwire.core.checks import check_choice
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.program import AllGather, Bucket, Method, Program, Shapes, State, Topology
from thinwire.core.program.trace import memory
from thinwire.engine.sync import GradientSync
from thinwire.systems.supernet.active import ActiveSet, PackedState, pack, unpack


class ScheduleMismatch(RuntimeError):
    """The ranks are about to reduce different parts of the gradient; raised on all ranks, before any reduction."""

    def __init__(self, step: int, digests: Sequence[str]) -> None:
        self.step, self.digests = step, tuple(digests)
        rows = ", ".join(f"rank {r}: {digest}" for r, digest in enumerate(digests))
        super().__init__(
            f"at step {step} the ranks have drawn different sub-networks ({rows}): give all of them the same seed, "
            "phases, space and checkpoint"
        )


@dataclass(eq=False)
class _Announced:
    """What is currently announced; shared by the method and its dense method."""

    active: ActiveSet | None = None
    everyone: tuple[ActiveSet, ...] = ()
    buffers: dict[tuple[int, int, str], Tensor] = field(default_factory=dict)


def compare(digest: bytes, step: int, device: torch.device) -> Program:
    """Raise :class:`ScheduleMismatch` on all ranks unless all have the same eight bytes."""
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    seen: Tensor = yield AllGather(mine)
    rows = [bytes(row).hex() for row in seen.cpu().tolist()]
    if len(set(rows)) > 1:
        raise ScheduleMismatch(step, rows)


@dataclass(frozen=True)
class ActiveReduce(Method):
    """Reduce what :meth:`announce` named, with an inner method; everything until something has been announced.

    Args:
        inner: any method that works element by element and keeps at most residuals: "ssgd", "cast", "topk", ...
        divisor: "world": the average over all ranks. "participants": each element is divided by the number of ranks
            whose own set contains it; for exact methods.
    """

    name: ClassVar[str] = "active"

    inner: Method = field(default_factory=SSGD)
    divisor: str = "world"
    fusion: Any = field(init=False, default="auto")
    announced: _Announced = field(default_factory=_Announced, repr=False, compare=False)

    def __post_init__(self) -> None:
        inner = self.inner
        if not isinstance(inner, Method):
            raise TypeError(f"inner={inner!r} must be a method, such as thinwire.SSGD()")
        check_choice("divisor", self.divisor, ("world", "participants"))
        if self.divisor == "participants" and not inner.exact:
            raise ValueError(f'divisor="participants" needs an exact method, not {inner.name}')
        whole = memory(inner, [("weight", (64, 64))], Topology(2), rank=0, dtype=torch.float32)
        if inner.phases > 1 or inner.shards or inner.decoupled or whole.fields:
            raise ValueError(
                f"{inner.name} cannot work on a part of the gradient that changes from step to step: use it without "
                "ActiveReduce, or ssgd, cast or topk inside"
            )
        for name in ("has_residual", "exact"):
            object.__setattr__(self, name, getattr(inner, name))
        object.__setattr__(self, "fusion", inner.fusion)

    def announce(self, active: ActiveSet, sync: GradientSync, step: int, everyone: Sequence[ActiveSet] = ()) -> None:
        """Announce what this step's gradients can touch, before its backward. All ranks must call it alike.

        Args:
            active: of all sub-networks of all ranks. sync: the one to which this method is attached.
            step: of training, included in the comparison.
            everyone: each rank's own set, for ``divisor="participants"``.

        Raises:
            ScheduleMismatch: the ranks announce different things. Raised on all of them; nothing has been sent.
        """
        if self.divisor == "participants" and len(everyone) != sync.services.topology.world_size:
            raise ValueError('divisor="participants" needs the set of every rank')
        device = next(sync.services.model.parameters()).device
        sync.services.run(compare(active.hash8(step), step, device), lane="supernet")
        self.announced.active, self.announced.everyone = active, tuple(everyone)

    def reduce(self, bucket: Bucket, state: State) -> Program:
        active = self.announced.active
        if active is None or bucket.device.type == "meta":
            yield from self.inner.reduce(bucket, state)
            return
        packed = pack(bucket, active, self._buffer(bucket, state.rank))
        if packed is not None:
            whole = {slot.name: slot for slot in bucket.slots}
            yield from self.inner.reduce(packed, PackedState(state, active, whole))
        everyone = self.announced.everyone if self.divisor == "participants" else ()
        unpack(packed, bucket, active, everyone)

    def _buffer(self, bucket: Bucket, rank: int) -> Tensor:
        """Memory for the bucket's message, kept from step to step; in LocalWorld one method serves all ranks."""
        buffers, key = self.announced.buffers, (rank, bucket.index, bucket.slots[0].name)
        if key not in buffers or buffers[key].numel() < bucket.numel:
            buffers[key] = torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device)
        return buffers[key]

    def dense(self, name: str, shape: Sequence[int], embedding: bool) -> bool:
        return self.inner.dense(name, shape, embedding)

    def dense_method(self) -> Method:
        """Return a method that also packs parameters which the inner method does not compress."""
        plain = self.inner.dense_method() or SSGD(deterministic=self.inner.deterministic)
        return ActiveReduce(plain, announced=self.announced)

    def payload(self, shapes: Shapes, phase: int) -> list[int]:
        return self.inner.payload(shapes, phase)

    def compute_seconds(self, shapes: Shapes, phase: int, topology: Topology, costs: Any) -> list[float] | None:
        return self.inner.compute_seconds(shapes, phase, topology, costs)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.inner.check_optimizer(optimizer)

    def options(self) -> Mapping[str, Any]:
        return {"inner": self.inner.name, "divisor": self.divisor, **self.inner.options()}


_ELEMENTWISE = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop")


class InactiveWeights:
    """Hooks into ``optimizer.step``, until they are removed.

    * "skip": outside the active rectangles, parameters and all state tensors in a parameter's shape keep their bits.
      Adam has one step counter per tensor, so a slice's bias correction follows the count of its tensor.
    * "zero": every parameter has a gradient, so momentum and weight decay change unused weights, as in torch before 2.0
      and Horovod: for reproducing results.

    Args:
        optimizer: element-wise, of ``torch.optim``; with "skip", others can only run steps in which everything is
            active.
        net: the module with the parameters.
        current: returns the active set of the step; None: everything.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        net: nn.Module,
        current: Callable[[], ActiveSet | None],
        semantics: str = "skip",
    ) -> None:
        check_choice("semantics", semantics, ("skip", "zero"))
        self._names = {id(p): name for name, p in net.named_parameters()}
        self._current, self._skip = current, semantics == "skip"
        self._saved: list[tuple[Tensor, Any, Tensor, dict[str, Tensor]]] = []
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        active = self._current()
        self._saved.clear()
        if active is None:
            return
        if self._skip and not active.is_full and not elementwise(optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} does not work element by element, so unused weights cannot be left as "
                'they are: use an optimizer of torch.optim such as Adam, or semantics="zero"'
            )
        for group in optimizer.param_groups:
            for p in group["params"]:
                name = self._names.get(id(p))
                if name is None or active.whole(name):
                    continue
                rect = active.rect(name)
                if not self._skip:
                    if p.grad is None:
                        p.grad = torch.zeros_like(p)
                elif rect is None:
                    p.grad = None
                elif p.grad is not None:
                    held = {key: x.clone() for key, x in optimizer.state.get(p, {}).items() if _shaped(x, p)}
                    self._saved.append((p, rect, p.detach().clone(), held))

    @torch.no_grad()
    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for p, rect, before, held in self._saved:
            before[rect] = p[rect]
            p.copy_(before)
            for key, x in optimizer.state.get(p, {}).items():
                if _shaped(x, p):
                    old = held.get(key)
                    if old is None:  # created by this step
                        old = torch.zeros_like(x)
                    old[rect] = x[rect]
                    x.copy_(old)
        self._saved.clear()


def _shaped(x: Any, p: Tensor) -> bool:
    return isinstance(x, Tensor) and x.shape == p.shape and p.ndim > 0


def elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether each weight's update depends only on its own gradient and state."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and kind.__name__ in _ELEMENTWISE
