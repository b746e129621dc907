"""Hugging Face's Trainer with ``ThinwireCallback``: the numbers of ``attach``, through the Trainer's checkpoints."""

import importlib
import importlib.util
import os
import shutil
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
    Net,
    Points,
    check,
    check_misuse,
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

NEEDED = ("accelerate", "transformers")

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in NEEDED), reason="transformers or accelerate is missing"
    ),
]

STEPS = 4


def _trainer(net, folder, steps, **more):
    from transformers import Trainer, TrainingArguments

    forget()
    arguments = TrainingArguments(
        str(folder), use_cpu=True, max_steps=steps, per_device_train_batch_size=ROWS, save_steps=STEPS,
        gradient_accumulation_steps=ACCUMULATE, max_grad_norm=CLIP, learning_rate=LR, lr_scheduler_type="constant",
        report_to=[], disable_tqdm=True, logging_strategy="no", ddp_bucket_cap_mb=SMALL,
        ddp_find_unused_parameters=False, dataloader_pin_memory=False, **more,
    )  # fmt: skip
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)
    data, some = Points(2 * STEPS, named=True), Points(1, named=True)
    return Trainer(net, arguments, train_dataset=data, eval_dataset=some, optimizers=(optimizer, None))


def _trained(folder, method, options):
    """Four steps and a checkpoint; another trainer, model and callback resume from it, for four more."""
    from thinwire.adapters.trainer import ThinwireCallback

    fed, losses = [], []
    for part in range(2):
        net = Net()
        trainer = _trainer(net, Path(folder, method), STEPS * (1 + part))
        callback = ThinwireCallback(trainer, method, **options)
        trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=bool(part))
        fed += net.fed
        losses += net.losses
    return compared(net, callback.sync, fed, losses, method, options)


def _trained_locally(folder, method, options):
    """As above, under local steps, with an evaluation at each checkpoint."""
    from safetensors.torch import load_file

    from thinwire.adapters.trainer import ThinwireCallback

    class Seen(Net):
        def forward(self, x, y):
            if self.training:
                return super().forward(x, y)
            seen.append((trainer.state.global_step, [p.detach().clone() for p in self.parameters()]))
            return {"loss": (self.net(x) - y).square().mean(), "logits": x}

    fed, losses, seen, at = [], [], [], Path(folder, f"{method} locally")
    for part in range(2):
        net = Seen()
        trainer = _trainer(net, at, STEPS * (1 + part), eval_strategy="steps", eval_steps=STEPS)
        callback = ThinwireCallback(trainer, method, **options)
        trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=bool(part))
        fed += net.fed
        losses += net.losses
    found = load_file(at / f"checkpoint-{STEPS}" / "model.safetensors")
    saved = [found[name] for name, _ in net.named_parameters()]
    assert {step for step, _ in seen} == {STEPS, 2 * STEPS}
    result = locally_compared(net, callback.sync, fed, losses, method, options, saved=saved, at=STEPS, seen=seen)
    callback.sync.close()
    return result


def _best_and_again(folder):
    """The best model is what remains after training; another training goes on from it."""
    from safetensors.torch import load_file

    from thinwire.adapters.trainer import ThinwireCallback

    net = Net()
    more = {"eval_strategy": "steps", "eval_steps": STEPS, "load_best_model_at_end": True, "label_names": ["y"]}
    trainer = _trainer(net, Path(folder, "best"), STEPS + 2, **more)
    callback = ThinwireCallback(trainer, "local", sync_every=3)
    trainer.add_callback(callback)
    trainer.train()
    best = load_file(Path(trainer.state.best_model_checkpoint, "model.safetensors"))
    kept = all(torch.equal(best[name], p) for name, p in net.named_parameters())
    trainer.args.load_best_model_at_end = False
    trainer.train()
    weights = [p.detach().numpy() for p in net.parameters()]
    callback.sync.close()
    return kept, callback.sync.stats().steps, weights


def _trained_twice(folder):
    """One trainer trains twice, from step 0 both times: the DDP module, the hook and what is owed stay."""
    from thinwire.adapters.trainer import ThinwireCallback

    net = Net()
    trainer = _trainer(net, Path(folder, "twice"), STEPS, save_strategy="no")
    callback = ThinwireCallback(trainer, "acp", rank=2)
    trainer.add_callback(callback)
    trainer.train()
    first = callback.sync
    trainer.train()
    return first is callback.sync, first.stats().steps


def _resumed(folder, source, at, **options):
    """What resuming from a checkpoint elsewhere, or a spoilt one, is answered with."""
    from thinwire.adapters.trainer import ThinwireCallback

    trainer = _trainer(Net(), Path(folder, at), STEPS + 1, save_strategy="no")
    callback = ThinwireCallback(trainer, "acp", rank=2, **options)
    trainer.add_callback(callback)
    message = sentence(lambda: trainer.train(resume_from_checkpoint=source))
    return message, callback.sync.state.step


@quiet_rank()
def _everything(rank, size, folder):
    trained = {method: _trained(folder, method, options) for method, options in METHODS.items()}
    source = str(Path(folder, "acp", f"checkpoint-{STEPS}"))
    other = str(Path(folder, "acp", f"checkpoint-{2 * STEPS}"))
    if rank == 0:
        shutil.copytree(other, Path(folder, "mixed", f"checkpoint-{STEPS}"))
    torch.distributed.barrier()
    trainer = _trainer(Net(), folder, 1)
    return {
        "trained": trained,
        "local": {method: _trained_locally(folder, method, options) for method, options in LOCALS.items()},
        "best": _best_and_again(folder),
        "twice": _trained_twice(folder),
        "elsewhere": _resumed(folder, source, "elsewhere"),
        "named": _resumed(folder, source, "elsewhere", resume_from=source),
        "mixed": _resumed(folder, source, "mixed"),
        "files": sorted(os.listdir(source)),
        "misuse": misuse("trainer", lambda m, method, **options: m.ThinwireCallback(trainer, method, **options)),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("trainer"))


@pytest.fixture(scope="module")
def two(folder):
    return run(_everything, 2, folder, seconds=250)


@pytest.mark.parametrize("method", METHODS)
def test_equals_attach_also_after_a_resume(two, method):
    """With accumulation and clipping, in several buckets, over a checkpoint of the Trainer's own; bit for bit."""
    for result in two:
        check(result["trained"][method], method, 2 * STEPS)


@pytest.mark.parametrize("method", LOCALS)
def test_local_steps_equal_attach_also_after_a_resume(two, method):
    """Evaluation and the Trainer's checkpoint have the outer weights, ``train`` ends with equal ones; bit for bit."""
    for result in two:
        assert all(result["local"][method].values()), result["local"][method]


def test_the_best_model_stays_and_a_second_train_ends_with_equal_weights(two):
    (kept, steps, weights), (kept_there, _, others) = (result["best"] for result in two)
    assert kept
    assert kept_there
    assert steps == 2 * (STEPS + 2)
    assert all((a == b).all() for a, b in zip(weights, others))


def test_every_rank_has_a_file_in_the_checkpoint(two):
    assert {"thinwire_rank0.pt", "thinwire_rank1.pt", "trainer_state.json"} <= set(two[0]["files"])


def test_a_second_train_keeps_the_hook(two):
    for result in two:
        assert result["twice"] == (True, 2 * STEPS)


def test_a_checkpoint_elsewhere_has_to_be_named(two):
    """Without its name residuals begin at zero, and the counter of steps with them."""
    for result in two:
        assert result["elsewhere"] == ("nothing was raised", 1)
        assert result["named"] == ("nothing was raised", STEPS + 1)


def test_residuals_of_other_weights_are_refused(two):
    for result in two:
        message, step = result["mixed"]
        assert message.startswith("ValueError: no state of thinwire's hook can be loaded from")
        assert "does not belong to the model's weights" in message
        assert step == 0


def test_bad_options_are_refused_at_once(two):
    for result in two:
        check_misuse(result["misuse"])


@quiet_rank()
def _alone(rank, size, folder):
    """One rank goes on from the checkpoint of two."""
    from thinwire.adapters.trainer import ThinwireCallback

    without_launcher()
    net = Net()
    trainer = _trainer(net, Path(folder, "alone"), STEPS + 2)
    source = str(Path(folder, "acp", f"checkpoint-{STEPS}"))
    callback = ThinwireCallback(trainer, "acp", rank=2, resume_from=source)
    trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=source)
    wrong = sentence(lambda: ThinwireCallback(net, "acp"))
    return callback.sync.stats(), net.losses, wrong


def test_one_rank_sends_nothing(two, folder):
    ((stats, losses, wrong),) = run(_alone, 1, folder, init=False)
    assert (stats.bytes_sent, stats.world_size) == (0, 1)
    assert "acp runs as ssgd" in stats.note
    assert len(losses) == 2 * ACCUMULATE
    assert wrong.startswith("TypeError: ThinwireCallback takes the Trainer first")


@quiet_rank()
def _page(rank, size, folder, block="trainer"):
    return run_block(block, folder).callback.sync.stats()


def test_the_page_runs_on_two_ranks(tmp_path):
    for stats in run(_page, 2, str(tmp_path), init=False):
        assert stats.method == "acp"
        assert 0 < stats.bytes_sent < stats.dense_bytes
    assert (tmp_path / "out" / "checkpoint-8" / "thinwire_rank1.pt").exists()


def test_the_page_runs_on_two_ranks_under_local_steps(tmp_path):
    for stats in run(_page, 2, str(tmp_path), "trainer_local", init=False):
        assert stats.method == "local"
        assert 0 < stats.bytes_sent < stats.dense_bytes / 2
    assert (tmp_path / "out" / "checkpoint-8" / "thinwire_rank1.pt").exists()


@pytest.mark.parametrize("name", NEEDED)
def test_without_its_packages_one_sentence(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "thinwire.adapters.trainer", raising=False)
    with pytest.raises(ImportError, match=rf"{name} is missing: pip install 'thinwire\[accelerate,transformers\]'"):
        importlib.import_module("thinwire.adapters.trainer")
