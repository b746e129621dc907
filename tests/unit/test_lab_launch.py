"""The lab on plain loopback: everything but the wires."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading

import pytest

from alive import runs, wait_until
from thinwire.tools import lab
from thinwire.tools.lab.ranks import rank_environment
from verbs import call


@pytest.fixture(autouse=True)
def _loopback(monkeypatch):
    monkeypatch.setenv("THINWIRE_LAB_MODE", "loopback")


def python(code):
    return [sys.executable, "-c", code]


def run(cluster, command, **options):
    lines = []
    result = lab.run(cluster, command, on_line=lambda rank, line: lines.append((rank, line)), **options)
    return result, lines


def of(rank, lines):
    return [line for r, line in lines if r == rank]


def test_the_mode_can_be_forced(monkeypatch):
    assert lab.available() == "loopback"
    monkeypatch.setenv("THINWIRE_LAB_MODE", "magic")
    with pytest.raises(lab.LabError, match="'magic' is not one of root, user, loopback"):
        lab.available()


def test_environment_is_torchruns():
    base = {"PATH": "/bin", "TORCHELASTIC_USE_AGENT_STORE": "True", "ROLE_RANK": "7", "RANK": "9"}
    base["OMP_NUM_THREADS"] = "3"
    found = rank_environment(base, lab.Cluster(4, 2), 3, master_address="10.0.0.1", master_port=29500, interface="eth0")
    assert found == {
        "PATH": "/bin",
        "OMP_NUM_THREADS": "3",
        "PYTHONUNBUFFERED": "1",
        "RANK": "3",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_NET": "Socket",
        "NCCL_HOSTID": "thinwire node 1",
    }


def test_ranks_see_the_environment_and_the_directory(capfd):
    names = ["RANK", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "EXTRA"]
    code = f"import os; print(*map(os.environ.get, {names}), os.getcwd())"
    result, lines = run(lab.Cluster(2), python(code), env={"EXTRA": "x", "OMP_NUM_THREADS": "2"})
    assert sorted(lines) == [(rank, f"{rank} 2 lo x {os.getcwd()}") for rank in range(2)]
    assert result.exit_codes == (0, 0)
    assert (result.exit_code, result.emulated) == (0, False)
    assert result.sent_bytes == result.received_bytes == (0, 0)
    assert "plain loopback" in capfd.readouterr().err
    assert json.loads(result.to_json())["note"] == result.note


def test_lines_keep_their_order_and_errors_are_merged():
    code = "import sys\nfor i in range(500): print(i, file=(sys.stdout, sys.stderr)[i % 2])\nprint('end', end='')"
    _, lines = run(lab.Cluster(2), python(code))
    for rank in range(2):
        assert of(rank, lines) == [*map(str, range(500)), "end"]


def test_lines_come_while_the_rank_runs(tmp_path):
    seen = tmp_path / "seen"
    code = f"import os, time; print('early')\nwhile not os.path.exists({str(seen)!r}): time.sleep(0.01)"
    result = lab.run(lab.Cluster(1), python(code), on_line=lambda *_: seen.touch(), timeout_seconds=60)
    assert result.exit_code == 0


def test_default_prints_with_rank(capfd):
    lab.run(lab.Cluster(1), ["echo", "hello"])
    assert capfd.readouterr().out == "[0] hello\n"


@pytest.mark.parametrize(
    ("script", "options", "codes", "code"),
    [
        ("exit $((RANK * 3 % 5))", {}, (0, 3, 1), 3),
        ("[ $RANK = 0 ] || kill -9 $$", {}, (0, 137), 137),  # 128 + the signal
        ("[ $RANK = 1 ] && exit 3; exec sleep 60", {"grace_seconds": 0.2}, (143, 3), 3),
        ("exec sleep 60", {"timeout_seconds": 0.3}, (143, 143), 124),
    ],
)
def test_the_worst_code_of_those_that_ended_by_themselves_counts(script, options, codes, code):
    result, _ = run(lab.Cluster(len(codes)), ["sh", "-c", script], **options)
    assert (result.exit_codes, result.exit_code) == (codes, code)


def test_who_ignores_sigterm_is_killed(monkeypatch, tmp_path):
    monkeypatch.setattr("thinwire.tools.lab.supervise._KILL_AFTER_SECONDS", 0.3)
    ready = shlex.quote(str(tmp_path / "ready"))  # rank 1 fails when rank 0 is deaf, however slow its shell is
    deaf, fails = (
        f"trap '' TERM; touch {ready}; while :; do sleep 0.1; done",
        f"until [ -e {ready} ]; do sleep 0.1; done; exit 3",
    )
    command = ["sh", "-c", f"if [ $RANK = 1 ]; then {fails}; fi; {deaf}"]
    result, _ = run(lab.Cluster(2), command, grace_seconds=0.2)
    assert result.exit_codes == (137, 3)


def test_what_a_rank_left_in_the_background_is_ended_too():
    _, lines = run(lab.Cluster(1), ["sh", "-c", "sleep 60 & echo $!"])
    pid = int(lines[0][1])
    wait_until(lambda: not runs(pid), 20)


def test_an_error_in_on_line_ends_the_ranks():
    pids = []

    def fail(rank, line):
        pids.append(int(line))
        raise KeyError(line)

    with pytest.raises(KeyError):
        lab.run(lab.Cluster(1), ["sh", "-c", "echo $$; exec sleep 60"], on_line=fail)
    assert not runs(pids[0])


def test_run_works_outside_the_main_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(lab.run(lab.Cluster(2), ["true"])))
    thread.start()
    thread.join()
    assert results[0].exit_codes == (0, 0)


def test_sigint_is_raised_again_after_the_end():
    former = signal.getsignal(signal.SIGINT)
    pids = []

    def interrupt(rank, line):
        pids.append(int(line))
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        lab.run(lab.Cluster(1), ["sh", "-c", "echo $$; exec sleep 60"], on_line=interrupt)
    assert signal.getsignal(signal.SIGINT) is former
    assert not runs(pids[0])


@pytest.mark.parametrize("options", [["-c", "pass"], ["-uc", "pass"], ["-m", "this"]])
def test_python_without_a_script_is_accepted(options):
    result, _ = run(lab.Cluster(1), [sys.executable, *options])
    assert result.exit_code == 0


def test_a_port_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        answer = call("lab", "run", "--master-port", port, "--", "true", code=2)
    assert f"error: master port {port} cannot be used" in answer.stderr


def test_command_line_separates_json_from_output():
    command = ["sh", "-c", "echo line --json; exit $RANK"]
    answer = call("lab", "run", "--workers", 2, "--json", "--", *command, code=1)
    assert json.loads(answer.stdout)["exit_codes"] == [0, 1]
    assert "[0] line --json\n" in answer.stderr
    assert "[1] line --json\n" in answer.stderr


def test_importing_the_lab_does_not_import_torch():
    code = "import sys, thinwire.tools.lab, thinwire.tools.cli.lab; sys.exit('torch' in sys.modules)"
    assert subprocess.run(python(code)).returncode == 0
