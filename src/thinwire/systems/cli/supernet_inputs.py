"""Inputs of the verbs of ``thinwire supernet``: sizes, networks, pairs, phases."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.core.program import Method
    from thinwire.systems.supernet import SubNet
    from thinwire.systems.supernet.stereo import ElasticStereo, Pairs, Phase

MADE_UP = ("dots", "planes", "scenes")
_KINDS = {"dots": "pieces", "planes": "plane", "scenes": "scene"}


def parse_size(text: str) -> tuple[int, int]:
    """Parse ``48x96``: height, then width.

    Raises:
        ValueError: the text has another form.
    """
    found = re.fullmatch(r"(\d+)x(\d+)", text.strip())
    if found is None or "0" in found.groups():
        raise ValueError(f"--size {text}: give height x width, such as 48x96")
    return int(found[1]), int(found[2])


def parse_pairs(data: str, size: tuple[int, int], max_disparity: float, count: int, seed: int) -> Pairs:
    """Return synthetic pairs, or those of a list of files, cropped to the size.

    Raises:
        ValueError: neither a known kind nor a file.
    """
    from thinwire.systems.supernet.stereo import RandomDots, StereoFiles

    if data in MADE_UP:
        return RandomDots(count, *size, max_disparity, _KINDS[data], seed)
    if not Path(data).is_file():
        raise ValueError(f"data {data!r} is neither one of {', '.join(MADE_UP)} nor a file that lists pairs")
    return StereoFiles(data, size, augment=False, seed=seed)


def parse_method(text: str) -> Method | str:
    """Parse ``active``, ``dense``, or the method for the active part: ``topk:density=0.01``."""
    from thinwire import method
    from thinwire.tools.bench.words import split_options

    name, options = split_options(text)
    return name if name in ("active", "dense") and not options else method(name, **options)


def make_net(config: str, deformable: int | None, elastic_refinement: bool) -> ElasticStereo:
    """Build an untrained network of a named configuration.

    Raises:
        ValueError: an unknown name.
    """
    from dataclasses import replace

    from thinwire.systems.supernet import Space
    from thinwire.systems.supernet.stereo import ElasticStereo

    if config == "tiny":
        if elastic_refinement:
            raise ValueError("--elastic-refinement is for --config published")
        return ElasticStereo.tiny() if deformable is None else ElasticStereo.tiny(deformable)
    if config != "published":
        raise ValueError(f"--config {config!r} must be tiny or published")
    space = Space()
    if elastic_refinement:
        space = replace(space, refine_widths=(16, 32), refine_depths=(2, 4, 6))
    return ElasticStereo(space, deformable=3 if deformable is None else deformable)


def make_phases(net: ElasticStereo, config: str, steps: str, epoch: int | None, sub_nets: int) -> tuple[Phase, ...]:
    """Return the published phases, for epochs of this many steps; or two short ones.

    Raises:
        ValueError: ``steps`` is not two numbers.
    """
    from thinwire.systems.supernet.stereo import published, short

    if epoch is not None:
        if config != "published" or net.space.refine_widths:
            raise ValueError("--epoch is for --config published without --elastic-refinement; else give --steps")
        return published(epoch)
    found = re.fullmatch(r"(\d+),(\d+)", steps.strip())
    if found is None:
        raise ValueError(f"--steps {steps}: give the steps of the large and of the shrinking phase, such as 300,300")
    return short(net.space, int(found[1]), int(found[2]), sub_nets)


def parse_sub_net(text: str, net: ElasticStereo) -> SubNet:
    """``largest``, ``smallest``, a file that search wrote, or four numbers k,d,e,S for all blocks.

    Raises:
        ValueError: none of these, or outside the network's space.
    """
    import json

    from thinwire.systems.supernet import SubNet

    if text in ("largest", "smallest"):
        return net.space.largest if text == "largest" else net.space.smallest
    if found := re.fullmatch(r"(\d+),(\d+),(\d+),(\d+)", text):
        kernel, depth, expand, scales = map(int, found.groups())
        return net.space.uniform(kernel, depth, expand, scales)
    if not Path(text).is_file():
        raise ValueError(
            f"--sub-net {text} is neither largest, smallest, k,d,e,S nor a file from thinwire supernet search"
        )
    content = Path(text).read_text()
    try:
        data = json.loads(content)
        content = json.dumps(data["sub_net"]) if "sub_net" in data else content
    except (TypeError, ValueError, RecursionError):
        pass  # from_json reports what is wrong
    made = SubNet.from_json(content)
    net.space.check(made)
    return made


def corners(net: ElasticStereo) -> dict[str, Any]:
    """Return the sub-networks that are reported after training, by name."""
    space = net.space
    small = space.smallest
    middle = space.uniform(space.kernels[-1], space.depths[0], space.expands[-1], space.scales[0])
    return {"largest": space.largest, "shallow": middle, "smallest": small}
