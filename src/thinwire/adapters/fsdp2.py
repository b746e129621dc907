"""FSDP2: compress the exchange between replicas (HSDP) or between shards, with one line.

In HSDP, a model is sharded over the ranks of a machine and replicated over the machines: gradients are reduce-scattered
inside a machine, and the result on each rank is averaged over the replicas, on the slow network. :func:`attach` does
this second exchange with a thinwire method, through FSDP2's all-reduce hook. :func:`attach_reduce_scatter` replaces the
first one, in 16 or 8 bits, for shards that are themselves connected by a slow network.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from datetime import timedelta
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire.adapters.fsdp2_groups import Group, across, groups_of
from thinwire.adapters.fsdp2_replicas import ReplicaSync
from thinwire.adapters.fsdp2_sites import SiteSync, attach_sites
from thinwire.core.methods import two_step
from thinwire.core.methods.cast import Cast
from thinwire.core.methods.registry import classes, resolve
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.program import Method, ReduceScatter, Topology, working_dtype
from thinwire.core.program.ops import in_own_modes
from thinwire.engine.attach import checked_timeout, listed
from thinwire.engine.backward_hooks import AttachSettings
from thinwire.engine.executors.events import Failure
from thinwire.engine.local.settings import Local, named_local
from thinwire.engine.ranks.communicator import Communicator
from thinwire.engine.services import Closing
from thinwire.engine.stats import Stats

_OF_SITES = ("timeout", "start_compression_step", "broadcast_buffers", "detect_desync", "keep_dense")


def works() -> tuple[str, ...]:
    """Return the registered methods that :func:`attach` accepts; none of them is decoupled."""
    return tuple(name for name, cls in classes().items() if "fsdp2" not in cls.unfit and not cls.decoupled)


@overload
def attach(model: nn.Module, /, method: Method | str = "ssgd", **options: Any) -> ReplicaSync: ...


@overload
def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    method: Local | str,
    /,
    **options: Any,
) -> SiteSync: ...


@in_own_modes()
def attach(
    model: nn.Module, /, *given: Any, sites: DeviceMesh | dist.ProcessGroup | None = None, **options: Any
) -> Any:
    """Average an FSDP2 model between slow links. All ranks must call it, after ``fully_shard``.

    ``attach(model, method)`` averages gradients over the replicas of HSDP at every step; see below for its options.
    ``attach(model, optimizer, "local" | "diloco" | Local(...), sites=...)`` averages weights between sites every few
    steps; at each site the model is sharded as usual. It takes the options of :class:`thinwire.Local` and of
    :func:`thinwire.attach`.

    Parameters and buffers are copied from the first replica or site.

    Args:
        model: after ``fully_shard``, on a mesh of (replicas, shards); or on a mesh of shards alone, with ``replicas``
            or ``sites``.
        given: a method, that is a name with its ``options``, or an instance, as listed by :func:`works`: one message
            per FSDP2 module, whatever its ``fusion``. Or the optimizer (or a list of them) and local steps.
        sites: the dimension of the mesh between sites, such as ``mesh["site"]``, for local steps.
        options: of the method. Of gradients also: ``replicas``, the other dimension, such as ``mesh["replicate"]``
            (None: that of the model's own mesh); ``scaler``, the GradScaler in use, so that residuals are kept in
            unscaled units; ``start_compression_step``, as in :func:`thinwire.attach`; ``timeout``, seconds (or a
            timedelta) after which a silent rank is an error (None: that of torch's groups).

    Returns:
        A :class:`~thinwire.adapters.fsdp2_replicas.ReplicaSync`, or for local steps a
        :class:`~thinwire.adapters.fsdp2_sites.SiteSync`.

    Raises:
        NotImplementedError: a method or a model that this adapter does not support; the message says what works.
        ValueError: invalid options, no replicas, or ranks that differ.
        RuntimeError: the model has an all-reduce hook already.
    """
    if sites is None:
        if len(given) > 1 or (given and named_local(given[0], {}) is not None):
            raise ValueError(
                'local steps are made between sites: attach(model, optimizer, "local", sites=mesh["site"])'
            )
        return _attach_replicas(model, *given, **options)
    if len(given) != 2:
        raise ValueError('sites= is for local steps: attach(model, optimizer, "local", sites=mesh["site"])')
    optimizer, method = given
    of_settings = {name: options.pop(name) for name in _OF_SITES if name in options}
    of_settings["timeout"] = checked_timeout(of_settings.get("timeout"))
    local = named_local(method, options)
    if local is None:
        raise NotImplementedError(
            f"between sites {method!r} does not work: gradients are averaged by attach(model, method, replicas=...), "
            'weights by "local", "diloco" or Local(...)'
        )
    return attach_sites(model, listed(optimizer), local, sites, AttachSettings(**of_settings))


def _attach_replicas(
    model: nn.Module,
    method: Method | str = "ssgd",
    *,
    replicas: DeviceMesh | dist.ProcessGroup | None = None,
    scaler: Any = None,
    start_compression_step: int | None = None,
    timeout: timedelta | float | None = None,
    **options: Any,
) -> ReplicaSync:
    if isinstance(method, str) and method.lower() == "auto":
        raise NotImplementedError(f'"auto" plans buckets, but FSDP2 makes them here: name one of {", ".join(works())}')
    chosen = resolve(method, **options)
    if chosen.decoupled:
        raise NotImplementedError(
            f"{chosen.name} leaves part of its exchange to the next forward, where FSDP2 gathers parameters; without "
            f"decoupled=True these work between replicas: {', '.join(works())}"
        )
    if why := chosen.unfit.get("fsdp2"):
        raise NotImplementedError(
            f"{chosen.name} needs what FSDP2 does not give ({why}); these work between replicas: {', '.join(works())}"
        )
    groups = groups_of(model)
    for one in groups:
        if one.hooked:
            raise RuntimeError(f"module {one.name!r} already has an all-reduce hook; call close() on what attached it")
    group = _replicas(groups, replicas)
    size = dist.get_world_size(group)
    note, comm = "", None
    if size == 1:
        if not chosen.exact:
            note = f"one replica only: nothing is sent, so nothing is compressed; {chosen.name} runs as ssgd"
        chosen = SSGD()
    else:
        comm = Communicator(group, Topology(size), groups[0].device, checked_timeout(timeout), attaching=True)
    try:
        sync = ReplicaSync(model, groups, chosen, comm, scaler, note, start_compression_step)
    except BaseException as error:
        if comm is not None:
            comm.dismiss(error)
        raise
    if comm is not None:
        comm.attaching = False
    return sync


def attach_reduce_scatter(
    model: nn.Module,
    method: Method | str = "cast",
    *,
    timeout: timedelta | float | None = None,
    **options: Any,
) -> CompressedReduceScatter:
    """Reduce-scatter an FSDP2 model's gradients in 16 or 8 bits. All ranks must call it, after ``fully_shard``.

    Stateless: a residual would be as large as the whole gradient on every rank, which FSDP is meant to avoid.

    Args:
        model: after ``fully_shard``.
        method: ``"cast"`` with ``dtype="bf16"``, ``"fp16"`` or ``"int8"``, or an instance of ``Cast``.
        timeout: seconds (or a timedelta) after which a silent rank is an error; None: that of torch's groups.

    Raises:
        NotImplementedError: another method, or a model that this adapter does not support.
        ValueError: invalid options.
    """
    chosen = resolve(method, **options)
    if not isinstance(chosen, Cast) or chosen.decoupled or not isinstance(chosen.dtype, torch.dtype):
        raise NotImplementedError(
            f"{chosen.name} cannot reduce-scatter: only cast works, with dtype='bf16', 'fp16' or 'int8', because no "
            "residual is kept. Between replicas (HSDP) more methods work, see thinwire.adapters.fsdp2.attach"
        )
    groups = groups_of(model)
    shards = groups[0].shards
    _same(groups, "shards", [dist.get_process_group_ranks(one.shards) for one in groups])
    size = dist.get_world_size(shards)
    comm = None if size == 1 else Communicator(shards, Topology(size), groups[0].device, checked_timeout(timeout))
    return CompressedReduceScatter(groups, chosen, comm)


def _replicas(groups: list[Group], given: DeviceMesh | dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the process group of the ranks that hold the same shard as this one."""
    own = [one.replicas for one in groups]
    _same(groups, "replicas", [dist.get_process_group_ranks(g) if g is not None else None for g in own])
    if given is None:
        if own[0] is None:
            raise ValueError(
                'the model is sharded over a mesh without replicas: give the other dimension, replicas=mesh["'
                'replicate"], or compress what the shards exchange with thinwire.adapters.fsdp2.attach_reduce_scatter'
            )
        return own[0]
    if own[0] is not None:
        raise ValueError("the model's mesh already has replicas: leave out replicas=")
    return across(given, [groups[0].shards], "replicas", "replicate")


def _same(groups: list[Group], what: str, ranks: list[Any]) -> None:
    for one, other in zip(groups, ranks):
        if other != ranks[0]:
            raise ValueError(
                f"module {one.name!r} is on another mesh than {groups[0].name!r} ({what} {other}, not {ranks[0]}); "
                "use one mesh for the whole model"
            )


def scatter_mean(x: Tensor, ranks: int, dtype: torch.dtype, block: int) -> Generator[Any, Tensor, Tensor]:
    """Return this rank's chunk of the average: ``[ranks * k]`` -> ``[k]``; int8: ``block`` elements share a scale."""
    wide, k = x.to(working_dtype(x.dtype)), x.numel() // ranks
    if dtype != torch.int8:
        shard = yield ReduceScatter((wide / ranks).to(dtype))
        return shard.to(wide.dtype)
    code = two_step.Code.of(8, block, x.numel(), ranks)
    padded = wide.new_zeros(ranks, code.chunk)
    padded[:, :k] = wide.view(ranks, k)
    total = yield from two_step.scatter(padded.view(-1), code)
    return total[:k].div_(ranks)


class CompressedReduceScatter(Closing):
    """The handle of :func:`thinwire.adapters.fsdp2.attach_reduce_scatter`; FSDP2 calls it once per module and backward.

    In 16 bits, each rank sends its chunks, divided by the number of ranks, and adds what it receives in rank order (on
    Gloo in fp32; on NCCL in the ring's own way). In 8 bits the chunks are encoded in blocks with one scale each, summed
    in fp32 and not encoded again. No residual is kept.
    """

    def __init__(self, groups: Sequence[Group], method: Method, comm: Communicator | None) -> None:
        self.method, self._comm = method, comm
        self._dtype: torch.dtype = method.dtype  # type: ignore[attr-defined]
        self._block: int = method.block  # type: ignore[attr-defined]
        self._calls = self._dense_bytes = 0
        self._broken: str | None = None
        self._undo: list[Any] = []
        if comm is not None:
            comm.agree({"method": method.name, "options": {k: str(v) for k, v in method.options().items()}})
            self._undo = [group.replace_reduce_scatter(self) for group in groups]

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory for FSDP2's input and output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Average or add up: ``[ranks * k]`` -> ``[k]``."""
        assert self._comm is not None
        ranks = len(self._comm.ranks)
        if async_op or op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise NotImplementedError(
                "the compressed reduce-scatter supports only synchronous averages and sums: "
                "leave out set_gradient_divide_factor"
            )
        if self._broken is not None:
            raise RuntimeError(f"the exchange is unusable after an earlier failure: {self._broken}")
        try:
            with torch.no_grad():
                mean = self._comm.run(scatter_mean(input_tensor, ranks, self._dtype, self._block), "scatter")
        except RuntimeError as error:
            failure = Failure(error, None, "a reduce-scatter of FSDP2's")
            self._broken = self._comm.sentence(failure, 0, [])
            raise RuntimeError(self._broken) from error
        output_tensor.copy_(mean if op == dist.ReduceOp.AVG else mean.mul_(ranks))
        self._calls += 1
        self._dense_bytes += (ranks - 1) * output_tensor.numel() * output_tensor.element_size()

    def stats(self) -> Stats:
        """Return the counters since it was attached; ``steps`` counts calls, one per module and backward."""
        if self._comm is None:
            return Stats(self.method.name, "one shard only: nothing is sent", 1)
        ledger = self._comm.ledger
        return Stats(
            method=self.method.name,
            note="",
            world_size=len(self._comm.ranks),
            rank=self._comm.rank,
            steps=self._calls,
            bytes_sent=ledger.total,
            dense_bytes=self._dense_bytes,
            collectives=dict(ledger.issued),
            bytes_by_kind=dict(ledger.bytes),
        )

    def close(self) -> None:
        """Restore FSDP2's own reduce-scatter, and return the process groups to the pool."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        if self._comm is not None:
            self._comm.close(broken=self._broken is not None)
            self._broken = self._broken or "it was closed"
