"""Lightning's Trainer with ``ThinwireCallback``: the numbers of ``attach``, through Lightning's own checkpoints."""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from adapter_cases import (
    ACCUMULATE,
    CLIP,
    LOCALS,
    LR,
    METHODS,
    MOMENTUM,
    ROWS,
    SMALL,
    Points,
    Recording,
    check,
    check_misuse,
    compared,
    locally_compared,
    misuse,
    quiet_rank,
    run_block,
    sentence,
    without_launcher,
)  # fmt: skip

from spawned import run

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="Lightning is not installed"),
]

STEPS = 4  # in an epoch


def _module():
    return _module_class()()


def _module_class():
    from lightning.pytorch import LightningModule

    class Module(Recording, LightningModule):
        def training_step(self, batch, index):
            return self(*batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=LR, momentum=MOMENTUM)

    return Module


def _trainer(callbacks, epochs, ranks=2, **strategy):
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy

    return Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=DDPStrategy(bucket_cap_mb=SMALL, **strategy) if ranks > 1 else "auto",
        max_epochs=epochs,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=CLIP,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),  # else in the cwd
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _loader():
    return torch.utils.data.DataLoader(Points(STEPS), batch_size=ROWS)


def _trained(folder, method, options):
    """An epoch, a checkpoint; another trainer, module and callback go on for a second epoch."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from thinwire.adapters.lightning import ThinwireCallback

    fed, losses = [], []
    for epochs in (1, 2):
        net, callback = _module(), ThinwireCallback(method, **options)
        keep = ModelCheckpoint(Path(folder, method), filename="{epoch}", save_top_k=-1)
        path = Path(folder, method, "epoch=0.ckpt") if epochs == 2 else None
        _trainer([callback, keep], epochs).fit(net, _loader(), ckpt_path=path)
        fed += net.fed
        losses += net.losses
    return compared(net, callback.sync, fed, losses, method, options, _module)


def _trained_locally(folder, method, options):
    """As above, under local steps, with a validation after each epoch."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from thinwire.adapters.lightning import ThinwireCallback

    class Validated(_module_class()):
        def validation_step(self, batch, index):
            seen.append((self.trainer.fit_loop.total_batch_idx, [p.detach().clone() for p in self.parameters()]))

    fed, losses, seen = [], [], []
    for epochs in (1, 2):
        net, callback = Validated(), ThinwireCallback(method, **options)
        keep = ModelCheckpoint(Path(folder, f"{method} locally"), filename="{epoch}", save_top_k=-1)
        path = Path(folder, f"{method} locally", "epoch=0.ckpt") if epochs == 2 else None
        _trainer([callback, keep], epochs).fit(net, _loader(), _loader(), ckpt_path=path)
        fed += net.fed
        losses += net.losses
    saved = torch.load(Path(folder, f"{method} locally", "epoch=0.ckpt"), weights_only=True)["state_dict"].values()
    steps = [(STEPS * (1 + (batch >= STEPS * ACCUMULATE)), weights) for batch, weights in seen if batch > 0]
    assert len(steps) > 4
    return locally_compared(
        net, callback.sync, fed, losses, method, options, saved=saved, at=STEPS, seen=steps, make=_module
    )


def _manually(folder):
    """Under manual optimization Lightning switches DDP's averaging on for every backward."""
    from lightning.pytorch import LightningModule

    from thinwire.adapters.lightning import ThinwireCallback

    class Manual(Recording, LightningModule):
        automatic_optimization = False

        def training_step(self, batch, index):
            self.manual_backward(self(*batch)["loss"])
            grads.append(next(self.parameters()).grad.clone().numpy())
            self.optimizers().step()
            self.optimizers().zero_grad()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=LR)

    grads, net, callback = [], Manual(), ThinwireCallback("local", sync_every=3)
    trainer = _trainer([callback], 1)
    trainer.accumulate_grad_batches, trainer.gradient_clip_val = 1, None
    trainer.fit(net, _loader())
    first = [p.detach().clone() for p in net.parameters()]
    trainer.fit_loop.max_epochs = 2
    trainer.fit(net, _loader())  # again, with another DDP module
    return grads[0], callback.sync.stats().steps, not torch.equal(first[0], next(net.parameters()))


def _fitted_twice():
    """One trainer, one callback: a second ``fit`` begins with what the first one still owed. Then an exception."""
    from thinwire.adapters.lightning import ThinwireCallback

    class Watched(type(_module())):
        def on_train_start(self):
            owed.append({name: x.clone() for name, x in callback.sync.state.residuals.items()})

    owed, net, callback = [], None, ThinwireCallback("acp", rank=2)
    net, trainer = Watched(), _trainer([callback], 1)
    trainer.fit(net, _loader())
    left = {name: x.clone() for name, x in callback.sync.state.residuals.items()}
    trainer.fit_loop.max_epochs = 2
    trainer.fit(net, _loader())
    kept = all(torch.equal(left[name], owed[1][name]) for name in left)
    callback.on_exception(trainer, net, RuntimeError())
    return len(left), kept, callback.sync.stats().steps, callback.state_dict()


def _checkpoint(folder):
    """What the file holds; read without unpickling."""
    saved = torch.load(Path(folder, "acp", "epoch=0.ckpt"), weights_only=True)["callbacks"]["ThinwireCallback"]
    return sorted({key.split("/")[1] for key in saved if key.startswith("residual/")}), saved["step"]


def _dropped():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    from thinwire.adapters.lightning import ThinwireCallback

    trainer = _trainer([ThinwireCallback("ssgd")], 1, ddp_comm_hook=fp16_compress_hook)
    return sentence(lambda: trainer.fit(_module(), _loader()))


@quiet_rank()
def _everything(rank, size, folder):
    return {
        "trained": {method: _trained(folder, method, options) for method, options in METHODS.items()},
        "local": {method: _trained_locally(folder, method, options) for method, options in LOCALS.items()},
        "manual": _manually(folder),
        "twice": _fitted_twice(),
        "checkpoint": _checkpoint(folder),
        "dropped": _dropped(),
        "misuse": misuse("lightning", lambda module, method, **options: module.ThinwireCallback(method, **options)),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("lightning"))


@pytest.fixture(scope="module")
def two(folder):
    return run(_everything, 2, folder, seconds=250)


@pytest.mark.parametrize("method", METHODS)
def test_equals_attach_also_after_a_resume(two, method):
    """With accumulation and clipping, in several buckets, over a checkpoint of Lightning's own; bit for bit."""
    for result in two:
        check(result["trained"][method], method, 2 * STEPS)


@pytest.mark.parametrize("method", LOCALS)
def test_local_steps_equal_attach_also_after_a_resume(two, method):
    """Validation and Lightning's checkpoint have the outer weights, ``fit`` ends with equal ones; bit for bit."""
    for result in two:
        assert all(result["local"][method].values()), result["local"][method]


def test_manual_optimization_leaves_each_rank_its_own_gradients(two):
    (own, steps, moved), (other, *_) = (result["manual"] for result in two)
    assert not (own == other).all()
    assert steps == 2 * STEPS
    assert moved


def test_a_second_fit_goes_on(two):
    for result in two:
        matrices, kept, steps, after_exception = result["twice"]
        assert matrices > 0
        assert kept
        assert steps == 2 * STEPS
        assert after_exception == {}


def test_the_checkpoint_holds_all_ranks(two):
    for result in two:
        assert result["checkpoint"] == (["0", "1"], STEPS)


def test_a_hook_that_lightning_would_drop_is_an_error(two):
    for result in two:
        assert result["dropped"].startswith("ValueError: the strategy was given ddp_comm_hook=, which it drops on cpu")


def test_bad_options_are_refused_at_once(two):
    for result in two:
        check_misuse(result["misuse"])


@quiet_rank()
def _alone(rank, size, folder):
    """One rank goes on from the checkpoint of two."""
    from thinwire.adapters.lightning import ThinwireCallback

    without_launcher()
    net, callback = _module(), ThinwireCallback("acp", rank=2)
    trainer = _trainer([callback], 2, ranks=1)
    trainer.fit(net, _loader(), ckpt_path=Path(folder, "acp", "epoch=0.ckpt"))
    trainer.save_checkpoint(Path(folder, "alone.ckpt"))
    return callback.sync.stats(), net.losses


def test_one_rank_sends_nothing(two, folder):
    ((stats, losses),) = run(_alone, 1, folder, init=False)
    assert (stats.bytes_sent, stats.world_size) == (0, 1)
    assert "acp runs as ssgd" in stats.note
    assert len(losses) == 2 * STEPS * ACCUMULATE


@quiet_rank()
def _alone_locally(rank, size, folder):
    """One rank goes on from the outer weights of two, and what was under way."""
    from thinwire.adapters.lightning import ThinwireCallback

    without_launcher()
    at = Path(folder, "diloco locally", "epoch=0.ckpt")
    net, callback = _module(), ThinwireCallback("diloco", **LOCALS["diloco"])
    begun = []
    net.on_train_batch_start = lambda *_: begun.append([p.detach().clone() for p in net.parameters()])
    trainer = _trainer([callback], 2, ranks=1)
    trainer.fit(net, _loader(), ckpt_path=at)
    trainer.save_checkpoint(Path(folder, "alone locally.ckpt"))
    saved = torch.load(at, weights_only=True)
    state = saved["callbacks"]["ThinwireCallback"]
    return begun[0], list(saved["state_dict"].values()), state["outer"]["fragments"][0]["due"], len(net.losses)


def test_one_rank_goes_on_from_the_outer_weights(two, folder):
    ((begun, outer, due, losses),) = run(_alone_locally, 1, folder, init=False)
    assert due is not None
    assert not all(torch.equal(a, b) for a, b in zip(begun, outer, strict=True))
    assert max(float((a - b).abs().max()) for a, b in zip(begun, outer)) < 0.1
    assert losses == 2 * STEPS * ACCUMULATE


@quiet_rank()
def _page(rank, size, folder, block="lightning"):
    return run_block(block, folder).callback.sync.stats()


def test_the_page_runs_on_two_ranks(tmp_path):
    for stats in run(_page, 2, str(tmp_path), init=False):
        assert stats.method == "acp"
        assert 0 < stats.bytes_sent < stats.dense_bytes


def test_the_page_runs_on_two_ranks_under_local_steps(tmp_path):
    for stats in run(_page, 2, str(tmp_path), "lightning_local", init=False):
        assert stats.method == "local"
        assert 0 < stats.bytes_sent < stats.dense_bytes / 2


def test_without_lightning_one_sentence(monkeypatch):
    for name in ("lightning", "pytorch_lightning", "lightning.pytorch"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "thinwire.adapters.lightning", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'thinwire\[lightning\]'"):
        importlib.import_module("thinwire.adapters.lightning")
