"""One rank of a probe: ``python -m thinwire.predict.measure.worker --out PATH``, with torchrun's variables set."""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from thinwire.core.events import tell_event
from thinwire.predict.measure.probe import Progress, probe
from thinwire.predict.measure.result import ProbeResult

_TIMEOUT = timedelta(seconds=120)


def join_and_probe(
    *, backend: str, largest_bytes: int, seconds: float, on_progress: Progress = lambda done, text: None
) -> tuple[int, ProbeResult]:
    local, here = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if backend == "auto":
        ready = torch.cuda.device_count() >= here and torch.cuda.is_available() and dist.is_nccl_available()
        backend = "nccl" if ready else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(local)
    dist.init_process_group(backend, timeout=_TIMEOUT)
    try:
        rank = dist.get_rank()
        result = probe(largest_bytes=largest_bytes, seconds=seconds, on_progress=on_progress)
    finally:
        dist.destroy_process_group()
    return rank, result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--largest-bytes", required=True, type=int)
    parser.add_argument("--seconds", required=True, type=float)
    arguments = parser.parse_args()
    first = os.environ.get("RANK", "0") == "0"

    def report(done: float, text: str) -> None:
        if first:
            tell_event({"done": done, "text": text})

    rank, result = join_and_probe(
        backend=arguments.backend,
        largest_bytes=arguments.largest_bytes,
        seconds=arguments.seconds,
        on_progress=report,
    )
    if rank == 0:
        arguments.out.write_text(result.to_json())


if __name__ == "__main__":
    main()
