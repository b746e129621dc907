"""Whatever orders streams or keeps memory from the allocator is needed: without it the simulated card finds a fault."""

import ast
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from card import SOURCE, Card
from sim_cases import CASES, STEPS
from training import DEVICE

from thinwire.core.program.ops import NextForward
from thinwire.engine.executors.streams import StreamExecutor
from thinwire.systems.kfac.factors import LayerSums
from thinwire.systems.kfac.layers import find_layers

PACKAGES = ("adapters", "core", "engine", "systems/data", "systems/kfac", "systems/optim")
ORDERING = {"record_stream", "wait_event", "wait_stream", "record_event", "read_here"}


def sites():
    """Every such call in the source: "file function name", numbered where there are several -> its lines."""
    found = {}
    for package in PACKAGES:
        for path in sorted(Path(SOURCE, package).rglob("*.py")):
            text = path.read_text()
            if not any(f"{name}(" in text for name in (*ORDERING, "record", "wait")):
                continue  # for speed
            for function in ast.walk(ast.parse(text)):
                if isinstance(function, ast.FunctionDef):
                    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and ordering(node, path)]
                    for number, call in enumerate(sorted(calls, key=lambda node: node.lineno)):
                        label = f"{path.relative_to(SOURCE)} {function.name} {name_of(call)} {number}"
                        found[label] = (str(path), call.lineno, call.end_lineno)
    return found


def name_of(call):
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def ordering(call, path):
    """``record`` and ``wait`` are also words of the ledger, of threads and of Gloo."""
    name, whole = name_of(call), ast.unparse(call.func)
    event = name == "record" and not call.args
    of_nccl = path.name == "exchange.py" and whole == "work.wait"
    return name in ORDERING or event or of_nccl or whole == "self._stream.synchronize"


class _Sums:
    """K-FAC's statistic is made on another stream than its sum, which is then let go."""

    def __init__(self, card):
        self.card = card
        with DEVICE:
            self._sums = LayerSums(find_layers(torch.nn.Sequential(torch.nn.Linear(3, 2)))[0][0], "reference", "expand")
        self._side = torch.cuda.Stream(DEVICE)

    def step(self):
        with torch.no_grad():
            self._sums.add_input(torch.ones(4, 3, device=DEVICE))
            self._side.wait_stream(torch.cuda.current_stream(DEVICE))
            with torch.cuda.stream(self._side):
                statistic = self._sums.statistic(0)
            torch.ones(3, 3, device=DEVICE)
        del statistic


@contextmanager
def sums(card):
    with card.in_place():
        yield _Sums(card)


class _Read:
    """What the rest of a paused program overwrites is read on the current stream first."""

    def __init__(self):
        self._executor = StreamExecutor(None, DEVICE)
        self._memory = torch.ones(4, device=DEVICE)

    def _program(self):
        yield NextForward()
        self._memory.mul_(2)

    def step(self):
        self._executor.begin(1, lambda _: self._program(), pause=True)
        self._executor.ready(0)
        self._executor.finish()
        self._memory.sum()
        self._executor.resume([0], [])
        self._executor.wait(0)


@contextmanager
def read(card):
    with card.in_place():
        yield _Read()


class _Saved:
    """The host reads and writes what is in pinned memory."""

    def __init__(self, run):
        self._run = run

    def step(self):
        self._run.step()
        self._run.sync.load_state_dict(self._run.sync.state_dict())


@contextmanager
def saved(card):
    with CASES["diloco, late, in host memory"](card=card) as run:
        yield _Saved(run)


FOUND_BY = {
    "adapters/fsdp2_replicas.py _reduce read_here 0": CASES["FSDP2"],
    "core/collectives/exchange.py block wait 0": CASES["ssgd"],
    "engine/buckets.py bucket read_here 0": CASES["one bucket each"],
    "engine/executors/streams.py _run wait_event 0": CASES["ssgd"],
    "engine/executors/streams.py finish wait_stream 0": CASES["ssgd"],
    "engine/executors/streams.py read_here record_stream 0": CASES["one bucket each"],
    "engine/executors/streams.py ready record_event 0": CASES["ssgd"],
    "engine/executors/streams.py resume record_event 0": read,
    "engine/executors/streams.py resume record_event 1": CASES["dear"],
    "engine/executors/streams.py wait wait_event 0": CASES["dear"],
    "engine/local/host.py before wait_stream 0": CASES["local, in host memory"],
    "engine/local/host.py beside wait_stream 0": CASES["local, in host memory"],
    "engine/local/host.py fetch wait_stream 0": CASES["local, late, in host memory"],
    "engine/local/host.py put_away read_here 0": CASES["local, in host memory"],
    "engine/local/host.py settle synchronize 0": saved,
    "systems/kfac/factors.py statistic read_here 0": sums,
}
SITES = sites()


def findings(case, card):
    with case(card=card) as run:
        for _ in range(STEPS):
            run.step()
    return Counter(str(one) for one in card.findings)


def test_each_site_has_a_case():
    assert sorted(SITES) == sorted(FOUND_BY)


@pytest.mark.parametrize("site", FOUND_BY)
def test_without_it_a_fault_is_found(site):
    assert findings(FOUND_BY[site], Card(mute=SITES[site]))


@pytest.mark.parametrize("case", [sums, read, saved])
def test_cases_as_they_are(case):
    """Those that no other test runs."""
    assert not findings(case, Card())
