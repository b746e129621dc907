"""The emulated cluster with real namespaces, by every right that this machine grants."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from thinwire import lab

CLI = [sys.executable, "-c", "from thinwire.cli.lab import app; app()"]


@pytest.fixture(params=["root", "user"])
def mode(request, monkeypatch):
    """Force one mode after the other; skip those that the machine refuses."""
    monkeypatch.setenv("THINWIRE_LAB_MODE", request.param)
    if lab.available() != request.param:
        pytest.skip(f"network namespaces are not to be had here as {request.param}")
    return request.param


@pytest.fixture(params=["best", *(pytest.param(name, marks=pytest.mark.slow) for name in ("root", "user"))])
def any_mode(request, monkeypatch):
    """The best mode that this machine grants; each of them only in the long run, where a test takes many seconds."""
    if request.param == "best":
        if lab.available() == "loopback":
            pytest.skip("network namespaces are not to be had here")
        return lab.available()
    monkeypatch.setenv("THINWIRE_LAB_MODE", request.param)
    if lab.available() != request.param:
        pytest.skip(f"network namespaces are not to be had here as {request.param}")
    return request.param


@pytest.fixture
def no_leftovers():
    """Fail if the test leaves a namespace of this process behind."""
    yield
    assert namespaces(os.getpid()) == []


def namespaces(pid):
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"tw{pid}-")]


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def collect(cluster, command, **options):
    """Run and return the result and the lines of each rank."""
    lines = [[] for _ in range(cluster.workers)]
    result = lab.run(cluster, command, on_line=lambda rank, line: lines[rank].append(line), **options)
    return result, lines
