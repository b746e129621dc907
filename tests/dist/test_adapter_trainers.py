"""Accelerate, Lightning and Hugging Face's Trainer: the numbers of ``attach``, through each one's own checkpoints."""

import importlib
import importlib.util
import os
import shutil
import sys
from pathlib import Path

import numpy as np
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
    STEPS,
    Net,
    Points,
    Recording,
    check,
    compared,
    forget,
    locally_compared,
    misuse,
    quiet_rank,
    run_block,
    sentence,
    without_launcher,
)  # fmt: skip

from spawned import run

pytestmark = pytest.mark.dist


def _optimizer(net):
    return torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)


def _loader():
    return torch.utils.data.DataLoader(Points(STEPS), batch_size=ROWS)


def _clones(net):
    return [p.detach().clone() for p in net.parameters()]


class InTrainer:
    """A framework as the shared tests see it.

    Attributes:
        name: of the adapter; needs: packages, which the error names if they are missing.
        make: an untrained module. saved_on: of what the first half of a training leaves, the file of rank 1.
    """

    name, needs, hint = "trainer", ("accelerate", "transformers"), r"{} is missing: .*\[accelerate,transformers\]"
    on_page = "out/checkpoint-8/thinwire_rank1.pt"
    make = Net

    def trainer(self, net, folder, steps, **more):
        from transformers import Trainer, TrainingArguments

        forget()
        arguments = TrainingArguments(
            str(folder), use_cpu=True, max_steps=steps, per_device_train_batch_size=ROWS, save_steps=STEPS,
            gradient_accumulation_steps=ACCUMULATE, max_grad_norm=CLIP, learning_rate=LR, lr_scheduler_type="constant",
            report_to=[], disable_tqdm=True, logging_strategy="no", ddp_bucket_cap_mb=SMALL,
            ddp_find_unused_parameters=False, dataloader_pin_memory=False, **more,
        )  # fmt: skip
        data, some = Points(2 * STEPS, named=True), Points(1, named=True)
        return Trainer(net, arguments, train_dataset=data, eval_dataset=some, optimizers=(_optimizer(net), None))

    def called(self, trainer, method, **options):
        from thinwire.adapters.trainer import ThinwireCallback

        callback = ThinwireCallback(trainer, method, **options)
        trainer.add_callback(callback)
        return callback

    def half(self, at, part, method, options, seen=None):
        """Train the first half, which leaves a checkpoint, or the second, which goes on from it; note evaluations."""

        class Seen(Net):
            def forward(self, x, y):
                if self.training:
                    return super().forward(x, y)
                seen.append((trainer.state.global_step, _clones(self)))
                return {"loss": (self.net(x) - y).square().mean(), "logits": x}

        net = Seen()
        evaluating = {} if seen is None else {"eval_strategy": "steps", "eval_steps": STEPS}
        trainer = self.trainer(net, at, STEPS * (1 + part), **evaluating)
        callback = self.called(trainer, method, **options)
        trainer.train(resume_from_checkpoint=bool(part))
        return net, callback.sync

    def saved(self, at, net):
        from safetensors.torch import load_file

        found = load_file(Path(at, f"checkpoint-{STEPS}", "model.safetensors"))
        return [found[name] for name, _ in net.named_parameters()]

    def alone(self, folder):
        """One rank goes on from the checkpoint of two."""
        net = Net()
        trainer = self.trainer(net, Path(folder, "alone"), 3 * STEPS)
        source = str(Path(folder, "acp", f"checkpoint-{STEPS}"))
        callback = self.called(trainer, "acp", rank=2, resume_from=source)
        trainer.train(resume_from_checkpoint=source)
        return callback.sync, net

    def misuse(self, folder):
        trainer = self.trainer(Net(), folder, 1)
        return misuse("trainer", lambda m, method, **options: m.ThinwireCallback(trainer, method, **options))

    def more(self, rank, folder):
        """What only this framework has."""
        from thinwire.adapters.trainer import ThinwireCallback

        source = str(Path(folder, "acp", f"checkpoint-{STEPS}"))
        if rank == 0:
            shutil.copytree(Path(folder, "acp", f"checkpoint-{2 * STEPS}"), Path(folder, "mixed", Path(source).name))
        torch.distributed.barrier()
        return {
            "best": self.best_and_again(folder),
            "twice": self.trained_twice(folder),
            "elsewhere": self.resumed(folder, source, "elsewhere"),
            "named": self.resumed(folder, source, "elsewhere", resume_from=source),
            "mixed": self.resumed(folder, source, "mixed"),
            "files": sorted(os.listdir(source)),
            "wrong": sentence(lambda: ThinwireCallback(Net(), "acp")),
        }

    def best_and_again(self, folder):
        """The best model is what remains after training; another training goes on from it."""
        from safetensors.torch import load_file

        net = Net()
        more = {"eval_strategy": "steps", "eval_steps": STEPS, "load_best_model_at_end": True, "label_names": ["y"]}
        trainer = self.trainer(net, Path(folder, "best"), STEPS + 2, **more)
        callback = self.called(trainer, "local", sync_every=3)
        trainer.train()
        best = load_file(Path(trainer.state.best_model_checkpoint, "model.safetensors"))
        kept = all(torch.equal(best[name], p) for name, p in net.named_parameters())
        trainer.args.load_best_model_at_end = False
        trainer.train()
        callback.sync.close()
        return kept, callback.sync.stats().steps, [x.numpy() for x in _clones(net)]

    def trained_twice(self, folder):
        """One trainer trains twice, from step 0 both times: the DDP module, the hook and what is owed stay."""
        trainer = self.trainer(Net(), Path(folder, "twice"), STEPS, save_strategy="no")
        callback = self.called(trainer, "acp", rank=2)
        trainer.train()
        first = callback.sync
        trainer.train()
        return first is callback.sync, first.stats().steps

    def resumed(self, folder, source, at, **options):
        """What resuming from a checkpoint elsewhere, or a spoilt one, is answered with."""
        trainer = self.trainer(Net(), Path(folder, at), STEPS + 1, save_strategy="no")
        callback = self.called(trainer, "acp", rank=2, **options)
        message = sentence(lambda: trainer.train(resume_from_checkpoint=source))
        return message, callback.sync.state.step


class InLightning:
    """See ``InTrainer``."""

    name, needs, hint = "lightning", ("lightning",), r"pip install 'thinwire\[lightning\]'"
    also_missing = ("pytorch_lightning", "lightning.pytorch")
    on_page = None

    @staticmethod
    def make(**attributes):
        from lightning.pytorch import LightningModule

        class Module(Recording, LightningModule):
            def training_step(self, batch, index):
                return self(*batch)

            def configure_optimizers(self):
                return _optimizer(self)

        return type("Module", (Module,), attributes)()

    def trainer(self, callbacks, epochs, ranks=2, **strategy):
        from lightning.pytorch import Trainer
        from lightning.pytorch.callbacks import ModelCheckpoint
        from lightning.pytorch.strategies import DDPStrategy

        return Trainer(
            accelerator="cpu", devices=ranks, max_epochs=epochs, callbacks=callbacks, logger=False,
            strategy=DDPStrategy(bucket_cap_mb=SMALL, **strategy) if ranks > 1 else "auto",
            accumulate_grad_batches=ACCUMULATE, gradient_clip_val=CLIP,
            enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),  # else in the cwd
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip

    def half(self, at, part, method, options, seen=None):
        from lightning.pytorch.callbacks import ModelCheckpoint

        from thinwire.adapters.lightning import ThinwireCallback

        def validation_step(module, batch, index):
            if (batch := module.trainer.fit_loop.total_batch_idx) > 0:
                seen.append((STEPS * (1 + (batch >= STEPS * ACCUMULATE)), _clones(module)))

        net = self.make() if seen is None else self.make(validation_step=validation_step)
        callback = ThinwireCallback(method, **options)
        keep = ModelCheckpoint(at, filename="{epoch}", save_top_k=-1)
        path = Path(at, "epoch=0.ckpt") if part else None
        loader = None if seen is None else _loader()
        self.trainer([callback, keep], 1 + part).fit(net, _loader(), loader, ckpt_path=path)
        return net, callback.sync

    def saved(self, at, net):
        return torch.load(Path(at, "epoch=0.ckpt"), weights_only=True)["state_dict"].values()

    def alone(self, folder):
        from thinwire.adapters.lightning import ThinwireCallback

        net, callback = self.make(), ThinwireCallback("acp", rank=2)
        trainer = self.trainer([callback], 2, ranks=1)
        trainer.fit(net, _loader(), ckpt_path=Path(folder, "acp", "epoch=0.ckpt"))
        trainer.save_checkpoint(Path(folder, "alone.ckpt"))
        return callback.sync, net

    def misuse(self, folder):
        return misuse("lightning", lambda m, method, **options: m.ThinwireCallback(method, **options))

    def more(self, rank, folder):
        saved = torch.load(Path(folder, "acp", "epoch=0.ckpt"), weights_only=True)["callbacks"]["ThinwireCallback"]
        return {
            "manual": self.manually(),
            "twice": self.fitted_twice(),
            "checkpoint": (sorted({key.split("/")[1] for key in saved if key.startswith("residual/")}), saved["step"]),
            "dropped": self.dropped(),
            "averaged": [self.averaged(Path(folder, f"ema {first}"), first) for first in (True, False)],
            "their own average": self.of_their_own(),
        }

    def averaged(self, at, first):
        """Local steps beside Lightning's EMA: it is one of the outer weights, and a resume goes on with it."""
        from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

        from thinwire.adapters.lightning import ThinwireCallback

        def stepped(module, outputs, batch, index):
            if module.trainer.global_step == 1 + len(by_hand):
                with callback.sync.outer_weights():
                    outer, last = _clones(module), by_hand[-1] if by_hand else None
                by_hand.append(outer if last is None else [0.9 * a + 0.1 * b for a, b in zip(last, outer)])

        def validation_step(module, batch, index):
            if by_hand and index == 0:
                seen.append(max(float((a - b).abs().max()) for a, b in zip(_clones(module), by_hand[-1])))

        ends = []
        for path in (None, at / "epoch=0.ckpt"):
            by_hand, seen = [], []
            callback, ema = ThinwireCallback("local", sync_every=3, codec="int8"), EMAWeightAveraging(decay=0.9)
            keep = ModelCheckpoint(at, filename="{epoch}", save_top_k=-1)
            net = self.make(validation_step=validation_step, on_train_batch_end=stepped)
            trainer = self.trainer([callback, ema, keep] if first else [ema, callback, keep], 2)
            trainer.fit(net, _loader(), _loader(), ckpt_path=path)
            ends.append((torch.cat([x.reshape(-1) for x in _clones(net)]).numpy(), seen))
        return ends

    def of_their_own(self):
        from lightning.pytorch.callbacks import StochasticWeightAveraging

        from thinwire.adapters.lightning import ThinwireCallback

        trainer = self.trainer([ThinwireCallback("local", sync_every=3), StochasticWeightAveraging(0.01)], 1)
        return sentence(lambda: trainer.fit(self.make(), _loader()))

    def manually(self):
        """Under manual optimization Lightning switches DDP's averaging on for every backward."""
        from thinwire.adapters.lightning import ThinwireCallback

        def training_step(module, batch, index):
            module.manual_backward(module(*batch)["loss"])
            grads.append(next(module.parameters()).grad.clone().numpy())
            module.optimizers().step()
            module.optimizers().zero_grad()

        grads, callback = [], ThinwireCallback("local", sync_every=3)
        net, trainer = self.make(automatic_optimization=False, training_step=training_step), self.trainer([callback], 1)
        trainer.accumulate_grad_batches, trainer.gradient_clip_val = 1, None
        trainer.fit(net, _loader())
        first = _clones(net)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(net, _loader())  # again, with another DDP module
        return grads[0], callback.sync.stats().steps, not torch.equal(first[0], next(net.parameters()))

    def fitted_twice(self):
        """One trainer, one callback: a second ``fit`` begins with what the first one still owed. Then an exception."""
        from thinwire.adapters.lightning import ThinwireCallback

        def owes(*_):
            owed.append({name: x.clone() for name, x in callback.sync.state.residuals.items()})

        owed, callback = [], ThinwireCallback("acp", rank=2)
        net, trainer = self.make(on_train_start=owes), self.trainer([callback], 1)
        trainer.fit(net, _loader())
        owes()
        trainer.fit_loop.max_epochs = 2
        trainer.fit(net, _loader())
        kept = all(torch.equal(left, owed[2][name]) for name, left in owed[1].items())
        callback.on_exception(trainer, net, RuntimeError())
        return len(owed[1]), kept, callback.sync.stats().steps, callback.state_dict()

    def dropped(self):
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        from thinwire.adapters.lightning import ThinwireCallback

        trainer = self.trainer([ThinwireCallback("ssgd")], 1, ddp_comm_hook=fp16_compress_hook)
        return sentence(lambda: trainer.fit(self.make(), _loader()))


class InAccelerate:
    """See ``InTrainer``."""

    name, needs, hint = "accelerate", ("accelerate",), r"pip install 'thinwire\[accelerate\]'"
    on_page = "checkpoint/thinwire_rank1.pt"
    make = Net

    def accelerator(self, **options):
        """A new one, also where this process had one already."""
        from accelerate import Accelerator
        from accelerate.utils import DistributedDataParallelKwargs

        forget()
        buckets = DistributedDataParallelKwargs(bucket_cap_mb=SMALL, **options)
        return Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE, kwargs_handlers=[buckets])

    def prepared(self, accelerator, method=None, **options):
        """(net, model, optimizer, loader, sync): local steps are given the optimizer."""
        from thinwire.adapters.accelerate import register_comm_hook

        net, sync = Net(), None
        model, optimizer, loader = accelerator.prepare(net, _optimizer(net), _loader())
        if method is not None:
            given = {"optimizer": optimizer} if method in ("local", "diloco") else {}
            sync = register_comm_hook(accelerator, model, method, **given, **options)
        return net, model, optimizer, loader, sync

    def epoch(self, accelerator, model, optimizer, loader):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x, y)["loss"])
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()

    def half(self, at, part, method, options, seen=None):
        accelerator = self.accelerator()
        net, model, optimizer, loader, sync = self.prepared(accelerator, method, **options)
        if part:
            accelerator.load_state(at)
        self.epoch(accelerator, model, optimizer, loader)
        if not part:
            accelerator.save_state(at)
        if seen is not None and part:
            sync.finish()
        elif seen is not None:
            self.epoch(accelerator, model, optimizer, loader)  # else what is still under way would be waited for
            net.fed, net.losses = net.fed[: STEPS * ACCUMULATE], net.losses[: STEPS * ACCUMULATE]
            sync.close()
        return net, sync

    def saved(self, at, net):
        from safetensors.torch import load_file

        found = load_file(Path(at, "model.safetensors"))
        return [found[name] for name, _ in net.named_parameters()]

    def alone(self, folder):
        accelerator = self.accelerator()
        net, model, optimizer, loader, sync = self.prepared(accelerator, "acp", rank=2)
        accelerator.load_state(str(Path(folder, "acp")))
        self.epoch(accelerator, model, optimizer, loader)
        accelerator.save_state(str(Path(folder, "alone")))
        return sync, net

    def misuse(self, folder):
        accelerator = self.accelerator()
        return misuse("accelerate", lambda m, method, **o: m.register_comm_hook(accelerator, Net(), method, **o))

    def more(self, rank, folder):
        return {
            "their LocalSGD": self.against_its_own(),
            "ddp": self.back_to_ddp(rank),
            "refused": self.refused(rank, folder),
            "pair": self.two_models(folder),
            "main only": [self.main_process_only(rank, folder, method) for method in ("ssgd", "local")],
            "files": sorted(os.listdir(Path(folder, "acp"))),
        }

    def against_its_own(self):
        """Its LocalSGD, which averages every few steps and at the end; ours beside it."""
        from accelerate.local_sgd import LocalSGD

        def steps(every=lambda: None):
            for x, y in loader:
                accelerator.backward(model(x, y)["loss"])
                optimizer.optimizer.step()
                optimizer.optimizer.zero_grad()
                every()

        weights = []
        for ours in ({}, {"method": "local", "sync_every": 3, "codec": None, "fragment_sync_delay": 0}):
            accelerator = self.accelerator()
            net, model, optimizer, loader, sync = self.prepared(accelerator, **ours)
            if ours:
                steps()
                sync.finish()
                sync.close()
            else:
                with LocalSGD(accelerator, model, local_sgd_steps=3) as local_sgd:
                    steps(local_sgd.step)
            weights.append(_clones(net))
        return all(torch.equal(a, b) for a, b in zip(*weights, strict=True))

    def back_to_ddp(self, rank):
        """After ``close`` DDP averages again."""
        from thinwire.adapters.accelerate import register_comm_hook

        accelerator = self.accelerator()
        _, model, optimizer, _, sync = self.prepared(accelerator, "local")
        for _ in range(2):
            model(torch.full((2, 24), 1.0 + rank), torch.ones(2, 5))["loss"].backward()
            model.require_backward_grad_sync = True  # as trigger_sync_in_backward does: each keeps its own all the same
        apart = next(model.parameters()).grad.clone()
        optimizer.optimizer.zero_grad()
        sync.close()
        model(torch.full((2, 24), 1.0 + rank), torch.ones(2, 5))["loss"].backward()
        none = sentence(lambda: register_comm_hook(accelerator, model, "local"))
        needless = sentence(lambda: register_comm_hook(accelerator, model, "acp", optimizer=optimizer))
        return apart.numpy(), next(model.parameters()).grad.numpy(), none, needless

    def refused(self, rank, folder):
        """States of which a part is missing: rank 1's file; all (a folder of plain DDP). The model has a hook."""
        from accelerate.utils import DDPCommunicationHookType

        from thinwire.adapters.accelerate import register_comm_hook

        accelerator = self.accelerator()
        _, model, *_ = self.prepared(accelerator)
        accelerator.save_state(str(Path(folder, "plain")))
        sync = register_comm_hook(accelerator, model, "acp", rank=2)
        second = sentence(lambda: register_comm_hook(accelerator, model, "ssgd"))
        accelerator.load_state(str(Path(folder, "plain")))
        accelerator.save_state(str(Path(folder, "cut")))
        accelerator.wait_for_everyone()
        if rank == 1:
            Path(folder, "cut", "thinwire_rank1.pt").unlink()
        accelerator.wait_for_everyone()
        for _ in range(4):
            model(torch.full((2, 24), 1.0 + rank), torch.ones(2, 5))["loss"].backward()
        owed = float(sum(x.norm() for x in sync.state.residuals.values()))
        accelerator.load_state(str(Path(folder, "cut")))
        occupied = self.accelerator(comm_hook=DDPCommunicationHookType.FP16)
        _, theirs, *_ = self.prepared(occupied)
        both = sentence(lambda: register_comm_hook(occupied, theirs, "ssgd"))
        bare = sentence(lambda: register_comm_hook(accelerator, Net(), "ssgd"))
        wrong = sentence(lambda: register_comm_hook(model, accelerator, "ssgd"))
        return second, both, bare, wrong, owed, float(sum(x.norm() for x in sync.state.residuals.values()))

    def main_process_only(self, rank, folder, method):
        """A script that saves under ``if is_main_process``, at a rate that NumPy computed."""
        accelerator = self.accelerator()
        given = {"sync_every": 2} if method == "local" else {}
        net, model, optimizer, _, sync = self.prepared(accelerator, method, **given)
        for group in optimizer.param_groups if method == "local" else ():
            group["lr"] = np.float64(0.01)  # Accelerate's own file, with plain DDP, is then one that torch refuses
        for step in range(5):
            accelerator.backward(model(torch.full((2, 24), 1.0 + rank), torch.ones(2, 5))["loss"])
            optimizer.step()
            optimizer.zero_grad()
            if step == 3:  # local steps: after a round
                weights = _clones(net)
                if accelerator.is_main_process:
                    accelerator.save_state(str(Path(folder, f"main only {method}")))
        accelerator.wait_for_everyone()
        accelerator.load_state(str(Path(folder, f"main only {method}")))
        sync.close()
        return all(torch.equal(a, b) for a, b in zip(weights, net.parameters()))

    def two_models(self, folder):
        """Each has its own hook and its own files."""
        from thinwire.adapters.accelerate import register_comm_hook

        accelerator = self.accelerator()
        models = [accelerator.prepare(Net()) for _ in range(2)]
        topk = {"density": 0.1, "start_compression_step": 0}
        syncs = [register_comm_hook(accelerator, model, "topk", **topk) for model in models]
        for scale, model in enumerate(models, start=1):
            accelerator.backward(model(torch.ones(2, 24), scale * torch.ones(2, 5))["loss"])
        accelerator.save_state(str(Path(folder, "pair")))
        owed = [{name: x.clone() for name, x in sync.state.residuals.items()} for sync in syncs]
        for sync in syncs:
            for x in sync.state.residuals.values():
                x.zero_()
        accelerator.load_state(str(Path(folder, "pair")))
        back = all(torch.equal(x, sync.state.residuals[n]) for sync, old in zip(syncs, owed) for n, x in old.items())
        return back, any(not torch.equal(owed[0][name], owed[1][name]) for name in owed[0])


FRAMEWORKS = {framework.name: framework for framework in (InAccelerate(), InLightning(), InTrainer())}


def _needs(name):
    missing = any(importlib.util.find_spec(package) is None for package in FRAMEWORKS[name].needs)
    return pytest.param(name, marks=pytest.mark.skipif(missing, reason=f"{FRAMEWORKS[name].needs} are needed"))


# --- what all have: the numbers of attach -----------------------------------------------------------------------------


def _trained(framework, folder, method, options, seen=None):
    """Both halves of a training, the second with another module and hook: what is equal to a plain loop's."""
    fed, losses, at = [], [], str(Path(folder, method if seen is None else f"{method} locally"))
    for part in range(2):
        net, sync = framework.half(at, part, method, options, seen)
        fed += net.fed
        losses += net.losses
    if seen is None:
        return compared(net, sync, fed, losses, method, options, framework.make)
    assert {step for step, _ in seen} == (set() if framework.name == "accelerate" else {STEPS, 2 * STEPS})
    saved, make = framework.saved(at, net), framework.make
    found = locally_compared(net, sync, fed, losses, method, options, saved=saved, at=STEPS, seen=seen, make=make)
    sync.close()
    return found


@quiet_rank()
def _everything(rank, size, name, folder):
    framework = FRAMEWORKS[name]
    return {
        "trained": {method: _trained(framework, folder, method, options) for method, options in METHODS.items()},
        "local": {method: _trained(framework, folder, method, options, []) for method, options in LOCALS.items()},
        "misuse": framework.misuse(folder),
        **framework.more(rank, folder),
    }


@pytest.fixture(scope="module", params=map(_needs, FRAMEWORKS))
def two(request, tmp_path_factory):
    """(name, folder, what two ranks have found)."""
    folder = str(tmp_path_factory.mktemp(request.param))
    return request.param, folder, run(_everything, 2, request.param, folder, seconds=250)


def only(name):
    return pytest.mark.parametrize("two", [_needs(name)], indirect=True)


@pytest.mark.parametrize("method", METHODS)
def test_equals_attach_also_after_a_resume(two, method):
    """With accumulation and clipping, in several buckets, over a checkpoint of the framework's own; bit for bit."""
    for result in two[2]:
        check(result["trained"][method], method, 2 * STEPS)


@pytest.mark.parametrize("method", LOCALS)
def test_local_steps_equal_attach_also_after_a_resume(two, method):
    """Evaluation and the framework's checkpoint have the outer weights, training ends with equal ones; bit for bit."""
    for result in two[2]:
        assert all(result["local"][method].values()), result["local"][method]


def test_bad_options_are_refused_at_once(two):
    for found in (result["misuse"] for result in two[2]):
        assert "did you mean 'acp'" in found["method"]
        assert "unknown option of acp" in found["option"]
        assert "use thinwire.attach" in found["decoupled"]
        assert "chooses buckets too" in found["auto"]
        assert all(text.startswith("ValueError") for text in found.values())


@quiet_rank()
def _alone(rank, size, name, folder):
    without_launcher()
    sync, net = FRAMEWORKS[name].alone(folder)
    return sync.stats(), len(net.losses)


def test_one_rank_goes_on_from_two_and_sends_nothing(two):
    ((stats, losses),) = run(_alone, 1, *two[:2], init=False)
    assert (stats.bytes_sent, stats.world_size) == (0, 1)
    assert "acp runs as ssgd" in stats.note
    assert losses == 2 * STEPS * ACCUMULATE


@quiet_rank()
def _page(rank, size, folder, name, local):
    found = run_block(name, folder, local)
    return (found.sync if name == "accelerate" else found.callback.sync).stats()


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("name", map(_needs, FRAMEWORKS))
def test_the_page_runs_on_two_ranks(name, local, tmp_path):
    for stats in run(_page, 2, str(tmp_path), name, local, init=False):
        assert stats.method == ("local" if local else "powersgd")
        assert 0 < stats.bytes_sent < stats.dense_bytes / (1 + local)
    assert FRAMEWORKS[name].on_page is None or (tmp_path / FRAMEWORKS[name].on_page).exists()


@pytest.mark.parametrize(("name", "missing"), [(f.name, needed) for f in FRAMEWORKS.values() for needed in f.needs])
def test_without_its_packages_one_sentence(name, missing, monkeypatch):
    for package in (missing, *getattr(FRAMEWORKS[name], "also_missing", ())):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"thinwire.adapters.{name}", raising=False)
    with pytest.raises(ImportError, match=FRAMEWORKS[name].hint.format(missing)):
        importlib.import_module(f"thinwire.adapters.{name}")


# --- the Trainer alone ------------------------------------------------------------------------------------------------


@only("trainer")
def test_trainer(two):
    """Its best model stays, a second ``train`` keeps the hook, and checkpoints elsewhere must be named."""
    results = two[2]
    (kept, steps, weights), (kept_there, _, others) = (result["best"] for result in results)
    assert kept
    assert kept_there
    assert steps == 2 * (STEPS + 2)
    assert all((a == b).all() for a, b in zip(weights, others))  # a second train ends with equal weights
    for result in results:
        assert {"thinwire_rank0.pt", "thinwire_rank1.pt", "trainer_state.json"} <= set(result["files"])
        assert result["twice"] == (True, 2 * STEPS)
        assert result["elsewhere"] == ("nothing was raised", 1)  # residuals begin at zero, and the counter of steps
        assert result["named"] == ("nothing was raised", STEPS + 1)
        message, step = result["mixed"]  # residuals of other weights
        assert message.startswith("ValueError: no state of thinwire's hook can be loaded from")
        assert "does not belong to the model's weights" in message
        assert step == 0
        assert result["wrong"].startswith("TypeError: ThinwireCallback takes the Trainer first")


# --- Lightning alone --------------------------------------------------------------------------------------------------


@only("lightning")
def test_lightning(two):
    """Manual optimization leaves each rank its own gradients, a second ``fit`` goes on, a checkpoint has all ranks."""
    results = two[2]
    (own, steps, moved), (other, *_) = (result["manual"] for result in results)
    assert not (own == other).all()
    assert steps == 2 * STEPS
    assert moved
    for result in results:
        matrices, kept, steps, after_exception = result["twice"]
        assert matrices > 0
        assert kept
        assert steps == 2 * STEPS
        assert after_exception == {}
        assert result["checkpoint"] == (["0", "1"], STEPS)
        for place, ((end, seen), (resumed, _)) in enumerate(result["averaged"]):
            assert len(seen) == 2
            assert max(seen) < 1e-6
            assert (end == resumed).all()
            assert (end == results[0]["averaged"][place][0][0]).all()
        assert "use lightning.pytorch.callbacks.WeightAveraging" in result["their own average"]
        assert result["dropped"].startswith("ValueError: the strategy was given ddp_comm_hook=, which it drops on cpu")


@quiet_rank()
def _alone_locally(rank, size, folder):
    """One rank goes on from the outer weights of two, and what was under way."""
    from thinwire.adapters.lightning import ThinwireCallback

    without_launcher()
    at = Path(folder, "diloco locally", "epoch=0.ckpt")
    net, callback = InLightning.make(), ThinwireCallback("diloco", **LOCALS["diloco"])
    begun = []
    net.on_train_batch_start = lambda *_: begun.append(_clones(net))
    trainer = InLightning().trainer([callback], 2, ranks=1)
    trainer.fit(net, _loader(), ckpt_path=at)
    trainer.save_checkpoint(Path(folder, "alone locally.ckpt"))
    saved = torch.load(at, weights_only=True)
    state = saved["callbacks"]["ThinwireCallback"]
    return begun[0], list(saved["state_dict"].values()), state["outer"]["fragments"][0]["due"], len(net.losses)


@only("lightning")
def test_one_rank_of_lightning_goes_on_from_the_outer_weights(two):
    ((begun, outer, due, losses),) = run(_alone_locally, 1, two[1], init=False)
    assert due is not None
    assert not all(torch.equal(a, b) for a, b in zip(begun, outer, strict=True))
    assert max(float((a - b).abs().max()) for a, b in zip(begun, outer)) < 0.1
    assert losses == 2 * STEPS * ACCUMULATE


# --- optimizers that keep a part of the weights -----------------------------------------------------------------------


class InTwoParts(torch.optim.SGD):
    """As schedule-free ones: ``eval()`` adds to the weights what ``train()`` takes off, a part in its state."""

    mode = True

    def eval(self):
        self._turn(False, 1.0)

    def train(self):
        self._turn(True, -1.0)

    def _turn(self, mode, sign):
        if self.mode is not mode:
            self.mode = self.param_groups[0]["train_mode"] = mode
            for p in self.param_groups[0]["params"]:
                p.data.add_(self.state[p].setdefault("part", torch.full_like(p, 0.1)), alpha=sign)


def _in_two_parts(net):
    optimizer = InTwoParts(net.parameters(), lr=LR)
    optimizer.param_groups[0]["train_mode"] = True
    return optimizer


@quiet_rank()
def _trainer_in_two_parts(rank, size, folder):
    framework, net = InTrainer(), Net()
    more = {"eval_strategy": "steps", "eval_steps": STEPS, "label_names": ["y"]}
    trainer = framework.trainer(net, folder, STEPS + 1, **more)
    trainer.optimizer = _in_two_parts(net)
    callback = framework.called(trainer, "local", sync_every=2)
    trainer.train()
    callback.sync.close()
    return trainer.state.global_step, trainer.optimizer.optimizer.mode, [x.numpy() for x in _clones(net)]


@pytest.mark.parametrize("name", [_needs("trainer")])
def test_the_trainer_ends_with_whole_weights_of_an_optimizer_that_keeps_a_part(name, tmp_path):
    """Its script cannot call ``eval()`` before the last average: it raised when all steps had been made."""
    (steps, training, first), (*_, second) = run(_trainer_in_two_parts, 2, str(tmp_path / "two parts"))
    assert (steps, training) == (STEPS + 1, False)
    assert all((a == b).all() for a, b in zip(first, second))


@quiet_rank()
def _refused_once(rank, size, folder):
    from safetensors.torch import load_file

    from thinwire.adapters.accelerate import register_comm_hook

    framework = InAccelerate()
    accelerator, net = framework.accelerator(), Net()
    model, optimizer, loader = accelerator.prepare(net, _in_two_parts(net), _loader())
    sync = register_comm_hook(accelerator, model, "local", optimizer=optimizer, sync_every=2)
    framework.epoch(accelerator, model, optimizer, loader)
    refused = sentence(lambda: accelerator.save_state(folder))
    optimizer.eval()
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()  # rank 0 writes the model
    saved = load_file(Path(folder, "model.safetensors"))
    with sync.outer_weights():
        outer = all(torch.equal(saved[name], p) for name, p in net.named_parameters())
    sync.close()
    return refused, outer


@pytest.mark.parametrize("name", [_needs("accelerate")])
def test_a_checkpoint_of_accelerate_that_was_refused_is_written_when_asked_for_again(name, tmp_path):
    """The refusal left the outer weights marked as lent, so the next call ended in an assertion without a word."""
    for refused, outer in run(_refused_once, 2, str(tmp_path / "twice")):
        assert "call optimizer.eval()" in refused
        assert outer


# --- Accelerate alone -------------------------------------------------------------------------------------------------


@only("accelerate")
def test_accelerate(two):
    """Its LocalSGD, DDP after local steps, states that lack a part, two models, files of the main process alone."""
    results = two[2]
    (apart, after, none, needless), (other, after_there, *_) = (result["ddp"] for result in results)
    assert not (apart == other).all()
    assert (after == after_there).all()
    assert none.startswith("ValueError: local steps are counted by the optimizer's")
    assert needless.startswith("ValueError: optimizer= is for local steps")
    for result in results:
        assert result["their LocalSGD"]
        assert {"thinwire_rank0.pt", "thinwire_rank1.pt", "model.safetensors"} <= set(result["files"])
        second, both, bare, wrong, owed, left = result["refused"]
        assert "already has a communication hook" in second
        assert "already has a communication hook" in both
        assert "choose plain DDP" in bare
        assert wrong.startswith("TypeError: register_comm_hook takes the Accelerator first")
        assert owed > 0.0
        assert left == 0.0  # as in a script that saves on the main process only
        assert result["main only"] == [True, True]
        assert result["pair"] == (True, True)


@quiet_rank()
def _more_locally(rank, size, folder):
    """Another number of ranks begins from the outer weights, after what was under way."""
    if size == 1:
        without_launcher()
    framework = InAccelerate()
    accelerator = framework.accelerator()
    net, model, optimizer, loader, sync = framework.prepared(accelerator, "diloco", **LOCALS["diloco"])
    accelerator.load_state(str(Path(folder, "diloco locally")))
    own = _clones(net)
    with sync.outer_weights():
        outer = _clones(net)
    framework.epoch(accelerator, model, optimizer, loader)
    sync.finish()
    sync.close()
    return [[x.numpy() for x in some] for some in (own, outer, _clones(net))]


@only("accelerate")
@pytest.mark.parametrize("size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_another_number_of_ranks_begins_from_the_outer_weights(two, size):
    ranks = run(_more_locally, size, two[1], init=size > 1)
    for own, outer, ended in ranks:
        for row, at_first, a, b, c, d in zip(own, ranks[0][0], own, outer, ended, ranks[0][2]):
            assert (row == at_first).all()
            assert (a == b).all()
            assert (c == d).all()
            assert not (a == c).all()
