"""The Triton kernels in Triton's interpreter; on a GPU: tests/gpu."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from thinwire.core.kernels import fused
from thinwire.core.kernels.select.mstopk import choose

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
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_kernels_equal_their_twins_in_the_interpreter():
    assert _said("triton_cases.py", TRITON_INTERPRET="1") == "equal"


@needs_triton
@pytest.mark.timeout(1200)
@pytest.mark.slow
def test_kernels_compile_for_six_cards_without_a_spill(tmp_path):
    cards = ["75", "80", "90", "100", "gfx90a", "gfx942"]
    found = json.loads(_said("triton_ahead.py", *cards, TRITON_CACHE_DIR=str(tmp_path)))
    assert found == dict.fromkeys(cards, 0)


def test_kernels_are_taken_for_cuda_tensors_alone(monkeypatch):
    class OnCard(torch.Tensor):
        is_cuda = True

    x = torch.ones(3).as_subclass(OnCard)
    for installed in (True, False):
        monkeypatch.setattr(fused, "triton_installed", lambda installed=installed: installed)
        assert choose.serves(x) is installed
        assert not choose.serves(torch.ones(3))
        assert not choose.serves(x.double())
