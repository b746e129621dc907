"""What the tests of the trainers' adapters share: a model that keeps what it was fed, and ``attach`` as the oracle."""

import contextlib
import importlib
import importlib.util
import os
import re
import types
import warnings
from pathlib import Path

import cases
import torch
from torch import nn
from torch.utils.data import Dataset

import thinwire as tw

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
BLOCK = re.compile(r"^<!-- run on two ranks: (\w+) -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OTHER = re.compile(r"^<!-- another method -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
METHODS = {"acp": {"rank": 2, "start_compression_step": 2}}
SMALL = 0.003  # MiB: several buckets
CLIP, LR, MOMENTUM, ACCUMULATE = 0.2, 0.05, 0.9, 2
RANKS, ROWS = 2, 6
STEPS = 4  # of half a training


class Points(Dataset):
    """Rows of ``cases.batch``, for any number of ranks."""

    def __init__(self, steps, named=False):
        batches = [cases.batch(0, step) for step in range(steps * ACCUMULATE * RANKS)]
        self.x, self.y = (torch.cat(parts) for parts in zip(*batches))
        self.named = named

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "y": self.y[i]} if self.named else (self.x[i], self.y[i])


class Recording:
    """A module that gives its loss, and keeps the batches and losses of training, in order."""

    def __init__(self):
        super().__init__()
        self.net = cases.model()
        self.fed, self.losses = [], []

    def forward(self, x, y):
        loss = (self.net(x) - y).square().mean()
        self.fed.append((x.clone(), y.clone()))
        self.losses.append(loss.item())
        return {"loss": loss}


class Net(Recording, nn.Module):
    """For loops that take any module."""


def oracle(net, fed, method, options):
    """The losses and weights of a plain loop with ``attach``, on the batches that the framework's loop was fed."""
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)
    sync = tw.attach(net, optimizer, method, **options)
    for step in range(len(fed) // ACCUMULATE):
        micro = fed[step * ACCUMULATE : (step + 1) * ACCUMULATE]
        with sync.no_sync():
            for x, y in micro[:-1]:
                (net(x, y)["loss"] / ACCUMULATE).backward()
        (net(*micro[-1])["loss"] / ACCUMULATE).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    residuals = {name: x.clone() for name, x in sync.services.state.residuals.items()}
    sync.close()
    return net.losses, cases.weights(net), residuals


LOCALS = {
    "diloco": {"sync_every": 3, "codec": "int8", "outer": tw.Nesterov(0.7, 0.5), "fragment_sync_delay": 2},
}
"""Its rounds end in neither half of eight steps, so that a checkpoint is made in the midst of one."""


def local_oracle(net, fed, method, options):
    """The losses, the outer weights and those after ``finish`` of a plain loop with ``attach`` on the same batches."""
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)
    sync = tw.attach(net, optimizer, method, **options)
    outer = []
    for step in range(len(fed) // ACCUMULATE):
        for x, y in fed[step * ACCUMULATE : (step + 1) * ACCUMULATE]:
            (net(x, y)["loss"] / ACCUMULATE).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        with sync.outer_weights():
            outer.append(cases.weights(net))
    sync.finish()
    sync.close()
    return net.losses, outer, cases.weights(net)


def locally_compared(net, sync, fed, losses, method, options, *, saved, at, seen, make=Net):
    """What is equal to a plain loop's, bit for bit.

    Args:
        saved: the weights in the framework's own checkpoint, made after step ``at``.
        seen: (step, weights) of evaluations.
    """
    expected, outer, weights = local_oracle(make(), fed, method, options)
    everyone = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, (losses, [x.numpy() for x in cases.weights(net)]))
    return {
        "losses": losses == expected,
        "weights": _same(cases.weights(net), weights),
        "the checkpoint": _same(saved, outer[at - 1]),
        "evaluations": all(_same(found, outer[step - 1]) for step, found in seen),
        "equal on all ranks": all((a == b).all() for a, b in zip(everyone[0][1], everyone[1][1])),
        "each has trained by itself": everyone[0][0] != everyone[1][0],
        "sent": 0 < sync.stats().bytes_sent < sync.stats().dense_bytes,
    }


def _same(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def compared(net, sync, fed, losses, method, options, make=Net):
    """Differences to the oracle, of the same make: in losses, weights, residuals; with the counters."""
    expected, weights, residuals = oracle(make(), fed, method, options)
    ours = sync.state.residuals
    assert set(ours) == set(residuals)
    stats = sync.stats()
    return {
        "losses": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        "weights": max(float((a - b).abs().max()) for a, b in zip(cases.weights(net), weights, strict=True)),
        "residuals": max((float((ours[n] - residuals[n]).abs().max()) for n in residuals), default=0.0),
        "owed": max((float(x.norm()) for x in ours.values()), default=0.0),
        "moved": max(float((a - b).abs().max()) for a, b in zip(cases.weights(net), cases.weights(make()))),
        "steps": stats.steps,
        "sent": stats.bytes_sent,
        "dense": stats.dense_bytes,
    }


def check(found, method, steps):
    """One result of ``compared``: bit for bit."""
    assert (found["losses"], found["weights"], found["residuals"]) == (0.0, 0.0, 0.0)
    assert found["moved"] > 0.01
    assert found["steps"] == steps
    assert 0 < found["sent"] < found["dense"] / 2
    assert found["owed"] > 0


def sentence(call):
    """The error that a call raises, as text."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@contextlib.contextmanager
def quiet_rank():
    """Frameworks warn, choose threads, and remember where they run; a rank is used for other tests afterwards."""
    os.environ["OMP_NUM_THREADS"] = "1"  # else Accelerate takes more
    given = torch.distributed.is_initialized()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        forget()
        try:
            yield
        finally:
            forget()
            if torch.distributed.is_initialized() and not given:
                torch.distributed.destroy_process_group()


def forget():
    """Let Accelerate, and the Trainer with it, find out anew where they run."""
    if importlib.util.find_spec("accelerate") is not None:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(True)
        GradientState._reset_state()


def without_launcher():
    """As if this process had been started by hand."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)


def with_another_method(name, code):
    """The block with the line of that framework that the page gives for methods that exchange gradients."""
    lines = dict(re.findall(r"^# (\w+).*\n((?:[^#].*\n)+)", OTHER.search(PAGE.read_text())[1], re.MULTILINE))
    code, count = re.subn(r"^\w+ = .*\"local\".*\n", lines[name.capitalize()], code, flags=re.MULTILINE)
    assert count == 1
    return code.replace("sync.finish()\n", "")


def run_block(name, folder, local=True):
    """Run the page's block of that name in a module and a folder of its own."""
    code = dict(BLOCK.findall(PAGE.read_text()))[name]
    if not local:
        code = with_another_method(name, code)
    module = types.ModuleType(f"block_{name}")
    before = Path.cwd()
    os.chdir(folder)
    try:
        exec(compile(code, str(PAGE), "exec"), module.__dict__)
    finally:
        os.chdir(before)
    return module


def misuse(adapter, make):
    """What bad options are answered with; ``make(adapter, method, **options)`` makes the callback or the hook."""
    module = importlib.import_module(f"thinwire.adapters.{adapter}")
    return {
        "method": sentence(lambda: make(module, "acpp")),
        "option": sentence(lambda: make(module, "acp", rnak=4)),
        "decoupled": sentence(lambda: make(module, "dear")),
        "auto": sentence(lambda: make(module, "auto")),
    }
