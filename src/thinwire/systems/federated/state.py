"""What clients keep between rounds: any number of states on disk, and in memory as many as the budget allows.

A state is written under (client, round). Until the round is committed, ``get`` returns the previous version, so a round
that failed or was interrupted reads the same states when it is repeated. An array of round numbers says which versions
are valid, and it is part of the checkpoint, so server and clients are restored together.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.core.checks import check_count, local_path
from thinwire.core.durable import flush, write_whole

StateDict = Mapping[str, Tensor]
Versions = NDArray[np.int32]
PAGE = 512
_ENTRY = 1024  # bytes for the record of an entry, here and in its user
_NONE = -1
_FOLDERS = 256
_NAME = re.compile(r"(\.partial-\d+-)?(\d+)\.(\d+)\.safetensors")


class StateUnavailable(RuntimeError):
    """A client has a state, but its file cannot be read."""


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ValueError(
            "client states and checkpoints are stored with safetensors: pip install 'thinwire[federated]'"
        ) from error
    return safetensors.torch


def pack(tensors: Mapping[str, Tensor]) -> bytes:
    kept = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}
    packed: bytes = _safetensors().save(kept)
    return packed


def unpack(data: bytes) -> dict[str, Tensor]:
    found: dict[str, Tensor] = _safetensors().load(data)
    return found


@dataclass(frozen=True)
class Stored:
    pages: NDArray[np.int32]
    length: int

    @property
    def cost(self) -> int:
        return len(self.pages) * PAGE + _ENTRY


class Pages:
    """A block of memory cut into pages; a byte string may use any of them, and only used ones take memory.

    Separate tensors took up to 1.6 times their bytes: memory that one thread allocates and another frees leaves holes.
    """

    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes, self.used = memory_bytes, 0
        self._memory = np.empty((memory_bytes // PAGE, PAGE), dtype=np.uint8)
        self._free: list[int] = []
        self._touched = 0

    def room_for(self, length: int) -> bool:
        return self.used + -(-length // PAGE) * PAGE + _ENTRY <= self.memory_bytes

    def put(self, data: bytes) -> Stored:
        """Store a copy, for which there is room."""
        count = -(-len(data) // PAGE)
        reused = min(count, len(self._free))
        taken = [self._free.pop() for _ in range(reused)]
        taken.extend(range(self._touched, self._touched + count - reused))
        self._touched += count - reused
        stored = Stored(np.array(taken, dtype=np.int32), len(data))
        content = np.frombuffer(data.ljust(count * PAGE, b"\0"), dtype=np.uint8)
        self._memory[stored.pages] = content.reshape(count, PAGE)
        self.used += stored.cost
        return stored

    def get(self, stored: Stored) -> bytes:
        return self._memory[stored.pages].tobytes()[: stored.length]

    def free(self, stored: Stored) -> None:
        self._free.extend(stored.pages.tolist())
        self.used -= stored.cost


class ClientStateStore(AbstractContextManager["ClientStateStore"]):
    """The states of a population.

    Args:
        population: number of clients; each takes 4 bytes in memory and in every checkpoint.
        folder: for the files; shared by all ranks. None: a temporary folder, which is removed at the end.
        memory_bytes: limit for states in memory, including the record of each; the least recently used states are
            written and dropped. 0: no state is kept in memory.
        write_through: every state is written when its round is committed (several ranks, checkpoints); otherwise only
            states that do not fit in memory.

    Attributes:
        memory_peak: the highest value of ``memory_used`` so far.
        reads, writes: files read and written.
    """

    def __init__(
        self,
        population: int,
        folder: str | os.PathLike[str] | None = None,
        memory_bytes: int = 1 << 30,
        *,
        write_through: bool = False,
    ) -> None:
        self.population = check_count("population", population)
        self.memory_bytes, self.write_through = check_count("memory_bytes", memory_bytes, 0), write_through
        self._given = None if folder is None else local_path(folder)
        self._folder: Path | None = None
        self.versions: Versions = np.full(population, _NONE, dtype=np.int32)
        self._durable: Versions | None = None
        self._entries: OrderedDict[tuple[int, int], Stored] = OrderedDict()
        self._unwritten: set[tuple[int, int]] = set()  # entries that are only in memory
        self._pending: dict[int, int] = {}
        self._replaced: list[tuple[int, int]] = []  # superseded, but the last durable version needs them
        self._unflushed: set[Path] = set()
        self._coming: dict[tuple[int, int], Future[bytes]] = {}
        self._reader: ThreadPoolExecutor | None = None
        self._memory = Pages(memory_bytes)
        self.memory_peak = self.reads = self.writes = 0

    @property
    def memory_used(self) -> int:
        """Bytes that states in memory take now."""
        return self._memory.used

    @property
    def temporary(self) -> bool:
        """Whether the files are removed together with this object."""
        return self._given is None

    @property
    def folder(self) -> Path:
        """The folder of the files; created when first needed."""
        if self._folder is None:
            if self._given is None:
                self._folder = Path(tempfile.mkdtemp(prefix="thinwire-states-"))
                weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            else:
                self._folder = self._given
                self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder

    def path(self, client: int, version: int) -> Path:
        """Return the file of one version of one client's state."""
        return self.folder / f"{client % _FOLDERS:02x}" / f"{client}.{version}.safetensors"

    def get(self, client: int) -> StateDict | None:
        """Return a client's state as of the last committed round; None: it has none. Must not be modified.

        Raises:
            ValueError: there is no such client.
            StateUnavailable: its file is missing or damaged.
        """
        self._check(client)
        version = int(self.versions[client])
        if version == _NONE:
            return None
        key = (client, version)
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
            return unpack(self._memory.get(entry))
        coming = self._coming.pop(key, None)
        try:
            packed = self.path(*key).read_bytes() if coming is None else coming.result()
            state = unpack(packed)
        except Exception as error:
            raise StateUnavailable(
                f"client {client} has a state of round {version}, and {self.path(*key)} cannot be read: {error}"
            ) from error
        self.reads += 1
        self._keep(key, packed, on_disk=True)
        return state

    def prefetch(self, client: int) -> None:
        """Begin to read a client's state in another thread."""
        key = (client, int(self.versions[client]))
        if key[1] == _NONE or key in self._entries or key in self._coming:
            return
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="thinwire-states")
        self._coming[key] = self._reader.submit(self.path(*key).read_bytes)

    def _check(self, client: int) -> None:
        if not 0 <= client < self.population:
            raise ValueError(f"client {client} is not one of the {self.population} clients, 0 to {self.population - 1}")

    def put(self, client: int, state: StateDict, round: int) -> None:
        """Store a client's new state; ``get`` returns it once the round is committed.

        Raises:
            ValueError: there is no such client, or the round was committed already.
        """
        self._check(client)
        if round <= int(self.versions[client]):
            raise ValueError(f"client {client} has a state of round {self.versions[client]}, later than {round}")
        packed = pack(state)
        self._pending[client] = round
        self._drop((client, round))
        self._keep((client, round), packed, on_disk=False)

    def withdraw(self, clients: Iterable[int]) -> None:
        """Discard what was put for these clients since the last commit, because they are trained again elsewhere."""
        for client in clients:
            round = self._pending.pop(client, None)
            if round is not None:
                self._drop((client, round))
                self._remove((client, round))

    def prepare(self) -> list[int]:
        """First half of a commit: with ``write_through``, write all new states to disk. Return their clients.

        With several ranks each prepares, all exchange their clients, and each commits all of them.
        """
        if self.write_through:
            for key in self._pending.items():
                self._write_out(key)
        return sorted(self._pending)

    def commit(self, round: int, clients: Iterable[int] | None = None) -> None:
        """Make the new states valid.

        Args:
            round: of the new states.
            clients: all that have a new state, on other ranks too; None: those of this store.
        """
        mine = set(self._pending)
        for client in mine if clients is None else clients:
            old = (client, int(self.versions[client]))
            self.versions[client] = round
            self._drop(old)
            if client in mine and old[1] != _NONE:
                if self._durable is not None and int(self._durable[client]) == old[1]:
                    self._replaced.append(old)  # the checkpoint on disk still points to it
                else:
                    self._remove(old)
        self._pending.clear()

    def flush(self) -> None:
        """Write all committed states of this store to disk, so that they survive a loss of power."""
        for key in list(self._unwritten):
            if self._pending.get(key[0]) != key[1]:  # not yet committed; an older state of the same client is
                self._write_out(key)
        if self._unflushed:
            folders = {path.parent for path in self._unflushed}
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(flush, filter(Path.exists, self._unflushed)))  # another rank may have removed one
                list(pool.map(flush, folders))
            self._unflushed.clear()

    def durable(self) -> None:
        """Note that a checkpoint with the current ``versions`` is on disk; remove what only the previous one needed."""
        self._durable = self.versions.copy()
        for key in self._replaced:
            self._remove(key)
        self._replaced.clear()

    def begin(self, versions: Tensor | None, *, durable: bool, clean: bool) -> None:
        """Begin a run.

        Args:
            versions: those of a checkpoint; None: no client has a state.
            durable: whether there will be checkpoints, for which superseded files are kept.
            clean: delete the files of other versions, left by an interrupted run or another run.
        """
        if versions is None:
            versions = torch.full((self.population,), _NONE, dtype=torch.int32)
        self.versions = versions.to(torch.int32).numpy().copy()
        self._durable = self.versions.copy() if durable else None
        for key in list(self._entries):
            self._drop(key)
        self._pending.clear()
        self._replaced.clear()
        self._unflushed.clear()
        self._coming.clear()
        if clean and (self._folder is not None or self._given is not None):
            for path in self.folder.glob("[0-9a-f][0-9a-f]/*"):
                found = _NAME.fullmatch(path.name)
                if found is None:
                    continue  # not ours
                client = int(found[2])
                whole = found[1] is None and client < self.population
                if not whole or int(self.versions[client]) != int(found[3]):
                    path.unlink()

    def close(self) -> None:
        """Stop the reading thread."""
        if self._reader is not None:
            self._reader.shutdown(cancel_futures=True)
            self._reader = None

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _keep(self, key: tuple[int, int], packed: bytes, *, on_disk: bool) -> None:
        while self._entries and not self._memory.room_for(len(packed)):
            oldest = next(iter(self._entries))
            self._write_out(oldest)
            self._drop(oldest)
        if self._memory.room_for(len(packed)):
            self._entries[key] = self._memory.put(packed)
            self._unwritten.update([] if on_disk else [key])
            self.memory_peak = max(self.memory_peak, self.memory_used)
        elif not on_disk:
            self._write(key, packed)

    def _drop(self, key: tuple[int, int]) -> None:
        self._unwritten.discard(key)
        if key in self._entries:
            self._memory.free(self._entries.pop(key))

    def _write_out(self, key: tuple[int, int]) -> None:
        if key in self._unwritten:
            self._write(key, self._memory.get(self._entries[key]))
            self._unwritten.discard(key)

    def _write(self, key: tuple[int, int], packed: bytes) -> None:
        path = self.path(*key)
        path.parent.mkdir(exist_ok=True)
        write_whole(path, packed, synced=False, shared=True)
        if self._durable is not None:  # only checkpoints need more than the page cache
            self._unflushed.add(path)
        self.writes += 1

    def _remove(self, key: tuple[int, int]) -> None:
        if self._folder is None:
            return
        path = self.path(*key)
        self._unflushed.discard(path)
        path.unlink(missing_ok=True)
