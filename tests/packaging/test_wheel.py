"""The wheel in a clean environment: what `make package` does, as a test."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_works_in_a_clean_environment(tmp_path):
    pytest.importorskip("build")
    script = str(Path(__file__).parent / "wheel.py")
    done = subprocess.run(
        [sys.executable, script, "--out", str(tmp_path)], capture_output=True, text=True, timeout=850, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert {path.suffix for path in tmp_path.iterdir()} == {".whl", ".gz"}
    assert "clean environment" in done.stdout
