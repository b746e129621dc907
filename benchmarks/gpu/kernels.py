"""Kernels beside the floor: ``python benchmarks/gpu/kernels.py``. Part of ``benchmarks/gpu/all.py``.

The floor is every input byte read once and every output byte written once at the rate at which this device copies a
large tensor. Codecs (beside bitsandbytes', without residuals, if it is installed), selection (beside ``torch.topk``)
and optimizers (beside torch's fused ones, and timm's if it is installed): milliseconds, the median of a second's calls
at most, how many times the floor, and launches by torch's profiler. Writes ``gpu_kernels.json``. On a CPU, sizes are
small and only show that all of it runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import DEVICE, machine, shown

from thinwire.core.kernels.orthogonal import orthogonalise_all
from thinwire.core.kernels.quantise.bins import encode_bins, pack_signs
from thinwire.core.kernels.quantise.codes import decode_sum
from thinwire.core.kernels.quantise.linear import encode
from thinwire.core.kernels.select import ALGORITHMS, keep_count, top_k
from thinwire.core.pricing.profiles import builtin
from thinwire.systems.optim import LAMB, LARS

ON_GPU = DEVICE.type == "cuda"
SIZES = (1 << 16, 1 << 20, 1 << 24, 1 << 27) if ON_GPU else (1 << 12, 1 << 16)
SELECTED = (1 << 20, 1 << 24, 1 << 26) if ON_GPU else (1 << 16,)
BLOCK, RANKS, DENSITY = 256, 4, 0.001
SECONDS, CALLS = (0.25, 100) if ON_GPU else (0.02, 3)  # for each row at most


def milliseconds(call: Callable[[], Any]) -> float:
    """The median of some calls: on a GPU of the time between two events, so without the host's."""
    for _ in range(3):
        call()
    found: list[float] = []
    began = time.perf_counter()
    while len(found) < CALLS and time.perf_counter() - began < SECONDS:
        if ON_GPU:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end))
        else:
            start_s = time.perf_counter()
            call()
            found.append(1e3 * (time.perf_counter() - start_s))
    return statistics.median(found)


def launches(call: Callable[[], Any]) -> int | None:
    """Kernels, copies and fills of one call; None on a CPU."""
    if not ON_GPU:
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in seen.events())


def copy_rate() -> float:
    """Bytes read and written in a second."""
    x = torch.ones(SIZES[-1], device=DEVICE)
    y = torch.empty_like(x)
    return 2 * x.nbytes / (milliseconds(lambda: y.copy_(x)) / 1e3)


def codecs(n: int) -> Iterator[tuple[str, Callable[[], Any], float]]:
    """Name, call and bytes that must move."""
    x = torch.randn(n, device=DEVICE)
    out = torch.empty_like(x)
    for bits in (8, 4, 2):
        sent = n * bits / 8 + 4 * n / BLOCK
        codes, scales = encode(x, bits, BLOCK)
        many = codes.expand(RANKS, -1).contiguous(), scales.expand(RANKS, -1).contiguous()
        yield f"encode {bits} bits, residual", partial(encode, x, bits, BLOCK, leave_error=True), 8 * n + sent
        yield f"decode {bits} bits of {RANKS}", partial(decode_sum, out, *many, bits, BLOCK), 4 * n + RANKS * sent
    for bits in (2, 1):
        sent = n * bits / 8 + 4 * n / BLOCK
        codes, scales, values = (part.expand(2, *part.shape).contiguous() for part in encode_bins(x, bits, BLOCK))
        decode = partial(decode_sum, out, codes, scales, bits, BLOCK, values=values)
        yield f"means {bits} bits", partial(encode_bins, x, bits, BLOCK), 4 * n + sent
        yield f"decode means {bits} bits of 2", decode, 4 * n + 2 * sent
    yield "signs", partial(pack_signs, x), 4 * n + n / 8
    if importlib.util.find_spec("bitsandbytes"):
        from bitsandbytes import functional as other

        named = {8: ("quantize_blockwise", "dequantize_blockwise"), 4: ("quantize_4bit", "dequantize_4bit")}
        for bits, (there, back) in named.items():
            moved = 4 * n + n * bits / 8 + 4 * n / BLOCK
            quantise = partial(getattr(other, there), x, blocksize=BLOCK)
            yield f"bitsandbytes' encode {bits} bits", quantise, moved
            yield f"bitsandbytes' decode {bits} bits of 1", partial(getattr(other, back), *quantise()), moved


def bases(rank: int) -> Iterator[tuple[str, Callable[[], Any], float]]:
    """Of the factors of GPT-2's matrices, all in one call."""
    shapes = [(t.shape[0] if ON_GPU else 2 * rank, rank) for t in builtin("gpt2").tensors if len(t.shape) == 2]
    flat = torch.randn(sum(n * r for n, r in shapes), device=DEVICE)
    yield f"bases of rank {rank}", partial(orthogonalise_all, flat, shapes), 8 * flat.numel()


def selection(n: int) -> Iterator[tuple[str, Callable[[], Any], float]]:
    x, k, draw = torch.randn(n, device=DEVICE), keep_count(n, DENSITY), torch.Generator().manual_seed(0)
    yield "torch.topk", lambda: torch.topk(x.abs(), k, sorted=False), 4 * n
    for name in ALGORITHMS:
        yield name, partial(top_k, x, k, name, draw), 4 * n


def optimizers() -> Iterator[tuple[str, Callable[[], Any], float]]:
    """One step for GPT-2's 124 million parameters; on a CPU for a hundredth of them."""
    shapes = [t.shape for t in builtin("gpt2").tensors]
    if not ON_GPU:
        shapes = [(shape[-1],) for shape in shapes]
    parameters = [torch.nn.Parameter(torch.randn(shape, device=DEVICE)) for shape in shapes]
    for p in parameters:
        p.grad = torch.randn_like(p)
    n = sum(p.numel() for p in parameters)
    made: dict[str, tuple[Callable[[], torch.optim.Optimizer], int]] = {  # and words read and written an element
        "SGD, fused": (lambda: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, fused=True), 5),
        "AdamW, fused": (lambda: torch.optim.AdamW(parameters, lr=1e-4, fused=True), 7),
        "LARS": (lambda: LARS(parameters, 1e-4), 5),
        "LAMB": (lambda: LAMB(parameters, 1e-4), 7),
    }
    if importlib.util.find_spec("timm"):
        from timm.optim import Lamb, Lars

        made |= {"timm's Lars": (lambda: Lars(parameters, 1e-4), 5), "timm's Lamb": (lambda: Lamb(parameters, 1e-4), 7)}
    for name, (make, words) in made.items():
        optimizer = make()
        yield name, optimizer.step, 4.0 * words * n
        del optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of gpu_kernels.json")
    out = parser.parse_args().out / "gpu_kernels.json"
    torch.set_num_threads(1)
    rate = copy_rate()
    rows: list[dict[str, Any]] = []

    def add(part: str, n: int | None, found: Iterator[tuple[str, Callable[[], Any], float]]) -> None:
        for name, call, moved in found:
            taken = milliseconds(call)
            floor = 1e3 * moved / rate
            rows.append(
                {
                    "part": part,
                    "name": name,
                    "elements": n,
                    "ms": taken,
                    "floor": taken / floor,
                    "launches": launches(call),
                }
            )

    for n in SIZES:
        add("codecs", n, codecs(n))
    for n in SELECTED:
        add("selection", n, selection(n))
    add("low rank", None, bases(4))
    add("optimizers", None, optimizers())
    out.write_text(json.dumps({**machine(), "copy_bytes_per_second": rate, "rows": rows}, indent=1) + "\n")
    shown("Kernels", ("part", "name", "elements", "ms", "floor", "launches"), rows)


if __name__ == "__main__":
    main()
