"""Export a sub-network to a file that runs without thinwire: ``torch.export``, or ONNX with its libraries."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from thinwire.core.durable import read_file, write_whole
from thinwire.systems.supernet.stereo.network import ElasticStereo, Stereo

_FORMAT = "thinwire supernet 1"


def save_net(net: ElasticStereo, path: str | Path) -> None:
    """Write its arguments and its state, completely or not at all."""
    write_whole(Path(path), {"format": _FORMAT, "config": net.config, "state": net.state_dict()})


def load_net(path: str | Path) -> ElasticStereo:
    """Read what ``save_net`` wrote.

    Raises:
        ValueError: the file is missing, or it is something else.
    """
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path}: thinwire supernet train writes net.pt, and search calibrated.pt")
    content = read_file(Path(path))
    try:
        if content["format"] != _FORMAT:
            raise KeyError(content["format"])
        net = ElasticStereo.from_config(content["config"])
        net.load_state_dict(content["state"])
    except Exception as error:
        raise ValueError(f"{path} is not a network of thinwire supernet train: {type(error).__name__}") from error
    return net


class Finest(nn.Module):
    def __init__(self, net: Stereo) -> None:
        super().__init__()
        self.net = net

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        finest: Tensor = self.net(left, right)[-1]
        return finest


@torch.no_grad()
def export(net: Stereo, path: str | Path, size: tuple[int, int]) -> float:
    """Write a ``.pt2`` (``torch.export``) or ``.onnx`` file for pairs of one size, and compare it with ``net``.

    Returns the largest difference of a disparity between the file, read back, and ``net``, in pixels.

    Raises:
        ValueError: the name has another ending, or libraries for ONNX are missing.
    """
    path = Path(path)
    if path.suffix not in (".pt2", ".onnx"):
        raise ValueError(f"{path}: the name must end in .pt2 (torch.export) or .onnx")
    first = next(net.parameters())
    finest = Finest(net).eval()
    views = tuple(torch.randn(1, 3, *size, dtype=first.dtype, device=first.device) for _ in range(2))
    if path.suffix == ".pt2":
        torch.export.save(torch.export.export(finest, views), path)
        with warnings.catch_warnings():
            # torch 2.9 warns about its own reading
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            other = torch.export.load(path).module()(*views)
    else:
        other = _onnx(finest, views, path)
    return float((finest(*views) - other).abs().max())


def _onnx(finest: Finest, views: tuple[Tensor, ...], path: Path) -> Tensor:
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"an .onnx file needs {', '.join(missing)}: pip install {' '.join(missing)}")
    import onnxruntime

    torch.onnx.export(finest, views, path, input_names=["left", "right"], output_names=["disparity"], dynamo=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    feed = {"left": views[0].cpu().numpy(), "right": views[1].cpu().numpy()}
    return torch.from_numpy(session.run(None, feed)[0]).to(views[0].device)
