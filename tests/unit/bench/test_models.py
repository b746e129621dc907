from pathlib import Path

import pytest
import torch

from fences import blocks
from thinwire.tools.bench.models.registry import build_model
from thinwire.tools.bench.models.text import standard_library
from thinwire.tools.bench.models.workload import Workload
from thinwire.tools.bench.row_on_rank import at_rate

SIZES = {"chargpt": (10_868_736, 0), "resnet18": (11_173_962, 0), "mlp": (100e6, 0.01), "bert-small": (28.8e6, 0.02)}
SMALL = ["chargpt:layers=1:width=32:heads=2:batch=2", "mlp:width=64:layers=2", "resnet18:width=8:batch=2:classes=100"]


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name):
    if name == "bert-small":
        pytest.importorskip("transformers")
    size, within = SIZES[name]
    with torch.device("meta" if name == "mlp" else "cpu"):
        assert build_model(name).parameters == pytest.approx(size, rel=within)


@pytest.mark.parametrize("name", SMALL)
def test_one_backward_reaches_every_parameter_and_is_reproducible(name):
    losses = []
    for _ in range(2):
        workload = build_model(name, seed=1)
        loss = workload.loss(workload.model, 0, 0)
        loss.backward()
        losses.append(loss.item())
        assert all(p.grad is not None and p.grad.isfinite().all() for p in workload.model.parameters())
    assert losses[0] == losses[1]


def test_held_out_loss_of_a_fresh_chargpt_is_that_of_guessing():
    workload = build_model(SMALL[0])
    assert workload.evaluate(workload.model, 0, 0).item() == pytest.approx(5.545, abs=0.15)


def test_held_out_data_is_seen_in_evaluation_mode_and_leaves_nothing_behind():
    """Batch norms keep their statistics, dropout is off, and what the user froze stays in its own mode."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2))
    model[0].eval()
    seen = []

    def evaluate(model, step, rank):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(rank))
        found = model(x).square().mean()
        seen.append((model.training, model[1].training, found.requires_grad, found.item()))
        return found

    workload = Workload("own", model, evaluate, None, "", evaluate)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    assert workload.held_out_loss(3) == workload.held_out_loss(3) == seen[0][3]
    assert seen[0][:3] == (False, False, False)
    assert [m.training for m in model.modules()] == [True, False, True, True]
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert Workload("own", model, evaluate, None, "").held_out_loss() is None


@pytest.mark.parametrize("name", [SMALL[0], SMALL[2], "digits"])
def test_held_out_data_is_no_training_data_and_differs_between_ranks_where_it_is_drawn(name):
    workload = build_model(name)
    model = workload.model.eval()
    losses = [workload.loss(model, step, rank).item() for step in range(3) for rank in range(2)]
    assert workload.held_out_loss(0) not in losses
    assert (workload.held_out_loss(0) == workload.held_out_loss(1)) == (name == "digits")


def test_chargpt_is_trained_with_fused_adamw_or_with_torchs_default():
    for name, fused in ((SMALL[0], True), (f"{SMALL[0]}:fused=false", None)):
        workload = build_model(name)
        assert workload.optimizer(workload.model).defaults["fused"] is fused
        assert ("default AdamW" in workload.describe) is (fused is None)


def test_a_factor_on_the_rate_also_holds_under_a_scheduler():
    """A race tries 0.5, 1 and 2 times the rate: a scheduler would set the rate back, and all three would be alike."""

    def optimizer(model):
        first, second = model.parameters()
        made = torch.optim.SGD([{"params": [first]}, {"params": [second], "lr": 0.5}], lr=0.1)
        warm = torch.optim.lr_scheduler.LambdaLR(made, lambda step: min(1.0, (step + 1) / 4))
        made.register_step_post_hook(lambda *_: warm.step())
        return made

    model = torch.nn.Linear(2, 2)
    made = at_rate(Workload("linear", model, None, optimizer, ""), 2.0).optimizer(model)
    rates = []
    for _ in range(5):
        rates.append([group["lr"] for group in made.param_groups])
        made.step()
    assert rates[0] == pytest.approx([0.05, 0.25])
    assert rates[-1] == pytest.approx([0.2, 1.0])
    there = optimizer(model)
    assert at_rate(Workload("linear", model, None, lambda _: there, ""), 2.0).optimizer(model) is there
    assert there.param_groups[1]["lr"] == pytest.approx(0.25)
    assert torch.optim.SGD(model.parameters(), lr=0.1).param_groups[0]["lr"] == 0.1


def test_what_a_user_draws_is_the_same_each_time(tmp_path, monkeypatch):
    """From torch, random and numpy; another seed gives other weights."""
    (tmp_path / "drawn_model.py").write_text(
        "import random, numpy, torch\n"
        "def build():\n"
        "    model = torch.nn.Linear(2, 1)\n"
        "    model.drawn = random.random(), numpy.random.rand(), model.weight.sum().item()\n"
        "    return model, lambda model, step, rank: model.weight.sum()\n"
    )
    monkeypatch.chdir(tmp_path)
    first, again, other = (build_model("drawn_model:build", seed).model.drawn for seed in (1, 1, 2))
    assert first == again
    assert all(a != b for a, b in zip(first, other))


def test_a_workload_clips_and_warms_up_in_hooks_as_the_page_says():
    """All averaged gradients are clipped before the step; a race's factor holds for the rates of the schedule."""
    page = (Path(__file__).parents[3] / "docs/commands.md").read_text()
    names = {}
    exec(next(block.code for block in blocks(page) if "def clipped" in block.code), names)
    workload = at_rate(names["clipped"](), 2.0)
    optimizer = workload.optimizer(workload.model)
    rates, norms = [], []
    optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
    for step in range(3):
        (100 * workload.loss(workload.model, step, 0)).backward()
        optimizer.step()
        norms.append(torch.cat([p.grad.view(-1) for p in workload.model.parameters()]).norm().item())
        optimizer.zero_grad()
    assert norms == pytest.approx([1.0] * 3, abs=1e-4)
    assert rates == pytest.approx([2e-3 * (0.1 + 0.9 * step / 50) for step in range(3)])


def test_batches_of_the_corpus():
    """The same step and rank give the same text, others another; held-out text and shares are apart."""
    corpus = standard_library()
    first, target = corpus.batch(4, 32, step=3, rank=1)
    assert torch.equal(first, corpus.batch(4, 32, step=3, rank=1)[0])
    assert torch.equal(first[:, 1:], target[:, :-1])
    for step, rank, validation in ((4, 1, False), (3, 0, False), (3, 1, True)):
        assert not torch.equal(first, corpus.batch(4, 32, step=step, rank=rank, validation=validation)[0])
    text = bytes(corpus.train.tolist())
    assert b"import " in text
    assert len(text) > 1_000_000
    assert corpus.validation.numel() > 100_000
    pieces = [bytes(piece.tolist()) for piece in corpus.train.tensor_split(3)]
    for rank in range(3):
        for row in corpus.batch(8, 64, step=0, rank=rank, shares=3)[0]:
            assert [bytes(row.tolist()) in piece for piece in pieces] == [rank == other for other in range(3)]
