"""Checkpoints that survive a kill, a full disk and another number of ranks.

A checkpoint is a directory ``step-<n>``. It contains ``model.pt`` (model, optimizer, step; from rank 0, equal on all),
``rank-<r>.pt`` with each rank's residuals, and ``files.json`` with the checksums of these files. Under local steps each
rank has its own model and optimizer: its file contains both, and ``model.pt`` contains the outer weights with rank 0's
optimizer. If only some parameters or buffers are each rank's own (``private``), its file contains these, and with
parameters the whole optimizer. A checkpoint is written under another name, flushed to disk, and renamed when all ranks
have finished, so a directory called ``step-<n>`` is always complete. Files are read with ``weights_only=True``.

An error on one rank is reported to all ranks: they leave ``save`` and ``load`` together, with or without an exception.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import math
import operator
import os
import platform
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.core.durable import CheckpointDirectory, digest_of, read_file, write_file
from thinwire.core.program.ops import in_own_modes
from thinwire.engine.parameters import private
from thinwire.engine.services import CheckedState, Handle, fitting

_MODEL, _SUMS = "model.pt", "files.json"
_QUOTED = 3  # the most ranks to quote
_BUSY = (errno.EACCES, errno.EAGAIN)
_MOST = 4096  # largest note in a lock, in bytes
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
log = logging.getLogger("thinwire")
__all__ = ["complete", "load", "save"]


def save(
    checkpoint_dir: str | Path,
    model: nn.Module,
    optimizer: Optimizers,
    sync: Handle,
    step: int,
    *,
    keep: int = 2,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint. All ranks must call it, on a file system that they share.

    From the first checkpoint on, the directory belongs to this job, until ``sync.close()`` or the end of rank 0's
    process: another job that saves there is refused.

    Args:
        checkpoint_dir: directory for the checkpoints; made if needed.
        optimizer: what ``attach`` was given: one, a list of several, or None.
        step: the user's step; part of the name.
        keep: how many to keep; older ones are removed, and those of later steps are left alone. 0: all.
        extra: more of this rank's to save, by name: what has ``state_dict`` and ``load_state_dict``, such as a
            scheduler or a sampler, and plain values: numbers, texts, tensors, lists and dicts of these.

    Returns:
        The checkpoint's directory.

    Raises:
        OSError: on all ranks, if one of them could not write, or another job writes there. Nothing is left of this
            checkpoint, earlier ones are complete, and training can continue.
        ValueError: ``step`` or ``keep`` is not a whole number of at least 0; or on all ranks, if the state of one has
            an object that ``load`` would refuse to read (NumPy's numbers become Python's). The message names its key.
    """
    _check_handle(sync)
    optimizers = _listed(optimizer)
    step, keep = _count("step", step), _count("keep", keep)
    directory = _directory(checkpoint_dir, keep)
    partial = directory.partial(step)

    def refuse(problem: str, misfit: bool) -> Exception:
        if sync.services.rank == 0:
            directory.abort(step)
        return (ValueError if misfit else OSError)(f"no checkpoint was written at {directory.path(step)}: {problem}")

    with together(sync, refuse, "save()"):  # no rank writes before the directory exists
        if sync.services.rank == 0:
            _found(directory)
            directory.folder.mkdir(parents=True, exist_ok=True)
            if handle := hold(sync, directory.folder):
                sync.services.handles.append(handle)
            directory.begin(step)
    with together(sync, refuse) as sums:
        name = _rank_name(sync.services.rank)
        mine: dict[str, Any] = sync.state_dict()
        weights, own = model.state_dict(), private(model, buffers=sync.services.own_buffers)
        mine["private"] = sorted(own)
        mine["extra"] = {key: x.state_dict() if _loads(x) else x for key, x in (extra or {}).items()}
        if sync.services.apart:
            mine |= {"model": weights, "optimizer": _states(optimizers)}
        elif mine["private"]:
            mine["model"] = {name: weights[name] for name in mine["private"]}
            if any(isinstance(x, nn.Parameter) for x in own.values()):
                mine["optimizer"] = _states(optimizers)
        sums.append({name: write_file(partial / name, mine)})
        if sync.services.rank == 0:
            with getattr(sync, "outer_weights", contextlib.nullcontext)():
                content = {"model": model.state_dict(), "optimizer": _states(optimizers), "step": step}
                content["private"] = mine["private"]
                sums.append({_MODEL: write_file(partial / _MODEL, content)})
    with together(sync, refuse):
        if sync.services.rank == 0:
            before = [order for order in map(_order, _found(directory).values()) if order < math.inf]
            about: dict[str, Any] = {"world_size": len(sums), "order": 1 + max(before, default=0)}
            about["blake2b"] = {name: digest for theirs in sums for one in theirs for name, digest in one.items()}
            write_file(partial / _SUMS, json.dumps(about))
            directory.finish(step)
    return directory.path(step)


@in_own_modes()
def load(
    checkpoint_dir: str | Path,
    model: nn.Module,
    optimizer: Optimizers,
    sync: Handle,
    step: int | None = None,
    *,
    extra: MutableMapping[str, Any] | None = None,
) -> int | None:
    """Load the complete checkpoint that was written last, or that of ``step``. All ranks must call it.

    That is the newest step, unless training has gone on from an older one since: then the log ``thinwire`` says so.

    On the number of ranks it was saved from, training continues bit for bit. On another number, every rank gets the
    mean of the old residuals, which keeps the update still owed to the model. A single rank keeps it without applying
    it, until there are several ranks again: see ``GradientSync.load_state_dict``. Under local steps, another number of
    ranks starts from the outer weights, with rank 0's optimizer: see ``LocalSync.load_state_dict``. What each rank
    keeps to itself (``ignore=``, buffers under ``broadcast_buffers=False``) is each rank's own again, so it needs the
    same number of ranks.

    If it is damaged (a file is missing, truncated, or has changed since), all ranks go back to the one
    before it, and the log ``thinwire`` gets a warning that says what is wrong.

    Args:
        extra: what to load of what ``save`` was given there, by name: what has ``load_state_dict`` loads its state, and
            another entry of the dict becomes the value. On another number of ranks, rank 0's are loaded.

    Returns:
        The step it was saved at; None if there is none.

    Raises:
        FileNotFoundError: ``step`` was given and has no checkpoint.
        NotADirectoryError: ``checkpoint_dir`` is not a directory.
        ValueError: it does not fit this model or method, or all are damaged (or that of ``step``, if given). Model,
            optimizer and ``sync`` are then unchanged.
    """
    _check_handle(sync)
    optimizers = _listed(optimizer)
    if step is not None:
        step = _count("step", step)
    wanted = _agreed(_directory(checkpoint_dir), sync, step)
    damaged: list[str] = []
    for path in reversed(wanted):
        try:
            with together(sync):
                content, state, misfit = _read(path, sync)
        except ValueError as error:
            damaged.append(f"{path} cannot be loaded: {error}")
            continue
        with together(sync):
            if misfit:
                raise ValueError(misfit)
            found = fitting(sync, state)
        also = partial(_load_extra, extra or {}, state.get("extra", {}))
        take_over(path, content, model, optimizers, sync, found, also)
        if damaged:
            log.warning("thinwire: %s; continuing from %s", "; ".join(damaged), path)
        return int(content["step"])
    if damaged:
        raise ValueError(f"{checkpoint_dir} holds no complete checkpoint: {'; '.join(damaged)}")
    return None


def complete(checkpoint_dir: str | Path) -> list[Path]:
    """Return the complete checkpoints in a directory, in the order in which they were written.

    Raises:
        NotADirectoryError: it is not a directory.
    """
    return sorted(_found(_directory(checkpoint_dir)).values(), key=_order)


def _check_handle(sync: Any) -> None:
    if not isinstance(sync, Handle):
        raise TypeError(f"a checkpoint is made from what thinwire.attach returned, not from a {type(sync).__name__}")


def _loads(one: Any) -> bool:
    return hasattr(one, "state_dict") and hasattr(one, "load_state_dict")


def _listed(optimizer: Any) -> list[Any]:
    """Return the optimizers; a wrapper that is not torch's will do if its state can be saved."""
    found = list(optimizer) if isinstance(optimizer, (list, tuple)) else [] if optimizer is None else [optimizer]
    for one in found:
        if not _loads(one):
            raise TypeError(f"a checkpoint takes the optimizer, a list of them, or None, not a {type(one).__name__}")
    return found


def _states(optimizers: Sequence[torch.optim.Optimizer]) -> Any:
    states = [optimizer.state_dict() for optimizer in optimizers]
    return states[0] if len(states) == 1 else states


def _directory(checkpoint_dir: str | Path, keep: int = 0) -> CheckpointDirectory:
    return CheckpointDirectory(checkpoint_dir, "step", keep, holds=_MODEL)


def _found(directory: CheckpointDirectory) -> dict[int, Path]:
    if directory.folder.exists() and not directory.folder.is_dir():
        raise NotADirectoryError(f"{directory.folder} is not a directory: checkpoints are kept in one")
    return directory.found()


def _order(path: Path) -> float:
    """Return a number that is greater than those of the checkpoints that were there before."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        return float(json.loads((path / _SUMS).read_bytes()).get("order", 0))
    return math.inf  # whatever it was, reading it says that it is damaged


@contextlib.contextmanager
def together(
    sync: Handle, refuse: Callable[[str, bool], Exception] = lambda problem, _: ValueError(problem), call: str = ""
) -> Iterator[list[Any]]:
    """A part that ends the same way on all ranks. What is put into its list, plain data, is everyone's afterwards.

    ``refuse``: returns what to raise for a problem, and whether it is a ``ValueError`` on some rank. ``call``: of the
    user's, which begins with this part.
    """
    told, failed = list[Any](), None
    try:
        yield told
    except Exception as error:
        failed = error
    rows = tell(sync, ["" if failed is None else words(failed), told, isinstance(failed, ValueError)], call)
    told[:] = [row[1] for row in rows]
    if problem := quoted(row[0] for row in rows):
        raise refuse(problem, any(row[2] for row in rows)) from failed


def tell(sync: Handle, mine: Any, call: str = "") -> list[Any]:
    """Return the plain data of each rank, by rank; of sharded models, of all ranks of all sites."""
    number = sync.services.rank if sync.services.site is None else dist.get_rank()
    rows = [json.loads(row) for row in sync.services.gather_everywhere(json.dumps([number, mine]).encode(), call)]
    return [theirs for _, theirs in sorted(rows, key=operator.itemgetter(0))]


def quoted(problems: Iterable[str]) -> str:
    """Return every rank's problem, with its number; "" if there is none."""
    said = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem]
    more = [f"and {len(said) - _QUOTED} more ranks"] if len(said) > _QUOTED else []
    return "; ".join(said[:_QUOTED] + more)


def words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    return " ".join(str(error).split()) or type(error).__name__


def _count(name: str, value: Any) -> int:
    try:
        found = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = -1
    if found < 0:
        raise ValueError(f"{name}={value!r} must be a whole number of at least 0")
    return found


def _rank_name(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


def _agreed(directory: CheckpointDirectory, sync: Handle, step: int | None) -> list[Path]:
    """Return the checkpoints that rank 0 sees, that written last at the end; only that of ``step``, if given."""
    with together(sync, lambda problem, _: NotADirectoryError(problem), "load()") as rows:
        found = {number: path for number, path in _found(directory).items() if step in (None, number)}
        rows += [found[number].name for number in sorted(found, key=lambda number: _order(found[number]))]
        if rows and rows[-1] != found[max(found)].name and sync.services.rank == 0:
            log.warning("thinwire: %s counts, which was written last, and not the later %s", rows[-1], max(found))
    names = rows[0]
    if not names:
        others = [(rank, row[-1]) for rank, row in enumerate(rows) if row]
        if others:
            raise ValueError(
                f"rank {others[0][0]} finds {others[0][1]} in {directory.folder}, but rank 0 does not: checkpoints "
                "belong in a directory that all ranks share"
            )
        if step is not None:
            raise FileNotFoundError(f"{directory.folder} holds no complete checkpoint of step {step}")
    return [directory.folder / name for name in names]


def _read(path: Path, sync: Handle) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return the model's part, the state for this rank (on another number of ranks that of all), and why not to load.

    That is what each rank has kept to itself, if there is another number of ranks.
    """
    sums = _sums(path)
    content = _checked(path / _MODEL, sums)
    own = path / _rank_name(sync.services.rank)
    first = own if own.exists() else path / _rank_name(0)
    state = _checked(first, sums)
    size = int(state["world_size"])
    if size == sync.services.topology.world_size:
        mine = state if first == own else _checked(own, sums)  # the second raises: the file is missing
        services, weights = sync.services, content["model"]
        here, apart = private(services.model, buffers=services.own_buffers), services.apart
        for name in {*content.get("private", ())}.difference(mine.get("private", ())):
            del weights[name]  # only rank 0 has it
        weights.update({name: x for name, x in mine.get("model", {}).items() if apart or name in here})
        return content | {key: mine[key] for key in ("optimizer",) if key in mine and (apart or here)}, mine, ""
    parts, blank = [], torch.empty(0)
    for rank in range(size):
        other = path / _rank_name(rank)
        one = state if other == first else _checked(other, sums)
        parts.append({name: one["model"][name] for name in one.get("private", ())})
        state = {**one, **state}
    names = {name for one in parts for name in one}
    differ = [n for n in sorted(names) if any(not torch.equal(x.get(n, blank), parts[0].get(n, blank)) for x in parts)]
    why = f"{path} has of each of {size} ranks its own {', '.join(differ[:_QUOTED])}: load it on as many ranks"
    return content, state, why if differ else ""


def _sums(path: Path) -> dict[str, str]:
    file = path / _SUMS
    try:
        return dict(json.loads(file.read_bytes())["blake2b"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file} is damaged") from error


def _checked(file: Path, sums: dict[str, str]) -> dict[str, Any]:
    if file.exists() and digest_of(file) != sums.get(file.name):
        raise ValueError(f"{file} is not as it was saved: its checksum differs")
    content: dict[str, Any] = read_file(file)
    return content


def take_over(
    path: Path,
    content: dict[str, Any],
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    sync: Handle,
    found: CheckedState,
    also: Callable[[list[Callable[[], Any]]], None] = lambda undo: None,
) -> None:
    """Load into model, optimizer and sync, on all ranks; or change nothing, if it does not fit on one of them.

    ``also`` loads more, and puts what undoes it into a list.
    """
    undo: list[Callable[[], Any]] = []

    def refuse(problem: str, _: bool) -> Exception:
        for back in reversed(undo):
            back()
        return ValueError(f"{path} does not fit: {problem}")

    with together(sync, refuse):
        weights = {name: _kept(x) for name, x in model.state_dict().items()}
        undo.append(lambda: model.load_state_dict(weights))
        model.load_state_dict(content["model"])
        moments = content["optimizer"] if isinstance(content["optimizer"], list) else [content["optimizer"]]
        if len(moments) != len(optimizers):
            raise ValueError(f"it holds the state of {len(moments)} optimizers, and {len(optimizers)} are here")
        for optimizer, saved in zip(optimizers, moments):
            undo.append(partial(optimizer.load_state_dict, optimizer.state_dict()))
            optimizer.load_state_dict(saved)
        also(undo)
    with together(sync, refuse):  # all or none: on sharded models, ranks agree in it
        undo.append(found.restore())
    found.adopt()


def _load_extra(extra: MutableMapping[str, Any], saved: Mapping[str, Any], undo: list[Callable[[], Any]]) -> None:
    for key, one in extra.items():
        if key not in saved:
            raise ValueError(f"it was saved without extra {key!r}; it has {', '.join(saved) or 'none'}")
        if _loads(one):
            undo.append(partial(one.load_state_dict, one.state_dict()))
            one.load_state_dict(saved[key])
        else:
            undo.append(partial(extra.__setitem__, key, one))
            extra[key] = saved[key]


def _kept(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


class Claim:
    """This process's claim on a directory: only one job at a time may save there, and another one is told which it is.

    Rank 0 holds a POSIX lock on the directory's ``.lock``, and has written there which job it is. The kernel releases
    the lock when the process ends in any way; an NFS server does so when the machine is gone (NFSv4: after its lease,
    90 s by default). So a dead job does not keep out a job that is started again, here or elsewhere. If the file system
    has no locks, the job that came last gets the directory, and the one before is refused at its next checkpoint.

    POSIX locks belong to a process and are not inherited by ``fork``: a DataLoader's workers do not keep a dead job's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.users: set[int] = set()
        self._path = folder / ".lock"
        self._file = -1
        self._note: bytes | None = None

    def renew(self) -> None:
        """Take the lock, or check that no other job has it by now."""
        if self._file >= 0 and not self._same():
            self.close()
        if self._file < 0:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _BUSY:
                raise OSError(self._taken()) from error
        found = os.pread(self._file, _MOST, 0)
        if found and found == self._note:
            return
        if found and self._note is not None:
            raise OSError(self._taken())
        who = {"host": platform.node(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        note = json.dumps({**who, "number": os.urandom(8).hex()}).encode()
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, note, 0)
        self._note = note

    def _same(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file))
        except FileNotFoundError:
            return False

    def _taken(self) -> str:
        try:
            note = json.loads(os.pread(self._file, _MOST, 0))
            who = f"process {int(note['pid'])} on {note['host']!r}, since {note['since']!r}"
        except (OSError, ValueError, TypeError, KeyError):
            who = "it left no name"
        return (
            f"another job writes checkpoints in {self.folder} ({who}): give this one its own directory, or end the "
            f"other one; if it is dead, remove {self._path}"
        )

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


_held: dict[tuple[int, str], Claim] = {}  # by process ID, because a fork holds no locks, and by real path


class Hold:
    """One user's share of its process's claim; ``remove`` gives it back, and so does the end of the user."""

    def __init__(self, user: Any, key: tuple[int, str]) -> None:
        _held[key].users.add(id(user))
        self._end = weakref.finalize(user, _leave, key, id(user))
        self._end.atexit = False

    def remove(self) -> None:
        self._end()


def hold(user: Any, folder: Path) -> Hold | None:
    """Claim a folder for this process, as long as the user lives. Return what gives it back; None: the user has one."""
    key = os.getpid(), os.path.realpath(folder)
    claim = _held.get(key) or Claim(folder)
    try:
        claim.renew()
    except BaseException:
        if key not in _held:
            claim.close()
        raise
    _held[key] = claim
    return None if id(user) in claim.users else Hold(user, key)


def _leave(key: tuple[int, str], user: int) -> None:
    claim = _held.get(key)
    if claim is not None:
        claim.users.discard(user)
        if not claim.users:
            _held.pop(key).close()
