"""Two sites, each with the model sharded over its cards, that average every 16 steps in 2 bits.

On one machine, with four ranks as two sites of two: ``torchrun --nproc-per-node 4 train.py``. On real sites, one
torchrun on each machine of both. Started again, it continues from the last checkpoint.
"""

import argparse
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from llama import model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy

import thinwire as tw

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=96)
parser.add_argument("--sites", type=int, default=2)
parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
told = parser.parse_args()

on_gpu = torch.cuda.is_available()
dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
mesh = init_device_mesh(
    device.type, (told.sites, dist.get_world_size() // told.sites), mesh_dim_names=("site", "shard")
)

torch.manual_seed(0)
net = model("small").to(device)
apply_activation_checkpointing(net, check_fn=lambda module: module in set(net.layers))
compute = torch.bfloat16 if on_gpu else torch.float32  # without its instructions, bf16 takes a CPU thirty times as long
policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
for layer in net.layers:
    fully_shard(layer, mesh=mesh["shard"], mp_policy=policy)
fully_shard(net, mesh=mesh["shard"], mp_policy=policy)
optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)

# the line that thinwire needs
sync = tw.adapters.fsdp2.attach(
    net, optimizer, "local", sites=mesh["site"], sync_every=16, codec="int2", fragments=2, anchors="cpu"
)
print_here = print if dist.get_rank() == 0 else lambda *_: None
saved = sorted(told.folder.glob("step-*"))
begin = int(saved[-1].name.removeprefix("step-")) if saved else 0
if saved:
    sync.load(saved[-1])
    print_here(f"continued from step {begin}")

text = "".join(path.read_text() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("a*.py")))
bytes_ = torch.tensor(list(text.encode()[:400_000]), dtype=torch.uint8)
for step in range(begin, told.steps):
    draw = torch.Generator().manual_seed(1000 * step + dist.get_rank())  # each rank, so each site, its own data
    for micro in range(2):  # gradient accumulation
        net.set_requires_gradient_sync(micro == 1)
        starts = torch.randint(len(bytes_) - 129, (8,), generator=draw)
        x = torch.stack([bytes_[s : s + 129] for s in starts]).long().to(device)
        loss = cross_entropy(net(x[:, :-1]).float().flatten(0, 1), x[:, 1:].flatten())
        (loss / 2).backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 16 == 15:
        print_here(f"step {step + 1}: loss {loss.item():.3f}")
        sync.save(told.folder / f"step-{step + 1:06d}")

sync.finish()  # all sites have the same weights now
stats = sync.stats()
sent, every = stats.bytes_sent / 1e6, stats.dense_bytes / 1e6
print_here(f"sent to the other site: {sent:.1f} MB; after every step it would be {every:.0f} MB")
sync.close()
dist.destroy_process_group()
