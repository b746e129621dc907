"""What is kept in host memory, on a card: whole, and gone from the card, whatever its streams are busy with."""

import pytest
import torch

from thinwire.core.methods.cast import Cast
from thinwire.engine.local import Local, Nesterov
from thinwire.engine.local.host import HostMemory
from thinwire.engine.local.travel import LocalRanks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
SHAPES = {"a": (512, 1024), "b": (1024,), "c": (1024, 256), "d": (256,)}


def test_what_is_put_away_early_comes_back_whole():
    device = torch.device("cuda", torch.cuda.current_device())
    host = HostMemory(device, away=True)
    busy = torch.zeros(4096, 4096, device=device)
    for turn in range(8):
        for _ in range(20):  # tens of milliseconds: the copy is asked for before there is something to copy
            busy = busy @ busy
        kept = host.put_away("x", [torch.full((1 << 20,), float(turn), device=device)])
        torch.full((1 << 20,), -1.0, device=device)  # would be given the same memory
        (back,) = host.fetch(kept)
        assert bool((back == turn).all())
    host.settle()
    assert kept[0].is_pinned()
    assert bool((kept[0] == turn).all())


def trained(anchors):
    draw = torch.Generator().manual_seed(0)
    start = {name: torch.randn(shape, generator=draw).cuda() for name, shape in SHAPES.items()}
    local = Local(3, Cast("int8"), outer=Nesterov(), fragments=2, fragment_sync_delay=2, anchors=anchors)
    before = torch.cuda.memory_allocated()
    world = LocalRanks(local, [start, {name: x.clone() for name, x in start.items()}], start=0)
    for _ in range(14):
        for own in world.weights:
            for x in own.values():
                x.sub_(0.01 * torch.randn(x.shape, generator=draw).cuda())
        world.step()
    world.finish()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    return [x.cpu() for own in world.weights for x in own.values()], held


def test_the_same_bits_and_no_bytes():
    (ours, few), (theirs, many) = trained("cpu"), trained("device")
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs))
    outer = 2 * 2 * sum(4 * torch.Size(shape).numel() for shape in SHAPES.values())  # two ranks' weights and momenta
    assert many - few >= 0.95 * outer
