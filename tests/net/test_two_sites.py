"""The commands of docs/two_sites.md, on two machines with the page's long wire between them."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from wires import CLI

from fences import blocks, commands

pytestmark = [pytest.mark.net, pytest.mark.usefixtures("no_leftovers")]
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "two_sites.md").read_text()
SHOWN = [command for block in blocks(PAGE) for command in commands(block)]
WIRE = SHOWN[0].partition(" -- ")[0].removeprefix("thinwire lab ").split()


@pytest.fixture
def folder(any_mode, tmp_path, monkeypatch):
    shutil.copytree(ROOT / "examples" / "launchers", tmp_path / "examples" / "launchers")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def on_both(command, *options):
    """Run a line of the page on both machines, as it stands but for what is each machine's own; return all output."""
    own = command.replace("--node-rank 0", "--node-rank $GROUP_RANK").replace("--master-addr A", "--master-addr node0")
    own = own.replace("keys/a", 'keys/$([ "$GROUP_RANK" = 0 ] && echo a || echo b)')
    assert own.count("GROUP_RANK") == own.count("--node-rank") + own.count("keys/$(")
    own = own.replace("torchrun", f"{sys.executable} -m torch.distributed.run")
    own = own.replace("thinwire probe", f"{Path(sys.executable).parent / 'thinwire'} probe")
    line = [*CLI, *WIRE, *options, "--", "bash", "-c", own]
    ran = subprocess.run(line, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.slow
def test_the_page_ends_in_a_training_that_runs_although_the_wire_is_cut(folder):
    (make,) = (command for command in SHOWN if command.startswith("thinwire keys"))
    python = [sys.executable, "-c", "from thinwire.tools.cli.main import run; run()"]
    subprocess.run([*python, *make.split()[1:]], check=True, capture_output=True)
    (train,) = (command for command in SHOWN if command.startswith("THINWIRE_KEYS"))
    said = on_both(train, "--cut", "1:9s:3s")
    accuracy, sent = re.search(r"local: ([\d.]+)% of what was held out.*; ([\d.]+) MB sent", said).groups()
    assert float(accuracy) > 85
    assert float(sent) < 3


@pytest.mark.slow
def test_the_probe_says_what_kind_of_wire_it_is(folder):
    (probe,) = (command for command in SHOWN if command.endswith("thinwire probe"))
    said = " ".join(on_both(probe + " --max-bytes 1048576 --seconds 10").replace("[0]", "").split())
    trip, kind = re.search(r"a long wire: round trip ([\d.]+) ms, .* sent again, \d+ sockets with (\w+)", said).groups()
    assert 45 <= float(trip) < 70  # as finely as the kernel measures
    assert kind in ("bbr", "cubic", "reno")
    assert re.search(r"one connection carries [\d.]+ \w+/s, thinwire's together [\d.]+ \w+/s", said)
    assert json.loads((folder / "costs.json").read_text())["exchanges"]


@pytest.mark.slow
def test_the_lab_trains_over_the_same_wire(folder):
    line = SHOWN[0].removeprefix("thinwire lab ").replace("python", sys.executable).split()
    ran = subprocess.run([*CLI, *line], capture_output=True, text=True, timeout=280, check=True)
    assert "local: 9" in ran.stdout
    assert "delay 25ms, loss 0.1%" in " ".join(
        (ran.stdout + ran.stderr).split()
    )  # what the lab says, wherever it wraps
