"""One clear sentence for what a cache cannot do; how much memory it may take."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from cache_sources import Digits, cached, scale
from PIL import Image

from thinwire.systems.data import CachedDataset
from thinwire.systems.data.levels import budget, room

NAMED = {"dataset_id": "digits", "version": 1, "memory_bytes": 8 << 20}


def image_of(raw):
    return Image.fromarray(raw[0].astype(np.uint8))


@pytest.mark.parametrize("draw", [torch.rand, np.random.rand, lambda n: __import__("random").random()])
def test_a_random_prefix(tmp_path, draw):
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    with pytest.raises(ValueError, match="the prefix is random: move it to suffix"):
        cached(Digits(), lambda raw: raw[0] + float(np.ravel(draw(1))[0]), prefix_id="noise", directory=tmp_path)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ((scale,), ValueError, "give prefix_id="),
        ((image_of,), TypeError, "turn an image into a tensor"),
        ((lambda raw: [1, 2],), TypeError, "sample is a list, which cannot be stored"),
        ((lambda raw: {"a": (None,)},), TypeError, r"sample\['a'\]\[0\] is a NoneType"),
        ((lambda raw: np.array(["text"]),), TypeError, "dtype"),
    ],
)
def test_prefixes_that_cannot_be_kept(tmp_path, arguments, error, words):
    options = {} if "prefix_id" in words else {"prefix_id": "x"}
    with pytest.raises(error, match=words):
        CachedDataset(Digits(), *arguments, directory=tmp_path, **NAMED, **options)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"nodes": 0}, "nodes must be at least 1"),
        ({"node": 2, "nodes": 2}, "node from 0 to nodes - 1"),
        ({"nodes": 61}, "more than the 60 samples"),
        ({"verify": "never"}, "use one of first, always"),
        ({"check": "never"}, "use one of first, always"),
        ({"memory_bytes": 0}, "positive number of bytes"),
        ({"memory_bytes": "half"}, "positive number of bytes"),
        ({"memory_bytes": 100}, "leaves no room"),
        ({"memory_bytes": 1 << 60}, r"memory_bytes=1152921504606846976 is more than nine tenths of the \d+ bytes"),
    ],
)
def test_options(tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        cached(Digits(), directory=tmp_path, **options)


def test_sources_and_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match="missing"):
        cached(Digits(), directory=tmp_path / "missing")
    with pytest.raises(TypeError, match=r"CachedDataset\.stream"):
        cached(iter([1, 2]), directory=tmp_path)


def system(tmp_path, limit, use, inactive, version):
    """A small copy of the files in /proc and /sys that tell of memory."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable: 2000000 kB\n")
    if version == 2:
        (tmp_path / "proc/self/cgroup").write_text("0::/job/step\n")
        top, names = tmp_path / "sys/fs/cgroup", ("memory.max", "memory.current")
        (top / "job/step").mkdir(parents=True)
        (top / "job/step/memory.max").write_text("max\n")
        rows = f"anon 5\ninactive_file {inactive}\n"
    else:
        (tmp_path / "proc/self/cgroup").write_text("3:cpu:/job\n4:memory:/job\n")
        top, names = tmp_path / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        (top / "job").mkdir(parents=True)
        rows = f"total_inactive_file {inactive}\n"
    (top / "job" / names[0]).write_text(f"{limit}\n")
    (top / "job" / names[1]).write_text(f"{use}\n")
    (top / "job/memory.stat").write_text(rows)
    return tmp_path


@pytest.mark.parametrize("version", [1, 2])
def test_the_control_group_bounds_the_budget(tmp_path, version):
    root = system(tmp_path, limit=1_000_000, use=400_000, inactive=100_000, version=version)
    bounds = room(tmp_path, root)
    assert bounds["free memory"] == 2_048_000_000
    assert bounds["left under the cgroup limit"] == 700_000
    assert budget("auto", tmp_path, 0, root) == 350_000
    assert budget(630_000, tmp_path, 0, root) == 630_000
    assert budget(720_000, tmp_path, 100_000, root) == 720_000  # what the arena holds already is ours
    with pytest.raises(ValueError, match="memory_bytes=630001 is more than nine tenths of the 700000 bytes left under"):
        budget(630_001, tmp_path, 0, root)


def test_another_system(tmp_path):
    with pytest.raises(OSError, match="needs Linux"):
        room(tmp_path, tmp_path)


def test_without_safetensors_one_sentence(tmp_path):
    code = (
        "import sys; sys.modules['safetensors'] = None\n"
        "import thinwire as tw\n"
        "tw.data.CachedDataset([1, 2], str, dataset_id='d', version=1)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: a data cache stores samples with safetensors: pip install 'thinwire[data]'" in done.stderr
