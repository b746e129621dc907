"""What all ranks must agree on before training: the same model, plan and method; then the same weights.

Only bytes and tensors are sent, never pickled objects.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.core.collectives.exchange import Lane, all_gather_flat, issue
from thinwire.core.collectives.socket_stream import memory_of, shares_memory
from thinwire.core.program import Collective, Scope, Topology
from thinwire.core.program.ops import Broadcast

_CHUNK_BYTES = 16 << 20
_COMPARED_BYTES = 1 << 20  # sending less than this is faster than comparing it
_DIGEST_BYTES = 16
_SHORT_BYTES = 248


def gather_bytes(message: bytes, lane: Lane, device: torch.device) -> list[bytes]:
    """Return every rank's message, in one collective if all are short: at the start each costs a round trip or two."""

    def gathered(row: bytes) -> list[bytes]:
        mine = torch.frombuffer(bytearray(row), dtype=torch.uint8).to(device)
        everyone = torch.empty(lane.size * len(row), dtype=torch.uint8, device=device)
        all_gather_flat(everyone, mine, group=lane.group)
        return [bytes(one) for one in everyone.cpu().view(lane.size, len(row)).tolist()]

    heads = gathered((len(message).to_bytes(8, "little") + message[:_SHORT_BYTES]).ljust(8 + _SHORT_BYTES, b"\0"))
    counts = [int.from_bytes(head[:8], "little") for head in heads]
    rest = max(counts) - _SHORT_BYTES
    rests = gathered(message[_SHORT_BYTES:].ljust(rest, b"\0")) if rest > 0 else [b""] * lane.size
    return [(head[8:] + more)[:count] for head, more, count in zip(heads, rests, counts)]


def deepest_of_all(depth: Mapping[Scope, int], gather: Callable[[bytes], list[bytes]]) -> dict[Scope, int]:
    """Return, for each scope, the most exchanges that any rank's program has; a machine's first rank has more."""
    rows = gather(bytes(depth.get(scope, 0) for scope in Scope))
    most = {scope: max(row[i] for row in rows) for i, scope in enumerate(Scope)}
    return {scope: count for scope, count in most.items() if count}


class Disagreement(ValueError): ...


def agree(facts: dict[str, Any], lane: Lane, device: torch.device) -> None:
    """Raise ``Disagreement`` on all ranks, naming the difference, unless all ranks have the same facts."""
    text = json.dumps(facts, sort_keys=True, default=str)
    digest = hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()
    digests = gather_bytes(digest, lane, device)
    if len(set(digests)) == 1:
        return
    everyone = [json.loads(raw) for raw in gather_bytes(text.encode(), lane, device)]
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            raise Disagreement(f"rank {rank} differs from rank 0: {difference(everyone[0], other)}")


def difference(ours: Any, theirs: Any, path: str = "") -> str:
    """Return the first place where two plain structures differ, in words."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in [*ours, *(k for k in theirs if k not in ours)]:
            if key not in ours or key not in theirs:
                return f"{path}{key} is only on {'rank 0' if key in ours else 'the other rank'}"
            if ours[key] != theirs[key]:
                return difference(ours[key], theirs[key], f"{path}{key}: ")
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, (a, b) in enumerate(zip(ours, theirs)):
            if a != b:
                return difference(a, b, f"{path}[{index}] ")
    if isinstance(ours, list) and isinstance(theirs, list):
        return f"{path}{len(ours)} entries against {len(theirs)}"
    return f"{path}{_short(ours)} against {_short(theirs)}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def broadcast_tensors(tensors: Iterable[Tensor], lane: Lane, source: int = 0) -> None:
    """Overwrite tensors with the source rank's, in chunks; on CPUs, chunks whose digests are equal are not sent."""
    chunks = list(_chunks(tensors))
    on_cpu = all(x.device.type == "cpu" for chunk in chunks for x in chunk)
    if on_cpu and sum(x.nbytes for chunk in chunks for x in chunk) >= _COMPARED_BYTES:
        mine = b"".join(_digest(chunk) for chunk in chunks)
        everyone = gather_bytes(mine, lane, torch.device("cpu"))
        cuts = range(0, len(mine), _DIGEST_BYTES)
        chunks = [c for c, k in zip(chunks, cuts) if len({row[k : k + _DIGEST_BYTES] for row in everyone}) > 1]
    for chunk in chunks:
        broadcast_chunk(chunk, lane, source)


def _chunks(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    chunk: list[Tensor] = []
    size = 0
    for x in tensors:
        if x.numel() == 0:
            continue
        same = not chunk or (chunk[0].dtype == x.dtype and chunk[0].device == x.device)
        if chunk and (not same or size >= _CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(x)
        size += x.nbytes
    if chunk:
        yield chunk


def _digest(chunk: Sequence[Tensor]) -> bytes:
    found = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for x in chunk:
        found.update(memory_of(x.detach().contiguous()))
    return found.digest()


def broadcast_chunk(chunk: Sequence[Tensor], lane: Lane, source: int) -> None:
    with torch.no_grad():  # as bytes: Gloo does not know every dtype
        flat = torch.cat([bytes_of(x) for x in chunk])
        issue(Broadcast(flat, source=source), lane).wait()
        if lane.rank != source:
            for x, piece in zip(chunk, flat.split([x.nbytes for x in chunk])):
                put_bytes(x, piece)


def bytes_of(x: Tensor) -> Tensor:
    return x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def put_bytes(x: Tensor, piece: Tensor, *, quietly: bool = False) -> None:
    """Overwrite a tensor with bytes of its shape and dtype; ``quietly``: autograd is not to see it."""
    aligned = piece if piece.storage_offset() % x.element_size() == 0 else piece.clone()
    value = aligned.view(x.dtype).view(x.shape)
    if shares_memory(x):
        x.data = value.clone()
    elif quietly:
        x.data.copy_(value)
    else:
        x.detach().copy_(value)


class OrderCheck:
    """Records every op per lane, for debugging; the order between lanes is free."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._lanes: dict[str, Any] = {}

    def note(self, op: Collective, scope: Scope, round_: int, bucket: int) -> None:
        lane = self._lanes.setdefault(f"{scope.value}/{round_}", hashlib.blake2b(digest_size=8))
        lane.update(f"{bucket}/{type(op).__name__}/{op.tensor.numel()};".encode())

    def check(self, gather: Callable[[bytes], list[bytes]], step: int) -> None:
        mine = {name: digest.hexdigest() for name, digest in sorted(self._lanes.items())}
        everyone = gather(json.dumps(mine).encode())
        if len(set(everyone)) == 1:
            return
        lanes = [json.loads(text) for text in everyone]
        for rank, issued in enumerate(lanes):  # only the ranks of a lane must agree: a node's leader may issue more
            for name in issued:
                members = self._topology.members(Scope(name.split("/")[0]), rank)
                if len({lanes[other].get(name) for other in members}) > 1:
                    raise RuntimeError(f"the ranks have issued different collectives by step {step}")
