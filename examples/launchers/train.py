"""One training, started by Ray Train (``python train.py local``) or by torchrun and what sets its variables."""

import os
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import thinwire as tw

OPTIONS = {  # such that two launchers end with the same bits; leave them out and thinwire measures and chooses
    "acp": {"rank": 4, "deterministic": True},
    "local": {"sync_every": 4, "codec": "int8"},
}


def train(config):
    """What every worker runs. The process group is there: Ray's, or torchrun's."""
    digits = load_digits()
    pixels = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sync = tw.attach(model, optimizer, config["method"], **OPTIONS.get(config["method"], {}))

    draw = torch.Generator().manual_seed(dist.get_rank())  # other samples on every worker
    for _ in range(400):
        batch = torch.randint(0, 1437, (32,), generator=draw)
        cross_entropy(model(pixels[batch]), labels[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
    if config["method"] == "local":
        sync.finish()  # the last average; from here on all workers hold the same model
    with torch.no_grad():
        found = model(pixels[1437:])
        loss = float(cross_entropy(found, labels[1437:]))
        accuracy = float((found.argmax(1) == labels[1437:]).float().mean())
    if dist.get_rank() == 0:
        sent = sync.stats().bytes_sent / 1e6
        print(f"{config['method']}: {accuracy:.1%} of what was held out, loss {loss!r}; {sent:.2f} MB sent by a worker")
    sync.close()


def main():
    config = {"method": sys.argv[1] if len(sys.argv) > 1 else "local"}
    if "RANK" in os.environ:  # torchrun, Slurm, a Kubernetes PyTorchJob
        dist.init_process_group("gloo")
        train(config)
        dist.destroy_process_group()
        return
    from ray.train import ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    TorchTrainer(
        train,
        train_loop_config=config,
        torch_config=TorchConfig(backend="gloo"),  # "nccl" where every worker has a card
        scaling_config=ScalingConfig(num_workers=2),
    ).fit()


if __name__ == "__main__":
    main()
