"""Training that goes on in the lab: links that are cut for short and for long, and the example's picture."""

import importlib.util
import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from wires import collect

from thinwire.tools import lab

pytestmark = [
    pytest.mark.net,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("no_leftovers"),
    pytest.mark.skipif(
        importlib.util.find_spec("torchft") is None, reason="torchft is not installed: pip install torchft"
    ),
]
EXAMPLE = Path(__file__).parents[2] / "examples" / "going_on"
CUTS, FIRST, EVERY = 20, 20, 14
LENGTHS = ("7s", "1s")  # above and below the timeout of 5 s


def test_links_are_cut_and_all_go_on_with_equal_weights():
    texts = [f"{1 + k % 3}:{FIRST + EVERY * k}s:{LENGTHS[k // 3 % 2]}" for k in range(CUTS)]
    command = [sys.executable, str(EXAMPLE / "train.py"), "acp"]
    seconds = FIRST + EVERY * CUTS + 45  # connections that were cut for long are slow to come back
    result, lines = collect(
        lab.Cluster.parse(4, link="100mbit"), command, timeout_seconds=seconds,
        faults=lab.parse_pauses("cut", texts), env={"RUST_LOG": "error"},
    )  # fmt: skip
    ended = "\n".join(line for mine in lines for line in mine[-20:] if not line.startswith("{"))
    assert result.exit_codes == (143,) * 4, f"somebody has ended before time was up\n{ended}"
    assert len(result.happenings) == 2 * CUTS
    losses, last = defaultdict(set), []
    for mine in lines[1:]:
        rows = [json.loads(line) for line in mine if line.startswith("{")]
        last.append(rows[-1])
        for row in rows:
            losses[row["step"], row["quorum"]].add(row["loss"])  # a step may be made again without who was cut off
    assert not {key: some for key, some in losses.items() if len(some) > 1}, "weights differ"
    assert [row["replicas"] for row in last] == [3] * 3
    failed = sum("does not count" in line for mine in lines for line in mine)
    print(f"{CUTS} cuts, {failed} failed steps of single replicas, {max(losses)[0]} steps, loss {last[0]['loss']:.3f}")
    assert max(row["step"] for row in last) - min(row["step"] for row in last) <= 10


def test_the_example_draws_deaths_that_end_plain_ddp_alone(tmp_path):
    plot = tmp_path / "going_on.png"
    run = [sys.executable, str(EXAMPLE / "run.py"), "--seconds", "60", "--plot", str(plot)]
    told = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert told.returncode == 0, told.stderr
    assert plot.read_bytes()[:4] == b"\x89PNG"
    steps = {name: int(step) for name, step in re.findall(r"^(.+): step (\d+) ", told.stdout, re.MULTILINE)}
    assert steps["acp under torchft"] > steps["plain DDP"] > 0
    assert sum("killed" in line for line in told.stderr.splitlines()) == 4
