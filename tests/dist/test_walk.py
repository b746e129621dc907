"""How many files of the package a steady step enters: what one reads to follow a gradient, or a message of a round."""

import gc
import re
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import thinwire as tw
from spawned import run

pytestmark = pytest.mark.dist
PACKAGE = Path(tw.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "how.md"
MOST = {"attach": 19, "DDP hook": 17, "local steps": 20}
WARM, COUNTED = 8, 4


def _walks(rank, size):
    """The files that each way of training enters on this rank, on all of its threads."""
    entered, counting = set(), False

    def note(frame, event, _):
        if counting and event == "call":
            entered.add(frame.f_code.co_filename)

    threading.setprofile(note)  # threads begin below
    found = {}
    for way in ("local steps", "attach", "DDP hook"):
        net = torch.nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
        trained, optimizer, handle = net, torch.optim.SGD(net.parameters(), lr=0.01), None
        if way == "DDP hook":
            trained = nn.parallel.DistributedDataParallel(net)
            trained.register_comm_hook(*tw.ddp_hook("powersgd"))
        else:
            method, options = ("powersgd", {}) if way == "attach" else ("local", {"sync_every": 2, "codec": "int8"})
            handle = tw.attach(net, optimizer, method, **options)
        gc.collect()
        gc.disable()  # what it would end belongs to no step
        for step in range(WARM + COUNTED):
            counting = step >= WARM
            sys.setprofile(note if counting else None)
            optimizer.zero_grad()
            trained(torch.randn(8, 256)).square().mean().backward()
            optimizer.step()
        counting = False
        sys.setprofile(None)
        gc.enable()
        found[way] = {str(Path(file).relative_to(PACKAGE)) for file in entered if file.startswith(f"{PACKAGE}/")}
        entered.clear()
        if handle is not None:
            handle.close()
    return found


@pytest.fixture(scope="module")
def walks():
    ranks = run(_walks, 2, fresh=True)  # no thread of an earlier test
    return {way: sorted(set().union(*(found[way] for found in ranks))) for way in MOST}


@pytest.mark.parametrize("way", MOST)
def test_a_step_enters_few_files(walks, way):
    assert len(walks[way]) <= MOST[way], "\n".join([f"{len(walks[way])} files:", *walks[way]])


@pytest.mark.parametrize("way, title", [("attach", "Follow a gradient"), ("local steps", "One message of a round")])
def test_the_page_follows_them(walks, way, title):
    section = PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    named = set(re.findall(r"`((?:\w+/)+\w+\.py)`", section.split("\n\nUnder ")[0]))
    assert named == set(walks[way]), f"enters: {sorted(set(walks[way]) - named)}; only named: {named - set(walks[way])}"
