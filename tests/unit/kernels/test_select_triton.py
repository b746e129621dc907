"""The Triton kernels in Triton's interpreter; on a GPU: tests/gpu."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from thinwire.kernels.select import top_k

CASES = Path(__file__).parents[2] / "gpu" / "triton_cases.py"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_equal_their_twins_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, str(CASES)], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "equal", done.stderr


def test_without_triton_the_option_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)  # nothing of that name can be imported
    for name in ("", ".select"):
        monkeypatch.delitem(sys.modules, f"thinwire.kernels.triton{name}", raising=False)
    with pytest.raises(ImportError, match="pip install triton"):
        top_k(torch.ones(3), 1, "histogram", engine="triton")
