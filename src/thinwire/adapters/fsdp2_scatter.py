"""FSDP2's reduce-scatter in 16 or 8 bits: the object behind ``set_custom_reduce_scatter``.

In 16 bits, each rank sends its chunks, divided by the number of ranks, and adds what it receives in rank order (on Gloo
in fp32; on NCCL in the ring's own way). In 8 bits the chunks are encoded in blocks with one scale each, summed in fp32
and not encoded again. No residual is kept.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.adapters.fsdp2_groups import Group
from thinwire.core.methods import two_step
from thinwire.core.program import Method, ReduceScatter, working_dtype
from thinwire.engine.executors.events import Failure
from thinwire.engine.ranks.communicator import Communicator
from thinwire.engine.stats import Stats


def scatter_mean(x: Tensor, ranks: int, dtype: torch.dtype, block: int) -> Generator[Any, Tensor, Tensor]:
    """Return this rank's chunk of the average over the ranks: ``[ranks * k]`` -> ``[k]``, in the working dtype.

    Args:
        x: in chunks, one per rank; not modified.
        ranks: number of ranks.
        dtype: dtype on the wire: ``torch.bfloat16``, ``torch.float16`` or ``torch.int8``.
        block: largest number of elements that share a scale, for int8.
    """
    wide, k = x.to(working_dtype(x.dtype)), x.numel() // ranks
    if dtype != torch.int8:
        shard = yield ReduceScatter((wide / ranks).to(dtype))
        return shard.to(wide.dtype)
    code = two_step.Code.of(8, block, x.numel(), ranks)
    padded = wide.new_zeros(ranks, code.chunk)
    padded[:, :k] = wide.view(ranks, k)
    total = yield from two_step.scatter(padded.view(-1), code)
    return total[:k].div_(ranks)


class CompressedReduceScatter:
    """The handle of :func:`thinwire.adapters.fsdp2.attach_reduce_scatter`; FSDP2 calls it once per module and backward.

    Args:
        groups: the FSDP2 modules that it serves.
        method: a ``Cast``.
        comm: communicator over the shards; None if there is only one shard, in which case FSDP2 does not call it.
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
        """Average or add up: ``[ranks * k]`` -> ``[k]``.

        Raises:
            NotImplementedError: another operation (a custom divide factor), or ``async_op=True``.
            RuntimeError: the exchange failed.
        """
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

    def __enter__(self) -> CompressedReduceScatter:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
