"""Nothing is left behind, whatever ends a run."""

import os
import re
import signal
import subprocess
import sys

import pytest
from wires import CLI, collect, namespaces

from alive import runs, wait_until
from thinwire.tools import lab
from thinwire.tools.lab import network
from thinwire.tools.lab.network import Network, tool

pytestmark = [pytest.mark.net, pytest.mark.usefixtures("no_leftovers")]


@pytest.fixture
def running():
    """Start the command line in a process of its own; hand over the process and the ids of its two ranks."""
    started = []

    def start():
        process = subprocess.Popen(
            [*CLI, "run", "--workers", "2", "--link", "1gbit", "--", "sh", "-c", "echo pid $$; exec sleep 120"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        lines = [process.stdout.readline() for _ in range(2)]
        pids = [int(re.fullmatch(r"\[\d\] pid (\d+)\n", line)[1]) for line in lines]
        assert all(map(runs, pids))
        return process, pids

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def host_links():
    return subprocess.run([tool("ip"), "-o", "link"], capture_output=True, text=True, check=True).stdout


def test_the_machines_own_network_is_not_touched(mode):
    before = host_links()
    during = []
    lab.run(lab.Cluster.parse(2, 1, "1gbit"), ["echo", "x"], on_line=lambda *_: during.append(host_links()))
    assert {*during, host_links()} == {before}


def test_worst_exit_code_and_nothing_left(mode):
    result, _ = collect(lab.Cluster(3), ["sh", "-c", "[ $RANK = 1 ] && exit 5; [ $RANK = 0 ] || kill -SEGV $$"])
    assert result.exit_codes == (0, 5, 128 + signal.SIGSEGV)
    assert result.exit_code == 128 + signal.SIGSEGV


def test_a_daemon_that_left_its_group_is_ended(mode, tmp_path):
    script = "setsid sh -c 'echo $$; touch said; exec sleep 60' & until [ -e said ]; do sleep 0.01; done"
    _, lines = collect(lab.Cluster(1), ["sh", "-c", f"cd {tmp_path}; {script}"])
    pid = int(lines[0][0])
    if mode == "root":
        assert not runs(pid)
    else:
        wait_until(lambda: not runs(pid))


def test_a_rank_that_stands_still_most_of_the_time_ends_with_the_others(mode):
    command = ["sh", "-c", "echo $$; exec sleep 120"]
    result, lines = collect(lab.Cluster(2), command, timeout_seconds=1, slow={1: 30.0})
    assert result.exit_code == 124
    assert set(result.exit_codes) <= {128 + signal.SIGTERM, 128 + signal.SIGKILL}
    assert result.stopped_shares[1] > 0.4
    assert not any(runs(int(pid)) for said in lines for pid in said)


@pytest.mark.parametrize(
    ("mode", "number", "code"),
    [("root", signal.SIGTERM, -signal.SIGTERM), ("user", signal.SIGINT, 130)],
    indirect=["mode"],
)
def test_signals_clean_up_first(mode, running, number, code):
    process, pids = running()
    assert bool(namespaces(process.pid)) == (mode == "root")
    process.send_signal(number)
    assert process.wait(timeout=120) == code
    assert namespaces(process.pid) == []
    assert not any(map(runs, pids))


def test_kill_9_ends_the_ranks_and_clean_removes_the_rest(mode, running):
    process, pids = running()
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(runs, pids)))
    left = namespaces(process.pid)
    assert len(left) == (3 if mode == "root" else 0)
    assert set(left) <= set(lab.clean())
    assert namespaces(process.pid) == []


@pytest.mark.parametrize("mode", ["root"], indirect=True)
def test_clean_spares_the_living_unless_told(mode, running, monkeypatch):
    process, pids = running()
    before = namespaces(process.pid)
    assert not set(before) & set(lab.clean())
    assert namespaces(process.pid) == before
    # Not those of other people's runs on this machine.
    monkeypatch.setattr(network, "NAME", re.compile(rf"tw({process.pid})-(\d+)-\d+-\w+"))
    assert sorted(lab.clean(all=True)) == sorted(before)
    assert process.wait(timeout=120) != 0
    assert not any(map(runs, pids))


def test_clean_of_the_command_line(any_mode):
    answer = subprocess.run([*CLI, "clean", "--json"], capture_output=True, text=True)
    assert answer.returncode == 0
    assert answer.stdout.startswith('{"removed": [')


def test_a_failure_while_building_leaves_nothing(any_mode, monkeypatch):
    def fail(self):
        raise lab.LabError("broken")

    monkeypatch.setattr(Network, "counters", fail)
    with pytest.raises(lab.LabError, match="broken"):
        lab.run(lab.Cluster(2), ["true"])
    assert namespaces(os.getpid()) == []


def test_ctrl_c_while_building_starts_nothing(any_mode, monkeypatch):
    def interrupt(self):
        signal.raise_signal(signal.SIGINT)
        return [(0, 0)] * 2

    monkeypatch.setattr(Network, "counters", interrupt)
    lines = []
    with pytest.raises(KeyboardInterrupt):
        lab.run(lab.Cluster(2), ["echo", "started"], on_line=lambda *line: lines.append(line))
    assert lines == []
    assert namespaces(os.getpid()) == []


def test_two_runs_of_one_process_at_a_time(any_mode):
    inner = []

    def nest(rank, line):
        inner.append(lab.run(lab.Cluster(1), ["true"]).exit_code)

    assert lab.run(lab.Cluster(1), ["echo", "x"], on_line=nest).exit_code == 0
    assert inner == [0]


def test_a_missing_script_is_refused_before_anything_is_built(any_mode):
    answer = subprocess.run([*CLI, "run", "--", sys.executable, "no_such.py"], capture_output=True, text=True)
    assert answer.returncode == 2
    assert re.fullmatch(r"error: script 'no_such.py' does not exist in [^\n]+\n", answer.stderr)
