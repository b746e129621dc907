"""Steps that only exchange, of GPT-2's 148 tensors: run by ``benchmarks/gpu/all.py`` under torchrun.

The gradients are there already, so a step is the exchange alone, beside an *empty* one without any. Two ranks share a
card where there is only one; NCCL then goes over loopback, because each calls itself a host of its own. Per row: the
whole step; how long the card is busy beyond an empty step, without NCCL's kernels; kernels beyond an empty step's; the
host's time for a step. On CPUs: Gloo, narrow tensors, and the step alone. Writes ``gpu_exchange.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ |= {"NCCL_HOSTID": f"rank {os.environ.get('RANK')}", "NCCL_NET": "Socket"}  # before torch reads them
import torch
import torch.distributed as dist
from machine import DEVICE, machine, shown
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.core.pricing.profiles import builtin

ON_GPU = DEVICE.type == "cuda"
STEPS, SEEN = (8, 2) if ON_GPU else (3, 0)  # timed, and under the profiler
DDPS = ("DDP", *(("DDP, bf16 hook",) if ON_GPU else ()), "DDP, PowerSGD hook, rank 4")
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "ssgd": ("ssgd", {}),
    "dear": ("dear", {}),
    "bf16": ("cast", {"dtype": "bf16"}),
    "int8": ("cast", {"dtype": "int8"}),
    "int4": ("cast", {"dtype": "int4"}),
    "powersgd, rank 4": ("powersgd", {"rank": 4}),
    "acp, rank 4": ("acp", {"rank": 4}),
    "topk, 0.1 %": ("topk", {"density": 0.001}),
    "mstopk, 0.1 %": ("topk", {"density": 0.001, "select": "mstopk"}),
    "signsgd": ("signsgd", {}),
    "local every 8, 2 bits": ("local", {"sync_every": 8, "codec": "int2"}),
    "local every 8, 2 bits, 3 late": ("local", {"sync_every": 8, "codec": "int2", "fragment_sync_delay": 3}),
}


class Held(torch.autograd.Function):
    """A loss whose gradients are given."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, *ctx.gradients


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shapes = [t.shape if ON_GPU else t.shape[-1:] for t in builtin("gpt2").tensors]
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(shape, device=DEVICE).mul_(0.02) for shape in shapes)
        torch.manual_seed(1 + dist.get_rank())
        self.gradients = [torch.randn_like(p) for p in self.weights]

    def forward(self) -> Tensor:
        made: Tensor = Held.apply(self.gradients, *self.weights)
        return made


def wait() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def measured(step: Callable[[], None]) -> dict[str, Any]:
    """Milliseconds of a step and of the host; busy time and kernels without NCCL's, of a step; all medians or means."""
    for _ in range(10):  # two rounds of local steps, and the first steps of a method
        step()
    whole, host = [], []
    for _ in range(STEPS):
        wait()
        dist.barrier()
        began = time.perf_counter()
        step()
        host.append(1e3 * (time.perf_counter() - began))
        wait()
        whole.append(1e3 * (time.perf_counter() - began))
    found: dict[str, Any] = {"step": statistics.median(whole), "host": statistics.median(host)}
    if ON_GPU:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            for _ in range(SEEN * 4):  # one period of local steps
                step()
            wait()
        own = [
            e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA and "nccl" not in e.name.lower()
        ]
        found["busy"] = sum(e.device_time for e in own) / 1e3 / (SEEN * 4)
        found["kernels"] = len(own) / (SEEN * 4)
    return found


def hooked(name: str, model: nn.Module) -> DistributedDataParallel:
    wrapped = DistributedDataParallel(model)
    if name == "DDP, bf16 hook":
        wrapped.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif name == "DDP, PowerSGD hook, rank 4":
        state = power.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, power.powerSGD_hook)
    return wrapped


def row(name: str) -> dict[str, Any]:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    sync, called = None, model
    if name in OURS:
        method, options = OURS[name]
        sync = tw.attach(model, optimizer, method, **options)
    elif name != "empty":
        called = hooked(name, model)

    def step() -> None:
        called().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = measured(step)
    if sync is not None:
        sync.close()
    return {"name": name, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of gpu_exchange.json")
    parser.add_argument("--seconds", type=float, default=120.0, help="begin no row after these")
    told = parser.parse_args()
    began = time.monotonic()
    torch.set_num_threads(1)
    if ON_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl" if ON_GPU else "gloo", timeout=timedelta(seconds=60))
    rows: list[dict[str, Any]] = []
    for name in ("empty", *DDPS, *OURS):
        late = torch.tensor([time.monotonic() - began > told.seconds], dtype=torch.int32)
        dist.broadcast(late, 0)
        if late:
            break
        rows.append(row(name))
        for of in ("busy", "kernels", "host"):
            if of in rows[-1]:
                rows[-1][f"{of} beyond empty"] = rows[-1][of] - rows[0][of]
        if dist.get_rank() == 0:  # after each row: a card is lent for minutes
            text = json.dumps({**machine(), "ranks": dist.get_world_size(), "rows": rows}, indent=1)
            (told.out / "gpu_exchange.json").write_text(text + "\n")
    if dist.get_rank() == 0:
        beyond = ("busy beyond empty", "kernels beyond empty", "host beyond empty")
        shown("Exchange alone, milliseconds of a step", ("name", "step", *beyond), rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
