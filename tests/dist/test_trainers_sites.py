"""Accelerate and the Trainer with a model that a script has sharded inside each site: local steps between the sites."""

import importlib.util

import cases
import pytest
import torch
from adapter_cases import quiet_rank
from fsdp2_cases import WIDTH, Net, sharded, whole
from test_sites import SHARDS, SITES, attached, mesh

from spawned import run

pytestmark = pytest.mark.dist
OPTIONS = {"sync_every": 3, "codec": "int8", "start_compression_step": 0}
STEPS, ROWS, LR = 6, 4, 0.05


class Fed(Net):
    """It keeps the batches of training, in order."""

    def __init__(self):
        super().__init__()
        self.fed = []

    def forward(self, x, y=None):
        out = super().forward(x)
        if y is None:
            return out
        self.fed.append((x.clone(), y.clone()))
        return {"loss": (out - y).square().mean()}


class Points(torch.utils.data.Dataset):
    def __init__(self, named):
        draw = torch.Generator().manual_seed(3)
        rows = STEPS * ROWS * SITES * SHARDS
        self.x, self.y = torch.randn(rows, WIDTH, generator=draw), torch.randn(rows, 5, generator=draw)
        self.named = named

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "y": self.y[i]} if self.named else (self.x[i], self.y[i])


def _sgd(net):
    return torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)


def _loop(fed):
    """Weights of a plain loop with ``fsdp2.attach`` on the same batches, at the outer weights and in the end."""
    net, optimizer, sync = attached(mesh(), Fed(), optimizer=_sgd, **OPTIONS)
    for x, y in fed:
        net(x, y)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    with sync.outer_weights():
        outer = whole(net)
    sync.finish()
    sync.close()
    return outer, whole(net)


def _equal(some, others):
    return all(torch.equal(x, others[name]) for name, x in some.items())


def _told(net, sync, outer):
    ended, fed, sent = whole(net), net.fed, sync.stats().bytes_sent
    sync.close()
    wanted, last = _loop(fed)
    place = {name: x.tolist() for name, x in ended.items()}
    return {
        "outer weights": _equal(outer, wanted), "weights": _equal(ended, last), "fed": float(fed[0][0].sum()),
        "steps": len(fed), "sent": sent, "ended": place,
    }  # fmt: skip


@quiet_rank()
def _accelerate(rank, size, as_on_cards):
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    from thinwire.adapters.accelerate import register_comm_hook

    accelerator, on = Accelerator(cpu=True), mesh()
    if as_on_cards:  # Accelerate takes its own FSDP2 on accelerators only
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    net = sharded(on["shard"], Fed())
    optimizer = _sgd(net)
    data = torch.utils.data.DataLoader(Points(named=False), batch_size=ROWS)
    if as_on_cards:
        net, optimizer, data = accelerator.prepare(net, optimizer, data)
    else:
        optimizer, data = accelerator.prepare(optimizer, data)
    unsited = cases.said(lambda: register_comm_hook(accelerator, net, "local", optimizer=optimizer, sync_every=3))
    needless = cases.said(lambda: register_comm_hook(accelerator, net, "ssgd", sites=on["site"]))
    sync = register_comm_hook(accelerator, net, "local", optimizer=optimizer, sites=on["site"], **OPTIONS)
    for x, y in data:
        with accelerator.accumulate(net):
            accelerator.backward(net(x, y)["loss"])
            accelerator.clip_grad_norm_(net.parameters(), 1e6)
            optimizer.step()
            optimizer.zero_grad()
    with sync.outer_weights():
        outer = whole(net)
    sync.finish()
    return _told(net, sync, outer) | {"unsited": unsited, "needless": needless}


@quiet_rank()
def _trainer(rank, size, folder):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from thinwire.adapters.trainer import ThinwireCallback

    def made(net, **more):
        net.is_distributed_loading_by_transformers = True
        arguments = TrainingArguments(
            folder, use_cpu=True, max_steps=STEPS, per_device_train_batch_size=ROWS, max_grad_norm=1e6,
            learning_rate=LR, lr_scheduler_type="constant", report_to=[], disable_tqdm=True, logging_strategy="no",
            dataloader_pin_memory=False, **more,
        )  # fmt: skip
        return Trainer(net, arguments, train_dataset=Points(named=True), optimizers=(_sgd(net), None))

    on, seen = mesh(), []
    net = sharded(on["shard"], Fed())
    trainer = made(net, save_strategy="no")
    callback = ThinwireCallback(trainer, "local", sites=on["site"], **OPTIONS)
    trainer.add_callback(callback)

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == STEPS:
                with callback.sync.outer_weights():
                    seen.append(whole(net))

    trainer.add_callback(Look())
    trainer.train()
    (outer,) = seen
    found = _told(net, callback.sync, outer)
    other = sharded(on["shard"], Fed())
    saving = made(other, save_strategy="steps", save_only_model=True)
    callback = ThinwireCallback(saving, "local", sites=on["site"], **OPTIONS)
    refused = cases.said(lambda: callback.on_train_begin(saving.args, saving.state, saving.control))
    needless = cases.said(lambda: ThinwireCallback(saving, "ssgd", sites=on["site"]))
    return found | {"unsaved": refused, "needless": needless}


def check(found):
    for told in found:
        assert told["outer weights"]
        assert told["weights"]
        assert told["steps"] == STEPS
        assert told["sent"] > 0
        assert "sites= is for local steps" in told["needless"]
        assert told["ended"] == found[0]["ended"]  # both sites
    assert len({told["fed"] for told in found}) == SITES * SHARDS  # each rank has its own data


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
@pytest.mark.parametrize("as_on_cards", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_accelerate_makes_the_steps_of_a_plain_loop(as_on_cards):
    found = run(_accelerate, SITES * SHARDS, as_on_cards, fresh=True)
    check(found)
    assert all('give sites=mesh["site"]' in told["unsited"] for told in found)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.slow
def test_the_trainer_makes_the_steps_of_a_plain_loop(tmp_path):
    found = run(_trainer, SITES * SHARDS, str(tmp_path), fresh=True)
    check(found)
    assert all('pass save_strategy="no"' in told["unsaved"] for told in found)
