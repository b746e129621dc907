"""How many files of the package one push enters, from a worker's gradient to the next weights: what a reader walks."""

import threading
from pathlib import Path

import pytest
from parameter_cluster import Cluster

import thinwire
from thinwire.systems.parameter_server.presets import asp

pytestmark = pytest.mark.dist

PACKAGE = Path(thinwire.__file__).parent
MOST_FILES = 18


def test_a_steady_push_enters_few_files():
    """Service, node and worker are threads of this process; heartbeats are far apart, connecting is over."""
    entered, steady, versions = set(), threading.Event(), []

    def profile(frame, event, arg):
        if event == "call" and steady.is_set():
            entered.add(frame.f_code.co_filename)

    def on_update(version, theta):
        versions.append(version)
        if version == 5:
            steady.set()
        elif version == 25:
            steady.clear()

    threading.setprofile(profile)
    try:
        Cluster(asp(lease_seconds=1000.0), 1, updates=30, on_update=on_update).join()
    finally:
        threading.setprofile(None)
    assert versions == list(range(1, 31))
    files = sorted(str(Path(name).relative_to(PACKAGE)) for name in entered if name.startswith(str(PACKAGE)))
    assert {"systems/parameter_server/worker.py", "systems/parameter_server/server.py", "systems/link/peer.py"} <= {
        *files
    }
    assert len(files) <= MOST_FILES, files
