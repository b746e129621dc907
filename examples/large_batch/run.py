"""Large batches and cached input, put together: ``make -C examples/large_batch``, or ``python .../run.py``.

Starts two ranks with torchrun; started by torchrun or ``thinwire lab run``, it is one of their ranks.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PARTS = ("batches", "resolutions", "stalls")
NEEDED = {"sklearn": "scikit-learn", "PIL": "Pillow", "safetensors": "safetensors", "matplotlib": "matplotlib"}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few epochs, few images: shows that it runs, no more")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON instead of tables")
    parser.add_argument("--parts", default=",".join(PARTS), help="which, by comma (default: all, %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each recipe (default: 1)")
    parser.add_argument("--ranks", type=int, default=2, help="how many to start (default: 2)")
    parser.add_argument("--out", type=Path, default=Path("thinwire-out/large_batch"), help="for files and the picture")
    given = parser.parse_args()
    given.parts = given.parts.split(",")
    if unknown := [part for part in given.parts if part not in PARTS]:
        parser.error(f"--parts {','.join(unknown)}: choose from {', '.join(PARTS)}")
    if given.seeds < 1 or not 1 <= given.ranks <= 16:
        parser.error("--seeds must be at least 1, and --ranks from 1 to 16")
    if missing := [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]:
        parser.error(f"{', '.join(missing)} missing: pip install 'thinwire[digits,images,data,plot]'")
    return given


def start_ranks(count: int) -> int:
    """Run this script again, as so many ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    return subprocess.run([*command, __file__, *sys.argv[1:]], env=environment, check=False).returncode


def work(given: argparse.Namespace, arena: Path) -> dict[str, Any]:
    """All parts, on this rank; progress goes to standard error."""
    began = time.perf_counter()

    def say(line: str) -> None:
        if dist.get_rank() == 0:
            print(f"{time.perf_counter() - began:6.1f} s  {line}", file=sys.stderr, flush=True)

    found: dict[str, Any] = {"ranks": dist.get_world_size(), "quick": given.quick}
    if "batches" in given.parts:
        found["batches"] = compare_batches(given.quick, given.seeds, say)
    if given.parts != ["batches"]:
        found |= compare_inputs(given, arena, say)
    found["seconds"] = time.perf_counter() - began
    return found


def compare_batches(quick: bool, seeds: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Every recipe with every seed."""
    from batches import RECIPES, train
    from thinwire.bench.models.digits import enlarged

    data, epochs = enlarged(copies=2 if quick else 5), 3 if quick else 20
    return [train(data, recipe, epochs=epochs, seed=s, say=say) for recipe in RECIPES for s in range(seeds)]


def compare_inputs(given: argparse.Namespace, arena: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """The folder of JPEG files: sizes that grow, and what the cache is worth."""
    from feed import Input
    from pictures import Folder
    from resolutions import decoded, train
    from stalls import measure
    from thinwire.data import ResolutionSchedule, Stage

    quick = given.quick
    count, held_out, stored = (192, 48, 24) if quick else (1536, 384, 48)
    folder = given.out / "jpeg"
    if dist.get_rank() == 0:
        say(f"drawing {count + held_out} JPEG files in {folder}, unless they are there")
        Folder(folder, count + held_out)
    dist.barrier()
    source, test = Folder(folder, count), decoded(Folder(folder, held_out, first=count), stored)
    fixed = ResolutionSchedule([Stage(2, 24, 32)] if quick else [Stage(8, 48, 64)])
    growing = ResolutionSchedule(
        [Stage(1, 12, 64), Stage(1, 24, 32)] if quick else [Stage(4, 16, 64), Stage(2, 32, 64), Stage(2, 48, 32)]
    )
    found: dict[str, Any] = {}
    if "resolutions" in given.parts:
        found["resolutions"] = [
            train(source, test, Input("files, one size"), fixed, say=say),
            train(source, test, Input("files, growing size"), growing, say=say),
            train(source, test, Input("cached, growing size", arena), growing, say=say),
        ]
    if "stalls" in given.parts:
        found["stalls"] = [
            measure(source, arena, stored=stored, size=size, batch=64, rounds=2 if quick else 3, say=say)
            for size in ((12,) if quick else (16, 48))
        ]
    return found


def main() -> int:
    given = options()
    if "RANK" not in os.environ:
        return start_ranks(given.ranks)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    arena = given.out / "arena"  # in a job of yours leave directory= out: its default is memory, /dev/shm
    if dist.get_rank() == 0:
        shutil.rmtree(arena, ignore_errors=True)
        arena.mkdir(parents=True)
    dist.barrier()
    found = work(given, arena)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(arena)
        from show import picture, tables

        from thinwire.tools.pictures import write_picture

        write_picture(drawn := picture(found), given.out / "large_batch.png")
        found |= {"written": str(given.out / "large_batch.png"), "picture": asdict(drawn)}
        if given.json:
            print(json.dumps(found, indent=1))
        else:
            tables(found)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
