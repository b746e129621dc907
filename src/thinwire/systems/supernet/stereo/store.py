"""A trained supernet as one file, read back without pickle."""

from __future__ import annotations

from pathlib import Path

from thinwire.core.durable import read_file, write_whole
from thinwire.systems.supernet.stereo.network import ElasticStereo

_FORMAT = "thinwire supernet 1"
_READABLE = (_FORMAT, "thinwire elastic 1")


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
        if content["format"] not in _READABLE:
            raise KeyError(content["format"])
        net = ElasticStereo.from_config(content["config"])
        net.load_state_dict(content["state"])
    except Exception as error:
        raise ValueError(f"{path} is not a network of thinwire supernet train: {type(error).__name__}") from error
    return net
