"""minGPT-ddp's loop: a trainer with snapshots, DataLoader and DistributedSampler, mixed precision."""

import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
from loops import GPT, LOSSY, WAYS, Trail, Wire, assert_equal, assert_ranks_equal, assert_trains, both, text
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import thinwire as tw
from spawned import run

pytestmark = pytest.mark.dist


class Characters(Dataset):
    """Pieces of a text, and the same one character on."""

    def __init__(self, codes, length=32):
        self.codes, self.length = codes, length

    def __len__(self):
        return (len(self.codes) - 1) // self.length

    def __getitem__(self, index):
        piece = self.codes[index * self.length : (index + 1) * self.length + 1]
        return piece[:-1], piece[1:]


class Trainer:
    """Owns the loaders, the wrapped model, the optimizer and the snapshot that rank 0 writes after an epoch."""

    def __init__(self, rank, way, method, how, mixed, snapshot, ours):
        codes = text()
        self.rank, self.mixed, self.snapshot, self.ours = rank, mixed, snapshot, ours
        self.trained, self.tested = self._loader(codes[:8193]), self._loader(codes[-2049:])
        self.model = GPT(dropout=0.1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
        self.scaler = torch.amp.GradScaler("cpu", enabled=mixed)
        self.epochs_run = 0
        if snapshot and os.path.exists(snapshot):
            self._read_snapshot()
        self.wire = Wire(way, self.model, self.optimizer, method, **how, **({"scaler": self.scaler} if ours else {}))
        if ours and os.path.exists(ours):
            self.epochs_run = tw.checkpoint.load(ours, self.model, self.optimizer, self.wire.ours)
        self.trail = Trail()

    def _loader(self, codes):
        data = Characters(codes)
        return DataLoader(data, batch_size=16, sampler=DistributedSampler(data))

    def _read_snapshot(self):
        saved = torch.load(self.snapshot)
        self.model.load_state_dict(saved["model_state"])
        self.optimizer.load_state_dict(saved["optimizer_state"])
        self.scaler.load_state_dict(saved["scaler_state"])
        self.epochs_run = saved["finished_epoch"]

    def _save_snapshot(self, epoch):
        torch.save(
            {
                "model_state": self.wire.raw.state_dict(),
                "optimizer_state": self.optimizer.state_dict(),
                "scaler_state": self.scaler.state_dict(),
                "finished_epoch": epoch,
            },
            self.snapshot,
        )

    def _run_batch(self, x, y, train):
        with torch.set_grad_enabled(train), torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.mixed):
            _, loss = self.wire.net(x, y)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            self.scaler.scale(loss).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)  # of the scaled gradients, as there
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.trail.step(loss, self.model)
        return float(loss.detach())

    def _run_epoch(self, epoch, loader, train):
        loader.sampler.set_epoch(epoch)
        self.wire.net.train(train)
        losses = [self._run_batch(x, y, train) for x, y in loader]
        return sum(losses) / len(losses)

    def train(self, epochs):
        for epoch in range(self.epochs_run, epochs):
            torch.manual_seed(100 * epoch + self.rank)  # of the dropout, so that a resumed epoch draws the same
            self._run_epoch(epoch, self.trained, True)
            if self.snapshot and self.rank == 0:
                self._save_snapshot(epoch + 1)
            if self.ours:
                tw.checkpoint.save(self.ours, self.model, self.optimizer, self.wire.ours, step=epoch + 1)
            self.trail.evaluated[epoch] = self._run_epoch(epoch, self.tested, False)
        return self.trail


def _train(rank, way, method="ssgd", *, epochs=3, mixed=True, snapshot=None, ours=None, **how):
    torch.manual_seed(42)
    trainer = Trainer(rank, way, method, how, mixed, snapshot, ours)
    with trainer.wire:
        return trainer.train(epochs)


def _exact(rank, size, mixed):
    return {way: _train(rank, way, mixed=mixed, epochs=2) for way in ("ddp", "hook", "attach")}


@pytest.mark.parametrize("mixed", [False, True])
def test_ssgd_is_ddp(mixed):
    results = run(_exact, 2, mixed)
    for found in results:
        for way in ("hook", "attach"):
            assert_equal(found[way], found["ddp"])
            assert found[way].evaluated == found["ddp"].evaluated
    assert_ranks_equal([found["attach"] for found in results])
    values = list(results[0]["ddp"].evaluated.values())
    assert values[-1] < values[0] - 0.2


def _lossy(rank, size, way):
    return both(partial(_train, rank), way)


@pytest.mark.slow  # nanoGPT and the language model have it in the short run
@pytest.mark.parametrize("way", WAYS)
def test_lossy_methods_train(way):
    assert_trains(run(_lossy, 2, way), falls=0.7, near=0.6)


def _resumed(rank, size, folder):
    pairs = []
    for number, (way, method, how) in enumerate(RESUMED):
        place = os.path.join(folder, str(number))
        kept = how | ({"snapshot": place} if method == "ssgd" else {"ours": place})
        whole = _train(rank, way, method, epochs=2, **how)
        _train(rank, way, method, epochs=1, **kept)
        dist.barrier()  # rank 0 has written
        pairs.append((way, method, whole, _train(rank, way, method, epochs=2, **kept)))
    return pairs


RESUMED = [("attach", "ssgd", {}), ("hook", "ssgd", {}), ("attach", *LOSSY[1]), ("attach", *LOSSY[-1])]


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path):
    for pairs in run(_resumed, 2, str(tmp_path)):
        for way, method, whole, rest in pairs:
            done = len(whole.weights) // 2
            assert len(rest.weights) == done
            assert whole.losses[done:] == rest.losses, (way, method)
            for a, b in zip(whole.weights[done:], rest.weights):
                assert torch.equal(a, b), (way, method)
            assert whole.evaluated[1] == rest.evaluated[1]
