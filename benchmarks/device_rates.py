"""What ``thinwire plan --device`` assumes of a GPU, beside what this one does: models' steps and the methods' own work.

    python benchmarks/device_rates.py --out rates.json

Needs CUDA, torchvision and transformers. Each step is the median of 20, forward and backward, without an exchange.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from thinwire.measure.kernels import kernel_points
from thinwire.planner.choose.devices import DEVICES
from thinwire.planner.profiles.builtin import BUILTIN, builtin

STEPS, WARMUP = 20, 5
FLOPS = 1e12  # of the profile from which the seconds are taken back


def loss_of(name: str, batch: int, positions: int, device: torch.device) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return a built-in model, untrained, and its loss on one random batch."""
    import torchvision
    import transformers

    if name.startswith("bert"):
        large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
        net = transformers.BertForMaskedLM(transformers.BertConfig(**(large if name == "bert-large" else {})))
    elif name == "gpt2":
        net = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    else:
        net = getattr(torchvision.models, name)(weights=None)
        net = net.to(device, memory_format=torch.channels_last)
        x = torch.randn(batch, 3, 224, 224, device=device).to(memory_format=torch.channels_last)
        y = torch.randint(1000, (batch,), device=device)
        return net, lambda: nn.functional.cross_entropy(net(x).float(), y)
    net = net.to(device)
    text = torch.randint(20_000, (batch, positions), device=device)
    return net, lambda: net(input_ids=text, labels=text).loss


def seconds_of(net: nn.Module, loss: Callable[[], Tensor], half: bool) -> float:
    """Return the median time of a forward and a backward pass."""
    times = []
    for step in range(WARMUP + STEPS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        net.zero_grad(set_to_none=True)
        begin.record()
        with torch.autocast("cuda", torch.bfloat16) if half else nullcontext():
            value = loss()
        value.backward()
        end.record()
        torch.cuda.synchronize()
        if step >= WARMUP:
            times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def models(device: torch.device, assumed: float) -> Iterator[dict[str, object]]:
    """Yield the row of each built-in model in TF32 and in bf16."""
    for name in BUILTIN:
        profile = builtin(name, device_flops=FLOPS)
        batch = int(profile.source.split(", ")[1].split()[0])
        positions = 512 if name == "gpt2" else 64
        net, loss = loss_of(name, batch, positions, device)
        work = FLOPS * (profile.forward_seconds + sum(profile.backward_seconds))
        elements = sum(p.numel() for p in net.parameters())
        for half in (False, True):
            seconds = seconds_of(net, loss, half)
            yield {
                "model": name,
                "elements": elements,
                "samples": batch,
                "precision": "bf16" if half else "tf32",
                "ms": 1e3 * seconds,
                "tflops": work / seconds / 1e12,
                "assumed_ms": 1e3 * work / assumed,
            }
        del net, loss


def kernels(device: torch.device, spec: str) -> Iterator[dict[str, object]]:
    """Yield the row of each amount of the methods' own work."""
    curves = DEVICES[spec].compute()
    for kind, points in kernel_points(device, seconds=10.0).items():
        for amount, seconds in points:
            yield {"kernel": kind, "amount": amount, "us": 1e6 * seconds, "assumed_us": 1e6 * curves[kind](amount)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="h100", choices=[d for d in DEVICES if d != "cpu"], help="as in plan")
    parser.add_argument("--out", default="device_rates.json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("device_rates.py needs a CUDA device, and torch finds none")
    device = torch.device("cuda")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    found = {
        "card": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "assumed": args.device,
        "models": list(models(device, DEVICES[args.device].training_flops)),
        "kernels": list(kernels(device, args.device)),
    }
    with open(args.out, "w") as file:
        json.dump(found, file, indent=1)
    console = Console(width=110)
    for part in ("models", "kernels"):
        rows = found[part]
        table = Table(title=f"{part}: {found['card']}, assumed: {args.device}")
        for column in rows[0]:
            table.add_column(column)
        for row in rows:
            table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
        console.print(table)


if __name__ == "__main__":
    main()
