"""Deaths, stops and cut links that were asked for: on plain loopback, what needs no wires."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from thinwire.tools import lab
from thinwire.tools.lab.supervise import happenings
from verbs import call

COUNTS = """
import os, pathlib, time
mine = pathlib.Path(f"starts{os.environ['RANK']}")
with mine.open("a") as file:
    file.write("x")
lives = len(mine.read_text())
print("life", lives, flush=True)
while not pathlib.Path("end").exists():
    if os.environ["RANK"] == "1" and lives == 2:
        pathlib.Path("end").touch()
    time.sleep(0.01)
"""


ALONE = """
import os, pathlib, time
pid = pathlib.Path("pid")
if os.environ["RANK"] == "1":
    pid.write_text(str(os.getpid()))
    print("here", flush=True)
    {one}
else:
    while not (pid.exists() and pid.read_text()):
        time.sleep(0.01)
    state = pathlib.Path("/proc", pid.read_text(), "stat")
    try:
        while state.read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
    except OSError:
        pass  # nobody waits for it any more
    print("alone", flush=True)
    {zero}
"""
"""Rank 0 goes on when rank 1 has ended, however late that is."""


@pytest.fixture(autouse=True)
def _loopback(monkeypatch, tmp_path):
    monkeypatch.setenv("THINWIRE_LAB_MODE", "loopback")
    monkeypatch.chdir(tmp_path)


def run(workers, code, *faults, begin=None):
    """``begin``: the rank and the line from which times count, so that a slow machine changes nothing."""
    lines = []
    result = lab.run(
        lab.Cluster(workers), [sys.executable, "-c", code], timeout_seconds=60, faults=faults,
        on_line=lambda rank, line: lines.append((rank, line)),
        faults_begin=None if begin is None else lambda *said: said == begin,
    )  # fmt: skip
    return result, lines


def test_a_killed_rank_comes_again(capfd):
    result, lines = run(2, COUNTS, *lab.parse_kills(["1:100ms"], "200ms"), begin=(1, "life 1"))
    assert result.exit_codes == (0, 0)
    assert result.exit_code == 0
    assert [line for rank, line in lines if rank == 1][-1] == "life 2"
    assert [line for rank, line in lines if rank == 0] == ["life 1"]
    assert [(x.rank, x.what) for x in result.happenings] == [(1, "killed"), (1, "started again")]
    said = capfd.readouterr().err.splitlines()
    assert any(re.fullmatch(r"note: \d\.\d s: rank 1 killed", line) for line in said)


def test_the_run_waits_for_the_only_rank_to_come_again():
    code = "import pathlib, time\nif not pathlib.Path('lived').exists():\n    pathlib.Path('lived').touch()\n"
    code += "    print(0, flush=True)\n    time.sleep(60)"
    result, _ = run(1, code, lab.RankFault("kill", 0, 0.1, 0.3), begin=(0, "0"))
    assert result.exit_codes == (0,)
    assert [x.what for x in result.happenings] == ["killed", "started again"]


def test_a_death_that_was_asked_for_is_no_failure_and_others_are(capfd):
    for code in (3, 0):
        Path("pid").unlink(missing_ok=True)
        ranks = ALONE.format(one="time.sleep(60)", zero=f"raise SystemExit({code})")
        result, _ = run(2, ranks, lab.RankFault("kill", 1, 0.1), begin=(1, "here"))
        assert result.exit_codes == (code, 137)
        assert result.exit_code == code


def test_a_stopped_rank_goes_on():
    code = """
import os, signal, time
goes_on = []
signal.signal(signal.SIGCONT, lambda *_: goes_on.append(True))
if os.environ["RANK"] == "1":
    print("beats", flush=True)
    before, longest = time.monotonic(), 0.0
    while not goes_on:
        time.sleep(0.005)
        now = time.monotonic()
        before, longest = now, max(longest, now - before)
    print(longest)
"""
    result, lines = run(2, code, *lab.parse_pauses("stop", ["1:200ms:1s"]), begin=(1, "beats"))
    assert result.exit_codes == (0, 0)
    assert [(x.rank, x.what) for x in result.happenings] == [(1, "stopped"), (1, "continued")]
    stopped, continued = (x.seconds for x in result.happenings)
    assert float(lines[-1][1]) > continued - stopped - 0.1  # it stood still meanwhile


HALTS = """
import os, pathlib, signal, time
halts, end = [], pathlib.Path("end")
signal.signal(signal.SIGCONT, lambda *_: halts.append(True))
while len(halts) < 10 and not end.exists():
    time.sleep(0.001)
end.touch()
print(len(halts))
"""


def test_a_slow_rank_stands_still_for_its_share_again_and_again():
    lines = []
    result = lab.run(
        lab.Cluster(2), [sys.executable, "-c", HALTS], timeout_seconds=60, slow={1: 4.0},
        on_line=lambda rank, line: lines.append((rank, int(line))),
    )  # fmt: skip
    assert result.exit_codes == (0, 0)
    assert dict(lines)[0] == 0
    assert dict(lines)[1] >= 10
    assert list(result.stopped_shares) == [1]
    assert 0.4 < result.stopped_shares[1] < 0.95  # three quarters, but for the end
    assert result.happenings == ()


def test_a_slow_rank_that_was_killed_is_slow_again():
    lines = []
    result = lab.run(
        lab.Cluster(2), [sys.executable, "-c", COUNTS], timeout_seconds=60, slow={1: 2.0},
        faults=lab.parse_kills(["1:100ms"], "200ms"), on_line=lambda *said: lines.append(said),
        faults_begin=lambda *said: said == (1, "life 1"),
    )  # fmt: skip
    assert result.exit_codes == (0, 0)
    assert [x.what for x in result.happenings] == ["killed", "started again"]
    assert lines[-1] == (1, "life 2")


def test_the_closing_line_says_how_slow_a_rank_was():
    command = ["--slow", "0:3,1:3", "--json", "--", sys.executable, "-c", HALTS]
    result = call("lab", "run", "--workers", 2, *command)
    assert set(json.loads(result.stdout)["stopped_shares"]) == {"0", "1"}
    said = call("lab", "run", "--workers", 2, *command[:2], *command[3:]).stderr
    assert re.search(r"rank 1 stood still for \d\d % of its time", said)


def test_what_meets_a_rank_that_has_ended_is_left_out_and_what_comes_too_late_is_told(capfd):
    faults = [lab.RankFault("kill", 1, 0.3, 0.1), lab.RankFault("kill", 0, 50.0)]
    result, _ = run(2, ALONE.format(one="pass", zero="time.sleep(1)"), *faults, begin=(0, "alone"))
    assert result.exit_codes == (0, 0)
    assert result.happenings == ()
    assert "note: the run ended before rank 0 was killed at 50 s" in capfd.readouterr().err


def test_happenings_are_in_order():
    faults = [*lab.parse_kills(["2:30s"], "5s"), *lab.parse_pauses("stop", ["1:10s:3s"]),
              *lab.parse_pauses("cut", ["0:0.5m:250ms"])]  # fmt: skip
    assert [(x.seconds, x.rank, x.what) for x in happenings(faults)] == [
        (10.0, 1, "stopped"), (13.0, 1, "continued"), (30.0, 2, "killed"), (30.0, 0, "cut off"),
        (30.25, 0, "connected again"), (35.0, 2, "started again"),
    ]  # fmt: skip


def test_the_json_has_what_happened():
    command = ["--kill", "0:200ms", "--json", "--", sys.executable, "-c", "import time; time.sleep(60)"]
    found = json.loads(call("lab", "run", "--workers", 1, *command).stdout)
    assert found["exit_code"] == 0
    assert found["exit_codes"] == [137]
    assert [(x["rank"], x["what"]) for x in found["happenings"]] == [(0, "killed")]


def test_the_command_of_the_page(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()
    command, said = re.findall(r"```\n(.*?)```", page.split("### Kill, stop, cut")[1], re.DOTALL)[:2]
    (tmp_path / "train.py").write_text(  # the last thing happens at 2.3 s
        "import os, pathlib, time\nlived = pathlib.Path('lived' + os.environ['RANK'])\n"
        "if not lived.exists():\n    lived.touch()\n    time.sleep(3)"
    )
    words = [sys.executable if word == "python" else word for word in shlex.split(command.replace("\\\n", ""))]
    told = [line for line in call(*words[1:]).stderr.splitlines() if re.match(r"note: \d", line)]
    assert [line.split("s: ")[1] for line in told] == [line.split("s: ")[1] for line in said.splitlines()]
