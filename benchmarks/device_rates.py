"""What ``thinwire plan --device`` assumes of a device, beside what this one does: models' steps, the methods' own work.

    python benchmarks/device_rates.py --on cuda --device h100

Needs transformers for BERT and GPT-2, torchvision for the others. A step is forward and backward, without an exchange;
the median of several.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from thinwire.core.pricing.profiles import BUILTIN, ModelProfile, builtin
from thinwire.predict.choose.devices import DEVICES
from thinwire.predict.measure.kernels import Stopwatch, kernel_cases
from thinwire.tools.bench.device import check_device

RESULTS = Path(__file__).parent / "results" / "device_rates.json"
STEPS, WARMUP = 10, 2
LEAST, ENOUGH = 2, 10.0  # timed steps, after that many seconds
FLOPS = 1e12  # of the profile, whose seconds are thus its work
POSITIONS = {"gpt2": 512}
USUAL_POSITIONS = 64


def loss_of(name: str, batch: int, device: torch.device) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return a built-in model, untrained, and its loss on one random batch."""
    if name.startswith("bert") or name == "gpt2":
        import transformers

        large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
        with device:  # a CPU would take seconds to draw the weights
            if name == "gpt2":
                net = transformers.GPT2LMHeadModel(transformers.GPT2Config())
            else:
                net = transformers.BertForMaskedLM(transformers.BertConfig(**(large if name == "bert-large" else {})))
        text = torch.randint(20_000, (batch, POSITIONS.get(name, USUAL_POSITIONS)), device=device)
        return net, lambda: net(input_ids=text, labels=text).loss
    import torchvision

    net = getattr(torchvision.models, name)(weights=None).to(device, memory_format=torch.channels_last)
    x = torch.randn(batch, 3, 224, 224, device=device).to(memory_format=torch.channels_last)
    y = torch.randint(1000, (batch,), device=device)
    return net, lambda: nn.functional.cross_entropy(net(x).float(), y)


def seconds_of(net: nn.Module, loss: Callable[[], Tensor], half: bool, device: torch.device) -> float:
    """Return the median time of a forward and a backward pass."""
    times: list[float] = []
    watch = Stopwatch(device)
    for step in range(WARMUP + STEPS):
        net.zero_grad(set_to_none=True)
        begin = watch.mark()
        with torch.autocast(device.type, torch.bfloat16) if half else nullcontext():
            value = loss()
        value.backward()
        end = watch.mark()
        watch.settle()
        if step >= WARMUP:
            times.append(watch.between(begin, end))
        if len(times) >= LEAST and sum(times) > ENOUGH:
            break
    return statistics.median(times)


def work_of(profile: ModelProfile) -> float:
    """Return the FLOPs of a step of a profile made with ``FLOPS``."""
    return FLOPS * (profile.forward_seconds + sum(profile.backward_seconds))


def models(device: torch.device, assumed: float, names: list[str]) -> Iterator[dict[str, object]]:
    """Yield the row of each model; on a GPU, in TF32 and in bf16."""
    for name in names:
        work = work_of(builtin(name, device_flops=FLOPS))
        batch = round(work / work_of(builtin(name, device_flops=FLOPS, batch_size=1)))
        net, loss = loss_of(name, batch, device)
        for precision in ("tf32", "bf16") if device.type == "cuda" else ("fp32",):
            seconds = seconds_of(net, loss, precision == "bf16", device)
            yield {
                "model": name,
                "samples": batch,
                "precision": precision,
                "ms": 1e3 * seconds,
                "tflops": work / seconds / 1e12,
                "assumed_ms": 1e3 * work / assumed,
            }
        del net, loss


def kernels(device: torch.device, spec: str) -> Iterator[dict[str, object]]:
    """Yield the row of each amount of the methods' own work."""
    curves = DEVICES[spec].compute()
    for kind, points in kernel_cases(device, seconds=4.0):
        for amount, seconds in points:
            yield {"kernel": kind, "amount": amount, "us": 1e6 * seconds, "assumed_us": 1e6 * curves[kind](amount)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", default="cpu", choices=["cpu", "cuda"], help="where to compute")
    parser.add_argument("--device", default="cpu", choices=DEVICES, help="what plan would be told")
    parser.add_argument("--models", nargs="+", default=["bert-base", "gpt2"], choices=BUILTIN)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    check_device(args.on)
    device = torch.device(args.on)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if args.on == "cuda" else f"CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "assumed": args.device,
        "kernels": [],
        "models": [],
    }
    for part, row in chain(
        (("kernels", row) for row in kernels(device, args.device)),
        (("models", row) for row in models(device, DEVICES[args.device].training_flops, args.models)),
    ):
        found[part].append(row)
        args.out.write_text(json.dumps(found, indent=1) + "\n")  # at once: a later model may not fit
    console = Console(width=110)
    for part in ("models", "kernels"):
        table = Table(title=f"{part}: {found['device']}; assumed: {args.device}")
        for column in found[part][0]:
            table.add_column(column)
        for row in found[part]:
            table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
        console.print(table)


if __name__ == "__main__":
    main()
