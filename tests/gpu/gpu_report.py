"""``make gpu``: what the owner of a card runs first. Prints a report and writes it to thinwire-out/gpu.json.

Selection, optimizers and Triton kernels; every method over NCCL against LocalWorld, under torch's stream sanitizer;
models trained in every way that the engine has, against DDP and the CPU. Two ranks share a card if there is only one.
With more, once more with the model on another card than the current one; then step times and memory.
"""

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
TOP = HERE.parents[1]
SANITIZER = {"TORCH_CUDA_SANITIZER": "1"}


def machine():
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "cards": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def tests():
    """pytest's last line, and whether all passed."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", str(HERE)]
    done = subprocess.run(command, cwd=TOP, env={**os.environ, **SANITIZER}, capture_output=True, text=True)
    return {
        "passed": done.returncode == 0,
        "says": done.stdout.strip().splitlines()[-1:],
        "errors": done.stderr[-4000:],
    }


def on_ranks(ranks, *words, script="on_ranks.py", **variables):
    """The rows that a script prints, what the sanitizer says, and whether it came to its end."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run([*launch, str(HERE / script), *words], env=environment, capture_output=True, text=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    races = len(re.findall("CSAN detected", done.stderr))
    ended = done.returncode == 0
    return {"rows": rows, "races": races, "ended": ended, "errors": "" if ended and not races else done.stderr[-4000:]}


def shown(title, rows, columns):
    table = Table(title=title)
    for column in ("method", *columns):
        table.add_column(column)
    for row in rows:
        options = ", ".join(f"{key}={value}" for key, value in row.get("options", {}).items())
        values = (row.get(column) for column in columns)
        cells = ("-" if v is None else f"{v:.3g}" if isinstance(v, float) else str(v) for v in values)
        table.add_row(row["way"] if "way" in row else f"{row['method']} {options}", *cells)
    return table


def main():
    if not torch.cuda.is_available():
        sys.exit(
            "make gpu needs a CUDA device, and torch finds none: see nvidia-smi, and install a torch built for CUDA"
        )
    out = Path("thinwire-out") / "gpu.json"
    out.parent.mkdir(exist_ok=True)
    console, found = Console(width=110), {"machine": machine(), "tests": tests()}
    console.print(found["machine"], found["tests"]["says"])
    right, cards = found["tests"]["passed"], torch.cuda.device_count()
    against = ("worst", "equal_on_all_ranks", "right")
    ranks = min(max(cards, 2), 8)
    parts = [
        ("sanitizer", ranks, [], against, SANITIZER),
        ("ways of training", 2, [], ("as_ddp", "as_cpu", "right", "error"), {"script": "ways.py"}),
        ("nccl alone", 2, ["--backend", "nccl"], against, {}),
    ]
    if cards > 1:
        parts.append(("another current device", ranks, ["--leave-current"], against, {}))
        parts.append(("times", ranks, ["--timed", "2048"], ("step_ms", "MiB"), {}))
    else:
        sites = ["--only", "FSDP2's sites", "FSDP2's sites, in host memory"]
        parts += [("three ranks", 3, [], against, {}), ("four ranks", 4, [], against, {})]
        parts.append(("sites of two shards", 4, sites, ("as_cpu", "right", "error"), {"script": "ways.py"}))
    for name, size, words, columns, options in parts:
        found[name] = part = on_ranks(size, *words, **options)
        console.print(shown(f"{name}: races {part['races']}, ended {part['ended']}", part["rows"], columns))
        right &= part["ended"] and not part["races"] and all(row.get("right", True) for row in part["rows"])
        out.write_text(json.dumps(found, indent=1))
    console.print(f"{'All right' if right else 'NOT all right'}. Please send {out} in with an issue, whatever it says.")
    sys.exit(not right)


if __name__ == "__main__":
    main()
