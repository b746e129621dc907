"""What doctor says of Gloo's interface, against a real Gloo process in a network namespace."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from thinwire.tools.lab.network import tool

pytestmark = [pytest.mark.net, pytest.mark.dist]


def test_gloo_listens_where_doctor_says(any_mode, tmp_path):
    rights = ["--user", "--map-root-user"] if any_mode == "user" else []
    script = str(Path(__file__).parent / "gloo_listens.py")
    done = subprocess.run(
        [tool("unshare"), *rights, "--net", "--mount", sys.executable, script],
        cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == found[0]["cases"] >= 11  # one needs IPv6
    for one in found:
        if one["problem"]:
            assert one["real"] is None, one
        else:
            assert one["real"], one
            assert one["address"] in one["real"], one
            assert len(set(one["real"])) == len(one["interfaces"]), one
    assert sum(one["real"] is None for one in found) == 2
