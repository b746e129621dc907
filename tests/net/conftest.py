"""The emulated cluster with real namespaces, by every right that this machine grants."""

import os

import pytest
from wires import namespaces

from thinwire.tools import lab
from thinwire.tools.lab.network import find_mode


def force(mode, monkeypatch):
    monkeypatch.setenv("THINWIRE_LAB_MODE", mode)
    found, why = find_mode()
    if found != mode:
        pytest.skip(f"network namespaces are not to be had here as {mode}: {why}")
    return mode


@pytest.fixture(params=["root", "user"])
def mode(request, monkeypatch):
    """Force one mode after the other; skip those that the machine refuses."""
    return force(request.param, monkeypatch)


@pytest.fixture(params=["best", *(pytest.param(name, marks=pytest.mark.slow) for name in ("root", "user"))])
def any_mode(request, monkeypatch):
    """The best mode that this machine grants; in the long run the others, too, where rights change little."""
    best = lab.available()
    if request.param == best:
        pytest.skip(f"{best} is the best mode, which is tried as such")
    if request.param != "best":
        return force(request.param, monkeypatch)
    if best == "loopback":
        pytest.skip("network namespaces are not to be had here")
    return best


@pytest.fixture
def no_leftovers():
    """Fail if the test leaves a namespace of this process behind."""
    yield
    assert namespaces(os.getpid()) == []
