import importlib.util

import pytest
import torch
from supernet_nets import shaken, views

from thinwire.systems.supernet.stereo import ElasticStereo, export


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # of torch 2.9's own reader
@pytest.mark.slow
@pytest.mark.parametrize("deformable", [0, 1])
def test_the_exported_file_computes_the_same(tmp_path, deformable):
    net = shaken(ElasticStereo.tiny(deformable)).eval()
    plain = net.extract(net.space.smallest).eval()
    assert export(plain, tmp_path / "net.pt2", (24, 48)) <= 1e-4
    pair = views(batch=1)
    found = torch.export.load(tmp_path / "net.pt2").module()(*pair)
    torch.testing.assert_close(found, plain(*pair)[-1], rtol=1e-4, atol=1e-4)


ONNX = ("onnx", "onnxscript", "onnxruntime")


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch's own exporter
@pytest.mark.skipif(not all(map(importlib.util.find_spec, ONNX)), reason=f"one of {', '.join(ONNX)} is not installed")
@pytest.mark.slow
def test_the_onnx_file_computes_the_same(tmp_path):
    net = shaken(ElasticStereo.tiny(0)).eval()
    plain = net.extract(net.space.smallest).eval()
    assert export(plain, tmp_path / "net.onnx", (24, 48)) <= 1e-3
