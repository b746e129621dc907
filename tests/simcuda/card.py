"""A card without a card: tensors that say they are on ``cuda:0``, and streams that only keep the order of things.

A tensor has its numbers on the CPU and says that it is on a card, so code meets the branches that it takes there. Every
operation is *launched* on a stream and runs at once; what a real card is free to do in another order is kept as vector
clocks. Each piece of memory knows by which streams, and when, it was written and read last. So it is found, in every
run and not once in a thousand, that

RACE            memory is used by a stream that does not come after the last use that it collides with, or pinned memory
                by the host while a copy from or to it is under way;
FREED-IN-USE    memory is let go while another stream than that of its making has a use of it queued, of which neither
                the stream of its making nor the allocator (``record_stream``) knows, and a tensor that may be
                given the same memory is used without waiting for it;
HOST-WAIT       the host waits for a card: a number is read, a copy is not between pinned memory or not without waiting;
WRONG-DEVICE    "the current device" was meant and no tensor is there, or an event is of two devices;
MIXED           one operation works on tensors of two devices.

What is not real:

* Numbers are the CPU's, not a card's, and no time passes. Each CUDA call is assumed to do as documented.
* Kernels of Triton count as launches; what they read and write, and the numbers, are their twins'.
* Launches are calls of aten that are not views and do more than allocate. A ``_foreach_`` call counts once, which is so
  for lists of one dtype, and a call that is several kernels counts once too. So counts tell two versions of a program
  apart, not two programs.
* Memory is told apart by storages, not by elements. The allocator's stream is the one that was current.
* Of the calls that wait inside torch's CUDA code, those in ``_WAITING`` are known.
* Autograd takes the tensors for the CPU's, so a backward runs on the current stream, not on that of its forward.
* ``torch.Generator("cuda")`` is one of the CPU.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

import thinwire
from thinwire.core.kernels import seeding, tables
from thinwire.core.kernels.fused import Fused, Kernel
from thinwire.core.methods.regions import regions

HERE = Path(__file__).parent
SOURCE = str(Path(thinwire.__file__).parent) + "/"
_FOLDERS = ((SOURCE, ""), (str(Path(torch.optim.__file__).parent) + "/", "torch.optim/"), (f"{HERE}/", "test: "))
_PASSED_ON = "engine/state/scaler.py", "step"  # stands around GradScaler's own, even for a session of another test
_HARNESS = {str(HERE / "card.py"), str(HERE / "nccl.py")}
aten = torch.ops.aten

_WAITING = {  # a number, the size of the result, or whether it succeeded, is read from the card
    aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default,
    aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.unique_consecutive.default,
    aten._linalg_eigh.default, aten.linalg_eig.default, aten._linalg_svd.default, aten.linalg_cholesky.default,
    aten.repeat_interleave.Tensor, aten.bincount.default,
}  # fmt: skip
_ALLOCATING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh"}
_COPIES = {aten.copy_.default, aten._to_copy.default}


@dataclass(frozen=True)
class Finding:
    """One fault: what kind, and where in the source (or in the test)."""

    kind: str
    what: str
    where: str

    def __str__(self) -> str:
        return f"{self.kind} at {self.where}: {self.what}"


@dataclass(frozen=True)
class _Left:
    """A use that is still queued of memory that the allocator has back."""

    stream: Stream
    time: int
    what: str
    where: str


@dataclass(frozen=True)
class _Use:
    """A launch that has read or written elements from ``first`` to below ``end``."""

    stream: Stream
    time: int
    first: int
    end: int
    how: str

    def meets(self, other: _Use) -> bool:
        return self.first < other.end and other.first < self.end

    def within(self, other: _Use) -> bool:
        return other.first <= self.first and self.end <= other.end


class Memory:
    """One storage, alive as long as a tensor on it is."""

    def __init__(self, card: Card, storage: Any, stream: Stream, where: str) -> None:
        self.card, self.storage, self.home, self.made = card, storage, stream, where
        self.written: list[_Use] = []
        self.read: list[_Use] = []  # since it was written
        self.used: dict[Stream, tuple[int, str]] = {}
        self.recorded: set[Stream] = set()
        self.before = stream.free  # what may have been here before
        stream.free = [left for left in stream.free if stream.clock.get(left.stream, 0) < left.time]

    def use(self, stream: Stream, where: str, inner: torch.Tensor, *, write: bool) -> None:
        """A launch reads or writes the tensor ``inner`` on it: what lies between its first and its last element."""
        now, verb = stream.clock[stream], "writes" if write else "reads"
        size, first = inner.element_size(), inner.storage_offset()
        span = 1 + sum((n - 1) * step for n, step in zip(inner.shape, inner.stride())) if inner.numel() else 0
        use = _Use(stream, now, first * size, (first + span) * size, f"{'written' if write else 'read'} at {where}")
        for other in self.written + self.read if write else self.written:
            if use.meets(other) and stream.clock.get(other.stream, 0) < other.time:
                what = f"{stream} {verb} what {other.stream} has {other.how}, in no order (made at {self.made})"
                self.card.find("RACE", what, where)
        if write:
            self.written = [other for other in self.written if not other.within(use)] + [use]
            self.read = [other for other in self.read if not other.within(use)]
        else:
            self.read = [other for other in self.read if other.stream is not stream or not other.within(use)] + [use]
        self.used[stream] = now, where
        if self.home is self.card.the_host:  # torch gives pinned memory to others only after the copies that it made
            self.recorded.add(stream)
        before, self.before = self.before, []
        for left in before:
            if stream.clock.get(left.stream, 0) < left.time and left in self.home.free:
                self.home.free.remove(left)
                self.card.find("FREED-IN-USE", f"{left.what}, and may be what is made at {self.made}", left.where)

    def __del__(self) -> None:
        known = [self.home, *self.recorded]  # the allocator waits for what has been issued there
        for stream, (time, place) in self.used.items():
            if stream not in known and all(one.clock.get(stream, 0) < time for one in known):
                what = f"what {self.home} made at {self.made} is still used by {stream} at {place}"
                self.home.free.append(_Left(stream, time, what, self.card.where()))


class OnCard(torch.Tensor):
    """A tensor whose numbers are on the CPU, and which says that it is on a card; torch's C++ is not told."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    inner: torch.Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, inner: torch.Tensor, memory: Memory) -> OnCard:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype
        )
        made.inner, made.memory = inner, memory
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        card = next(x.memory.card for x in _tensors(args, kwargs or {}) if isinstance(x, OnCard))
        return card.launch(func, args, kwargs or {})

    def use(self, stream: Stream, where: str, *, write: bool) -> None:
        """A launch reads or writes it."""
        self.memory.use(stream, where, self.inner, write=write)

    def __repr__(self, **_: Any) -> str:
        return f"OnCard({self.inner!r})"

    @property
    def device(self) -> torch.device:
        return self.memory.home.device

    @property
    def is_cuda(self) -> bool:
        return True

    @property
    def is_cpu(self) -> bool:
        return False

    def get_device(self) -> int:
        return self.memory.home.device_index

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def record_stream(self, stream: Stream) -> None:
        if not self.memory.card.muted():
            self.memory.recorded.add(stream)

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        copy = kwargs.pop("copy", False)
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type == "cpu":
            return self.memory.card.to_host(self.detach(), dtype, non_blocking)
        if device is not None and device.index not in (None, self.get_device()):
            raise NotImplementedError("a copy from card to card")
        if dtype is None or dtype == self.dtype:
            return self.clone() if copy else self
        return torch.Tensor.to(self, dtype)

    def cpu(self) -> torch.Tensor:
        return self.to("cpu")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda device type tensor to numpy")

    def new_tensor(self, data: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
        return torch.tensor(data, dtype=self.dtype if dtype is None else dtype, device=device or self.device)


class Stream:
    """Work in its order; ``clock`` says how far each stream is when this one is where it is."""

    def __init__(self, card: Card, device: int, name: str) -> None:
        self.card, self.device_index, self.name = card, device, name
        self.device = torch.device("cuda", device)
        self.clock: dict[Stream, int] = {self: 0}
        self.free: list[_Left] = []

    def __repr__(self) -> str:
        return self.name

    def launched(self) -> None:
        _join(self.clock, self.card.host)
        self.clock[self] += 1

    def wait_event(self, event: Event) -> None:
        if not self.card.muted():
            _join(self.clock, event.clock)

    def wait_stream(self, stream: Stream) -> None:
        if not self.card.muted():
            _join(self.clock, stream.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = Event(self.card) if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        if not self.card.muted():
            self.card.waited("Stream.synchronize", self)


class Event:
    """How far a stream was."""

    def __init__(self, card: Card) -> None:
        self.card, self.device = card, None
        self.clock: dict[Stream, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        stream = self.card.current_stream() if stream is None else stream
        if self.card.muted():
            return
        if self.device not in (None, stream.device):
            self.card.find("WRONG-DEVICE", "an event of one device is recorded on another", self.card.where())
        self.device, self.clock = stream.device, dict(stream.clock)

    def wait(self, stream: Stream | None = None) -> None:
        (self.card.current_stream() if stream is None else stream).wait_event(self)

    def synchronize(self) -> None:
        self.card.find("HOST-WAIT", "Event.synchronize", self.card.where())
        _join(self.card.host, self.clock)

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        if self.device != other.device:
            self.card.find("WRONG-DEVICE", "elapsed_time between events of two devices", self.card.where())
        return 1.0


@cache
def _place(file: str) -> str | None:
    """What a file is called in findings; None: it is not to be named."""
    for folder, words in _FOLDERS:
        if file.startswith(folder) and file not in _HARNESS:
            return f"{words}{file[len(folder) :]}"
    return None


def _join(into: dict[Stream, int], other: dict[Stream, int]) -> None:
    for stream, time in other.items():
        if into.get(stream, 0) < time:
            into[stream] = time


def _tensors(args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for x in (*args, *kwargs.values()):
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif isinstance(x, (list, tuple)):
            found += [y for y in x if isinstance(y, torch.Tensor)]
    return found


def _inner(x: Any) -> Any:
    if isinstance(x, OnCard):
        return x.inner
    if isinstance(x, (list, tuple)):
        return type(x)(_inner(y) for y in x)
    return x


def _pinned(x: torch.Tensor) -> bool:
    return "pinned" in x.__dict__


def _masked(func: Any, args: Any) -> bool:
    """Whether tensors of bools are indices, whose number of elements is read first."""
    if func not in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
        return False
    return any(isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1])


@dataclass
class Card:
    """Cards with their streams, and what was found. ``with card.in_place():`` puts it where torch's CUDA is.

    Attributes:
        current: number of the current device.
        mute: (file, first line, last line) of a call in the source that is to have no effect, for mutation tests.
        findings: but for those of the host, which are in ``waits``.
        names: launches by the package, by operation.
        pinned: how often memory was pinned, by place.
    """

    current: int = 0
    mute: tuple[str, int, int] | None = None
    findings: list[Finding] = field(default_factory=list)
    waits: list[Finding] = field(default_factory=list)
    names: Counter[str] = field(default_factory=Counter)
    pinned: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.the_host = Stream(self, 0, "the host")
        self.host = self.the_host.clock
        self.main = [Stream(self, index, f"the main stream of cuda:{index}") for index in range(2)]
        self._streams = list(self.main)  # the current one of each device
        self._on_host: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()
        self._memories: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()
        self._in_use: set[int] = set()
        self._made = 0

    @property
    def launches(self) -> int:
        """Of the package."""
        return sum(self.names.values())

    @property
    def bytes(self) -> int:
        """Of all that is on the cards now."""
        return sum(memory.storage.nbytes() for memory in self._memories.values())

    def where(self) -> str:
        """The innermost line that is of the package, of torch's optimizers, or of the tests beside this file."""
        frame = sys._getframe(1)
        while frame is not None:
            name = _place(frame.f_code.co_filename)
            if name is not None and (name, frame.f_code.co_name) != _PASSED_ON:
                return f"{name}:{frame.f_lineno}"
            frame = frame.f_back
        return "?"

    def muted(self) -> bool:
        """Whether the call of this card was made, directly or by a function or two, where ``mute`` says."""
        if self.mute is None:
            return False
        name, first, last = self.mute
        frame = sys._getframe(1)
        for _ in range(6):
            if frame is not None:
                if frame.f_code.co_filename == name and first <= frame.f_lineno <= last:
                    return True
                frame = frame.f_back
        return False

    def find(self, kind: str, what: str, where: str) -> None:
        found = Finding(kind, what, where)
        (self.waits if kind == "HOST-WAIT" else self.findings).append(found)

    def waited(self, what: str, stream: Stream) -> None:
        """The host has waited for all that a stream has to do."""
        self.find("HOST-WAIT", what, self.where())
        _join(self.host, stream.clock)

    # --- torch.cuda ------------------------------------------------------------------------------------------------

    def index(self, device: Any = None) -> int:
        if isinstance(device, int):
            return device
        found = None if device is None else torch.device(device).index
        if found is None:
            if self._in_use and self.current not in self._in_use:
                self.find("WRONG-DEVICE", f"the current device is meant, cuda:{self.current}", self.where())
            return self.current
        return found

    def current_stream(self, device: Any = None) -> Stream:
        return self._streams[self.index(device)]

    def new_stream(self, device: Any = None, priority: int = 0) -> Stream:
        self._made += 1
        return Stream(self, self.index(device), f"side stream {self._made}")

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        before, current = self._streams[stream.device_index], self.current
        self._streams[stream.device_index], self.current = stream, stream.device_index
        try:
            yield
        finally:
            self._streams[stream.device_index], self.current = before, current

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, self.current = self.current, self.index(device)
        try:
            yield
        finally:
            self.current = before

    def synchronize(self, device: Any = None) -> None:
        self.find("HOST-WAIT", "torch.cuda.synchronize", self.where())
        index = self.index(device)
        for memory in self._memories.values():
            for stream in memory.used:
                if stream.device_index == index:
                    _join(self.host, stream.clock)

    # --- operations ------------------------------------------------------------------------------------------------

    def wrap(self, inner: torch.Tensor, device: torch.device, where: str) -> OnCard:
        storage = inner.untyped_storage()
        memory = self._memories.get(storage._cdata)
        if memory is None:
            memory = self._memories[storage._cdata] = Memory(self, storage, self._streams[device.index], where)
            self._in_use.add(device.index)
        return OnCard(inner, memory)

    def launch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = _tensors(args, kwargs)
        cards = [x for x in tensors if isinstance(x, OnCard)]
        asked = None if kwargs.get("device") is None else torch.device(kwargs["device"])
        where = self.where()
        devices = {x.device for x in cards}
        if len(devices) > 1:
            self.find("MIXED", f"{func} on {', '.join(sorted(map(str, devices)))}", where)
        if func in _COPIES and (len(cards) < len(tensors) or not cards):
            return self._from_host(func, args, kwargs, asked, where)
        if any(not isinstance(x, OnCard) and x.dim() for x in tensors):
            self.find("MIXED", f"{func} on a card and on the CPU", where)
        if asked is not None and asked.type != "cuda" and func is not aten._to_copy.default:
            return func(*_inner(args), **{k: _inner(v) for k, v in kwargs.items()})
        device = asked if asked is not None and asked.type == "cuda" else next(iter(devices))
        if device.index is None:
            device = torch.device("cuda", self.index())
        kwargs = {k: v for k, v in kwargs.items() if k not in ("pin_memory", "device")}
        stream, name = self._streams[device.index], func._schema.name.removeprefix("aten::")
        quiet = func.is_view or name in _ALLOCATING
        if not quiet:
            self.kernel(name, device.index, where, current=device.index)
            self._use(func, args, kwargs, stream, where)
            if func in _WAITING or _masked(func, args):
                self.waited(name, stream)
        result = func(*_inner(args), **{k: _inner(v) for k, v in kwargs.items()})
        return self._wrapped(result, cards, device, stream, where, quiet)

    def kernel(self, name: str, device: int, where: str, current: int | None = None) -> Stream:
        """A launch, on the current stream of a device; ``current``: the current device, as the launch sees it."""
        if (self.current if current is None else current) != device:
            self.find("WRONG-DEVICE", f"{name} is launched on cuda:{self.current}, its tensors are on another", where)
        stream = self._streams[device]
        stream.launched()
        if not where.startswith(("test: ", "torch.optim/", "?")):
            self.names[name] += 1
        return stream

    def pin(self, x: torch.Tensor) -> torch.Tensor:
        storage, where = x.untyped_storage(), self.where()
        self.pinned[where] += 1
        x.pinned = self._on_host[storage._cdata] = Memory(self, storage, self.the_host, where)
        return x

    def _memory(self, x: Any) -> Memory | None:
        """Of what is on a card, or pinned."""
        if isinstance(x, OnCard):
            return x.memory
        return self._on_host.get(x.untyped_storage()._cdata) if type(x) is torch.Tensor else None

    def copied(self, x: torch.Tensor, stream: Stream, where: str, *, write: bool) -> None:
        """A copy reads or writes what is on the host, which may be pinned."""
        if (memory := self._memory(x)) is not None:
            memory.use(stream, where, x, write=write)

    def on_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """The host does an operation, at once."""
        if self._on_host and not func.is_view and any(self._memory(x) for x in _tensors(args, kwargs)):
            self.host[self.the_host] += 1
            self._use(func, args, kwargs, self.the_host, self.where())

    def _use(self, func: Any, args: Any, kwargs: dict[str, Any], stream: Stream, where: str) -> None:
        schema = func._schema.arguments
        given = [*zip(schema, args), *((a, kwargs[a.name]) for a in schema if a.name in kwargs)]
        for write in (False, True):
            for argument, x in given:
                if (argument.alias_info is not None and argument.alias_info.is_write) is write:
                    for one in x if isinstance(x, (list, tuple)) else (x,):
                        if (memory := self._memory(one)) is not None:
                            memory.use(stream, where, _inner(one), write=write)

    def _wrapped(
        self, result: Any, cards: list[OnCard], device: torch.device, stream: Stream, where: str, quiet: bool
    ) -> Any:
        if isinstance(result, (list, tuple)):
            return type(result)(self._wrapped(x, cards, device, stream, where, quiet) for x in result)
        if not isinstance(result, torch.Tensor):
            return result
        for x in cards:
            if x.inner is result:
                if x.shape != result.shape or x.stride() != result.stride():
                    raise NotImplementedError("an operation that changes a shape in place")
                return x
        made = self.wrap(result, device, where)
        if not quiet and not made.memory.written:
            made.use(stream, where, write=True)
        return made

    def _from_host(self, func: Any, args: Any, kwargs: dict[str, Any], asked: Any, where: str) -> Any:
        """A copy, into memory that is there or into new memory; also the way back by ``copy_``."""
        into = func is aten.copy_.default
        source, target = (args[1], args[0]) if into else (args[0], None)
        blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if isinstance(source, OnCard):
            assert target is not None
            found = self.to_host(source, None, not blocking and _pinned(target))
            self.copied(target, self._streams[source.get_device()], where, write=True)
            return target.copy_(found)
        if target is None:
            device = asked if asked.index is not None else torch.device("cuda", self.index())
            inner = func(source, **{**kwargs, "device": torch.device("cpu"), "pin_memory": False}).clone()
            result = self.wrap(inner, device, where)
        else:
            device, result = target.device, target
            target.inner.copy_(source)
        stream = self.kernel("copy from the host", device.index, where, device.index)
        self.copied(source, stream, where, write=False)
        result.use(stream, where, write=True)
        if (source.dim() or not into) and (blocking or not _pinned(source)):  # else a kernel's argument
            self.waited("a copy from the host that waits" if blocking else "a copy from pageable memory", stream)
        return result

    def to_host(self, source: OnCard, dtype: Any, non_blocking: bool) -> torch.Tensor:
        """A copy of a tensor, on the host."""
        where, index = self.where(), source.get_device()
        stream = self.kernel("copy to the host", index, where, index)
        source.use(stream, where, write=False)
        if not non_blocking:
            self.waited("a copy to the host", stream)
        return source.inner.detach().to(dtype=dtype or source.dtype, copy=True)

    # --- in torch's place ------------------------------------------------------------------------------------------

    @contextmanager
    def in_place(self) -> Iterator[Card]:
        """Let torch.cuda be this card; undone at the end."""
        card, build, generator = self, torch.tensor, torch.Generator
        if torch.cuda.is_available():
            torch.cuda.init()  # else torch would take it for done from now on

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                kwargs = kwargs or {}
                asked = kwargs.get("device")
                if (asked is not None and torch.device(asked).type == "cuda") or any(
                    isinstance(x, OnCard) for x in _tensors(args, kwargs)
                ):
                    return card.launch(func, args, kwargs)
                card.on_host(func, args, kwargs)
                result = func(*args, **{k: v for k, v in kwargs.items() if k != "pin_memory"})
                return card.pin(result) if kwargs.get("pin_memory") else result

        def tensor(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
            made, device = build(data, **options), torch.get_default_device() if device is None else device
            return made if torch.device(device).type == "cpu" else made.to(device)

        def pin(x: torch.Tensor, *_: Any) -> torch.Tensor:
            return card.pin(x.clone())

        class Numbers(generator):  # type: ignore[misc,valid-type]
            def __new__(cls, device: Any = "cpu") -> torch.Generator:
                if torch.device(device).type == "cuda":
                    card.index(device)
                    card.names["torch.Generator"] += 1
                return generator("cpu")

        def launch(kernel: Kernel, programs: int, *arguments: Any, **_: Any) -> None:
            device = next(x for x in arguments if isinstance(x, torch.Tensor)).get_device()
            card.kernel(kernel.__name__, device, card.where(), current=device)

        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            if not function.serves(*args, **kwargs):
                return function.twin(*args, **kwargs)
            function.launch(*args, **kwargs)
            names = card.names.copy()
            made = function.twin(*args, **kwargs)
            card.names = names
            return made

        cuda = {
            "Stream": self.new_stream,
            "Event": lambda **_: Event(card),
            "stream": self.stream,
            "current_stream": self.current_stream,
            "default_stream": lambda device=None: card.main[card.index(device)],
            "synchronize": self.synchronize,
            "current_device": self.index,
            "device": self.device,
            "device_count": lambda: 2,
            "is_available": lambda: True,
            "is_current_stream_capturing": lambda: False,
            "_lazy_init": lambda: None,
        }
        patches = [patch.object(torch.cuda, name, value) for name, value in cuda.items()]
        patches += [patch.object(torch.Tensor, "pin_memory", pin, create=True)]
        patches += [patch.object(torch.Tensor, "is_pinned", lambda x, *_: _pinned(x), create=True)]
        patches += [patch.object(torch, "tensor", tensor), patch.object(torch, "Generator", Numbers)]
        patches += [patch.object(Kernel, "__call__", launch), patch.object(Fused, "__call__", call)]
        # Whether memory lies where it has lain is a matter of chance on a CPU: tables are always made anew.
        patches += [patch.object(tables, "table_at", tables.table_at.__wrapped__)]
        for one in patches:
            one.start()
        _device_constructors.cache_clear()  # torch.tensor is one of them
        try:
            with Mode():
                yield self
        finally:
            for one in reversed(patches):
                one.stop()
            for kept in (regions, seeding.on_card, _device_constructors):  # what this package and torch keep of it
                kept.cache_clear()
