"""Models trained on real ranks in every way that the engine has, each on the device and once elsewhere. For torchrun.

What is exact is compared with DistributedDataParallel on the same device, bit for bit with two ranks. All else is
compared with the same training on CPUs over Gloo, by its losses. Rank 0 writes a row of JSON for each way.
"""

import argparse
import dataclasses
import json
import tempfile
import time
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.adapters import fsdp2
from thinwire.adapters.ddp import ddp_hook
from thinwire.systems.kfac import KFAC, Variant
from thinwire.systems.optim import LAMB, LARS
from thinwire.tools.bench.device import prepare_rank, rank_device
from thinwire.tools.bench.models.text import CharGPT

STEPS, LETTERS = 12, 256


class Images(nn.Module):
    """Convolutions and BatchNorm, so buffers too."""

    def __init__(self):
        super().__init__()
        wide = lambda i, o: nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())  # noqa: E731
        self.layers = nn.Sequential(
            wide(3, 32), wide(32, 64), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 10)
        )

    def forward(self, x):
        return self.layers(x)


class Perceptron(nn.Module):
    """For K-FAC; ``spare`` is a layer that no step uses."""

    def __init__(self, spare=False):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
        self.spare = nn.Linear(128, 10) if spare else None

    def forward(self, x):
        return self.layers(x)


MODELS = {
    "text": lambda: CharGPT(layers=2, width=64, heads=4, block=32),
    "wide": lambda: CharGPT(layers=4, width=512, heads=8, block=64),
    "images": Images,
    "perceptron": Perceptron,
    "spare": lambda: Perceptron(spare=True),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "plain": lambda p: torch.optim.SGD(p, lr=0.05),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.01, fused=True),
    "lars": lambda p: LARS(p, 0.5, weight_decay=1e-4),
    "lamb": lambda p: LAMB(p, 0.01, max_grad_norm=None),
}


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to train."""

    method: Any = "ssgd"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    model: str = "text"
    optimizer: str = "sgd"
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    scaled: bool = False
    clip: float | None = None
    passes: int = 1
    kfac: dict[str, Any] | None = None
    channels_last: bool = False
    hook: bool = False  # under DDP, by thinwire's communication hook
    fsdp: str | None = None  # under FSDP2: "replicas" of whole models, "shards", or "sites" of two shards
    cut: bool = False  # saved halfway, and gone on with from the file
    exact: bool = False  # has DDP's bits on two ranks
    alone: bool = False  # not trained once more on the CPU
    near: float = 0.02  # of the first loss: by how much a loss may differ from the CPU's


def batch(way, rank, step, device):
    draw = torch.Generator().manual_seed(10_000 * step + rank)
    if way.model in ("text", "wide"):
        length = 33 if way.model == "text" else 65
        text = torch.empty(16, length, dtype=torch.long)
        text[:, 0] = torch.randint(LETTERS, (16,), generator=draw)
        for place in range(1, length):  # each letter follows from the one before
            text[:, place] = (5 * text[:, place - 1] + 3) % 64
        return text[:, :-1].to(device), text[:, 1:].to(device)
    shape = (32, 3, 16, 16) if way.model == "images" else (32, 64)
    y = torch.randint(10, shape[:1], generator=draw)
    x = (
        torch.randn(shape, generator=draw)
        + torch.randn((10, *shape[1:]), generator=torch.Generator().manual_seed(7))[y]
    )
    x = x.to(device, way.dtype)
    return (x.to(memory_format=torch.channels_last) if way.channels_last else x), y.to(device)


class Run:
    """A model in training; ``method`` None: under DDP alone."""

    def __init__(self, way, device, *, reference=False):
        torch.manual_seed(0)
        net = MODELS[way.model]().to(device, way.dtype)
        self.net = net.to(memory_format=torch.channels_last) if way.channels_last else net
        self.way, self.device, self.rank = way, device, dist.get_rank()
        if way.fsdp is not None:
            ranks = dist.get_world_size()
            shards = {"replicas": 1, "shards": ranks, "sites": 2 if ranks >= 4 else 1}[way.fsdp]
            shape = (ranks // shards, shards)
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
            for part in (*self.net.blocks, self.net):
                fully_shard(part, mesh=mesh if way.fsdp == "replicas" else mesh["shard"])
        self.optimizer = OPTIMIZERS[way.optimizer](self.net.parameters())
        self.scaler = torch.amp.GradScaler(device.type, init_scale=1024.0) if way.scaled else None
        self.called, self.sync, self.kfac = self.net, None, None
        unused = way.options.get("find_unused_parameters", False)
        self.state = None
        if way.fsdp == "sites":
            self.sync = fsdp2.attach(self.net, self.optimizer, way.method, sites=mesh["replicate"], **way.options)
        elif way.fsdp is not None:
            if not reference:
                attach = fsdp2.attach if way.fsdp == "replicas" else fsdp2.attach_reduce_scatter
                self.state = attach(self.net, way.method, **way.options)
        elif reference or way.hook:
            self.called = DistributedDataParallel(self.net, gradient_as_bucket_view=True, find_unused_parameters=unused)
        if way.hook and not reference:
            self.state, hook = ddp_hook(way.method, **way.options)
            self.called.register_comm_hook(self.state, hook)
        elif not reference and way.fsdp is None:
            self.sync = tw.attach(self.net, self.optimizer, way.method, scaler=self.scaler, **way.options)
        if way.kfac is not None:
            self.kfac = KFAC(self.net, self.sync, damping=0.1, **way.kfac)

    def loss(self, step):
        x, y = batch(self.way, self.rank, step, self.device)
        on = self.way.autocast
        with torch.autocast(self.device.type, on) if on is not None else nullcontext():
            out = self.called(x)
            return nn.functional.cross_entropy(out.flatten(0, -2).float(), y.flatten())

    def backward(self, step):
        loss = self.loss(step)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return loss.detach()

    def step(self, step):
        for again in range(self.way.passes - 1):
            with (self.sync or self.called).no_sync():
                self.backward(1000 * (1 + again) + step)
        loss = self.backward(step)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.way.clip is not None and self.sync is not None:
            self.sync.clip_grad_norm_(self.way.clip)
        elif self.way.clip is not None:
            nn.utils.clip_grad_norm_(self.net.parameters(), self.way.clip)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def close(self):
        if self.sync is not None:
            if hasattr(self.sync, "finish"):
                self.sync.finish()
            else:
                self.sync.synchronize()
            self.sync.close()
        elif self.state is not None:
            self.state.close()
        whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in self.net.parameters())
        return [p.detach().cpu() for p in whole]


def train(way, device, *, reference=False, cut=False):
    """Losses of all steps, the mean over ranks, and this rank's weights at the end."""
    run, losses = Run(way, device, reference=reference), []
    for step in range(STEPS):
        if cut and step == STEPS // 2:
            path = Path(everyone(tempfile.mkdtemp())[0])
            tw.checkpoint.save(path, run.net, run.optimizer, run.sync, step=step)
            run.close()
            run = Run(way, device)
            with torch.no_grad():
                for p in run.net.parameters():
                    p.zero_()
            tw.checkpoint.load(path, run.net, run.optimizer, run.sync)
        losses.append(run.step(step))
    weights = run.close()
    mean = torch.stack(losses).double().cpu()
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).tolist(), weights


def everyone(value):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


_references: dict[Any, Any] = {}


def reference(way, device):
    same = dataclasses.replace(way, method="ssgd", options={}, hook=False, cut=False, exact=False, near=0, kfac=None)
    key = repr(same)
    if key not in _references:
        _references[key] = train(way, device, reference=True)
    return _references[key]


def row(name, way, device):
    began = time.perf_counter()
    losses, weights = train(way, device, cut=way.cut)
    seconds = time.perf_counter() - began
    same = len({hash(tuple(float(w.double().sum()) for w in weights)) for weights in everyone(weights)}) == 1
    found = {
        "way": name,
        "seconds": round(seconds, 2),
        "first": losses[0],
        "last": losses[-1],
        "equal_on_all_ranks": same,
        "as_ddp": None,
        "as_cpu": None,
    }
    right = same and losses[-1] < losses[0] and all(torch.isfinite(w).all() for w in weights)
    if way.exact or way.cut:
        kept = {key: value for key, value in way.options.items() if key != "anchors"}
        _, theirs = train(dataclasses.replace(way, options=kept), device) if way.cut else reference(way, device)
        worst = max(float((a.double() - b.double()).abs().max()) for a, b in zip(weights, theirs))
        found["as_ddp"] = worst
        bits = dist.get_world_size() == 2 and way.clip is None
        right &= worst == 0 if bits else worst < 1e-4
    elif not way.alone and device.type == "cuda":
        there, _ = train(way, torch.device("cpu"))
        found["as_cpu"] = worst = max(abs(a - b) for a, b in zip(losses, there)) / there[0]
        right &= worst <= way.near
    return {**found, "right": bool(right)}


low = {"rank": 2, "start_compression_step": 2}
sparse = {"density": 0.05, "start_compression_step": 2}
kfac = {"factor_update_steps": 1, "inv_update_steps": 2}
WAYS: dict[str, Way] = {
    # exact: DDP's bits
    "ssgd": Way(model="wide", exact=True),
    "ssgd, many buckets": Way(model="wide", exact=True, options={"bucket_cap_mb": 1}),
    "ssgd, one bucket each": Way(model="wide", exact=True, options={"fusion": "none"}),
    "ssgd, own gradients": Way(model="wide", exact=True, options={"gradient_as_bucket_view": False}),
    "dear": Way("dear", model="wide", exact=True),
    "dear, one bucket each": Way("dear", {"fusion": "none"}, model="wide", exact=True),
    "dear, in step": Way("dear", {"update_in_step": True}, model="wide", exact=True),
    "ssgd, AdamW fused": Way(model="wide", optimizer="fused", exact=True),
    "dear, AdamW": Way("dear", model="wide", optimizer="adamw", exact=True),
    "channels last, fused": Way(model="images", optimizer="fused", channels_last=True, exact=True),
    "channels last, dear": Way("dear", model="images", optimizer="adamw", channels_last=True, exact=True),
    "BatchNorm": Way(model="images", optimizer="adamw", exact=True),
    "accumulation": Way(model="wide", passes=3, exact=True),
    "accumulation, dear": Way("dear", model="wide", passes=3, exact=True),
    "scaler, fp16": Way(model="wide", autocast=torch.float16, scaled=True, exact=True),
    "scaler, fp16, dear": Way("dear", model="wide", autocast=torch.float16, scaled=True, exact=True),
    "autocast bf16": Way(model="wide", autocast=torch.bfloat16, exact=True),
    "bf16 weights": Way(model="wide", dtype=torch.bfloat16, exact=True),
    "clip": Way(model="wide", clip=0.5, exact=True),
    "clip, dear": Way("dear", model="wide", clip=0.5, exact=True),
    "unused": Way(model="spare", options={"find_unused_parameters": True}, exact=True),
    "unused, dear": Way("dear", {"find_unused_parameters": True}, model="spare", exact=True),
    "LARS": Way(model="wide", optimizer="lars", exact=True),
    "LAMB, dear": Way("dear", model="wide", optimizer="lamb", exact=True),
    "DDP's hook": Way(model="wide", hook=True, exact=True),
    "auto": Way("auto", model="wide", exact=True),
    # once more from a file: the bits of the training that was not cut, nor in host memory
    "cut, ssgd": Way(cut=True, optimizer="adamw"),
    "cut, powersgd": Way("powersgd", low, cut=True, optimizer="adamw"),
    "cut, topk": Way("topk", sparse, cut=True),
    "cut, diloco, in host memory": Way(
        "diloco",
        {"sync_every": 4, "codec": "int8", "fragments": 2, "fragment_sync_delay": 2, "anchors": "cpu"},
        cut=True,
        optimizer="adamw",
    ),
    # as on the CPU
    "cast bf16": Way("cast", {"dtype": "bf16"}),
    "cast fp16": Way("cast", {"dtype": "fp16"}),
    "cast int8": Way("cast", {"dtype": "int8"}),
    "cast int4": Way("cast", {"dtype": "int4"}),
    "cast, decoupled": Way("cast", {"dtype": "bf16", "decoupled": True}),
    "powersgd": Way("powersgd", low),
    "powersgd, AdamW, clip": Way("powersgd", low, optimizer="adamw", clip=1.0),
    "powersgd, bf16 autocast": Way("powersgd", low, autocast=torch.bfloat16, near=0.05),
    "powersgd, scaler": Way("powersgd", low, autocast=torch.float16, scaled=True, alone=True),
    "acp": Way("acp", low),
    "acp, decoupled": Way("acp", {**low, "decoupled": True}),
    "acp, two passes": Way("acp", low, passes=2),
    "topk": Way("topk", sparse),
    "topk, mstopk": Way("topk", {**sparse, "select": "mstopk"}),
    "topk, gaussian": Way("topk", {**sparse, "select": "gaussian"}),
    "topk, unused": Way("topk", {**sparse, "find_unused_parameters": True}, model="spare"),
    "gtopk": Way("gtopk", sparse),
    "oktopk": Way("oktopk", sparse),
    "hitopk": Way("hitopk", sparse),
    "omgs": Way("omgs", sparse),
    "lags": Way("lags", {"max_ratio": 20, "start_compression_step": 2}),
    "dgc": Way("dgc", sparse, optimizer="plain"),
    "signsgd": Way("signsgd"),
    "onebit": Way("onebit"),
    "qsgd": Way("qsgd", near=0.1),
    "terngrad": Way("terngrad", near=0.1),
    "auto, lossy": Way("auto", {"lossy": True}, near=0.1),
    "topk under DDP": Way("topk", {"density": 0.05}, hook=True),
    "powersgd under DDP": Way("powersgd", {"rank": 2}, hook=True),
    "FSDP2's replicas": Way(model="wide", fsdp="replicas", exact=True),
    "FSDP2's replicas, powersgd": Way("powersgd", {"rank": 2}, fsdp="replicas"),
    "FSDP2's replicas, topk": Way("topk", {"density": 0.05}, fsdp="replicas"),
    "FSDP2's shards, bf16": Way("cast", {"dtype": "bf16"}, fsdp="shards"),
    "FSDP2's shards, int8": Way("cast", {"dtype": "int8"}, fsdp="shards"),
    "FSDP2's sites": Way("local", {"sync_every": 4, "codec": "int2"}, optimizer="adamw", fsdp="sites"),
    "FSDP2's sites, in host memory": Way(
        "local",
        {"sync_every": 4, "codec": "int8", "fragments": 2, "fragment_sync_delay": 1, "anchors": "cpu"},
        optimizer="adamw",
        fsdp="sites",
    ),
    "K-FAC": Way(model="perceptron", kfac=kfac),
    "K-FAC, eigen": Way(model="perceptron", kfac={**kfac, "method": "eigen"}),
    "K-FAC, dkfac": Way(model="perceptron", kfac={**kfac, "variant": Variant("dkfac")}),
    "K-FAC, mpd": Way(model="perceptron", kfac={**kfac, "variant": Variant("mpd")}),
    "K-FAC, images": Way(model="images", optimizer="adamw", kfac=kfac, near=0.05),
    "K-FAC, powersgd": Way("powersgd", low, model="perceptron", kfac=kfac),
    "K-FAC, scaler": Way(model="perceptron", kfac=kfac, scaled=True),
    "local": Way("local"),
    "local, AdamW": Way("local", optimizer="adamw"),
    "local, every 4": Way("local", {"sync_every": 4, "codec": None}),
    "local, every 4 in int8": Way("local", {"sync_every": 4, "codec": "int8"}),
    "local, every 4 in int2": Way("local", {"sync_every": 4, "codec": "int2"}),
    "local, every 4, late": Way("local", {"sync_every": 4, "codec": "int8", "fragments": 2, "fragment_sync_delay": 1}),
    "diloco": Way("diloco", {"sync_every": 4}),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="+", metavar="WAY")
    parser.add_argument("--part", metavar="I/N", default="0/1", help="every N-th way, from the I-th")
    args = parser.parse_args()
    backends = prepare_rank(args.device)
    device = rank_device(args.device)
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = False, True
    first, every = map(int, args.part.split("/"))
    dist.init_process_group(backends)
    for name in [n for n in WAYS if args.only is None or n in args.only][first::every]:
        try:
            found = row(name, WAYS[name], device)
        except Exception as error:  # the next one may still work
            traceback.print_exc()
            found = {"way": name, "right": False, "as_ddp": None, "error": f"{type(error).__name__}: {error}"[:600]}
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
