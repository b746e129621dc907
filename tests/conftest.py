"""Makes the helpers in tests/ importable and keeps torch to one thread."""

import atexit
import contextlib
import gc
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "dist"), str(HERE / "unit"), str(HERE / "abuse"), str(HERE / "unit" / "split")]
from seconds import Seconds  # noqa: E402

torch.set_num_threads(1)
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="thinwire-tests-")  # nothing is remembered from other runs
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
# Other work on the machine is no failure.
settings.register_profile("thinwire", settings(deadline=None, suppress_health_check=[HealthCheck.too_slow]))
settings.load_profile("thinwire")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in `make test &`: what we start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    config.pluginmanager.register(Seconds())


def pytest_collection_finish(session):
    gc.freeze()  # torch and thousands of tests stay to the end: a full collection of them takes 0.3 s, again and again


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        _end_processes_of(item.nodeid)
    return report


def _end_processes_of(test):
    """A launcher killed at a time limit leaves ranks behind, which would slow all tests after it."""
    marks = (f"PYTEST_CURRENT_TEST={test} (".encode(), os.environ.get("PYTEST_XDIST_TESTRUNUID", "").encode())
    for path in Path("/proc").glob("[1-9]*/environ"):
        with contextlib.suppress(OSError):
            inherited, command = path.read_bytes(), path.with_name("cmdline").read_bytes()
            # What multiprocessing started is spawned.py's, which keeps its ranks for later tests.
            if all(mark in inherited for mark in marks) and b"multiprocessing" not in command:
                os.kill(int(path.parent.name), signal.SIGKILL)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Under ``-n``: see sharing.py."""
    from sharing import ByFile

    return ByFile(config, log)


@pytest.fixture(scope="session")
def keys(tmp_path_factory):
    """Certificates of two authorities, "ours" and "theirs"; of ours, "late" has expired, "early" begins tomorrow."""
    from datetime import datetime, timedelta, timezone

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    from thinwire.systems.link.keys import new_keys

    folder = tmp_path_factory.mktemp("keys")
    others = ["edge", "other", "shard0", "shard1", "node0", "node1"]
    new_keys(folder / "ours", ["server", "a", "b", "late", "early", *others])
    new_keys(folder / "theirs", ["server", "a", "edge", "node0"])
    signer = serialization.load_pem_private_key((folder / "ours" / "ca.key").read_bytes(), None)
    for name, days in (("late", -2), ("early", 1)):
        path, then = folder / "ours" / name / "identity.crt", datetime.now(timezone.utc) + timedelta(days)
        old = x509.load_pem_x509_certificate(path.read_bytes())
        made = x509.CertificateBuilder(old.issuer, old.subject, old.public_key(), 7, then, then + timedelta(1))
        path.write_bytes(made.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    return folder


@pytest.fixture
def of(keys):
    """What somebody of this name shows."""
    from thinwire.core.tls import Credentials

    return lambda name, whose="ours": Credentials.of(keys / whose / name)
