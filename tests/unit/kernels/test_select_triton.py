"""The Triton kernels in Triton's interpreter; on a GPU: tests/gpu."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from thinwire.core.kernels.select import top_k

histogram = importlib.import_module("thinwire.core.kernels.select.histogram")
GPU = Path(__file__).parents[2] / "gpu"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is for Linux")


def _said(script, *arguments, **variables):
    environment = {**os.environ, "TRITON_DEFAULT_FP_FUSION": "1", **variables}
    done = subprocess.run(
        [sys.executable, str(GPU / script), *arguments], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_triton
def test_kernels_equal_their_twins_in_the_interpreter():
    assert _said("triton_cases.py", TRITON_INTERPRET="1") == "equal"


@needs_triton
@pytest.mark.parametrize(
    "cards", [["90"], pytest.param(["75", "80", "100", "gfx90a", "gfx942"], marks=pytest.mark.slow)], ids=len
)
def test_kernels_compile_for_six_cards_without_a_spill(cards, tmp_path):
    found = json.loads(_said("triton_ahead.py", *cards, TRITON_CACHE_DIR=str(tmp_path)))
    assert found == {key: [0, 0, 0] for key in cards}


def test_kernels_are_taken_for_cuda_tensors_alone(monkeypatch):
    class OnCard(torch.Tensor):
        is_cuda = True

    x = torch.ones(3)
    assert not histogram.triton_serves(x)
    monkeypatch.setattr(histogram, "triton_installed", lambda: True)
    assert histogram.triton_serves(x.as_subclass(OnCard))
    monkeypatch.setattr(histogram, "triton_installed", lambda: False)
    assert not histogram.triton_serves(x.as_subclass(OnCard))


def test_without_triton_the_option_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)  # nothing of that name can be imported
    monkeypatch.delitem(sys.modules, "thinwire.core.kernels.select.triton_histogram", raising=False)
    with pytest.raises(ImportError, match="pip install triton"):
        top_k(torch.ones(3), 1, "histogram", engine="triton")
