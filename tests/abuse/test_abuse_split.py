"""Whatever comes to a split cloud: it is refused in bounds, and an edge trains as it would have."""

import contextlib
import json
import random

import torch
from split_ends import assert_same, batch_of, edge_end, halves, in_process, linked, serving

from thinwire.core.errors import PairError
from thinwire.systems.link.hello import PeerIdentity
from thinwire.systems.link.listener import connect
from thinwire.systems.split.frames import CODEC, Message, pack

GOOD = [
    (CODEC.encode(packed := pack(message), None, packed.tensor.nbytes), packed.tensor)
    for message in (
        Message("z", 3, 4, parts=(("z", torch.ones(2, 3)), ("lengths", torch.ones(2, dtype=torch.uint16)))),
        Message("labels", 3, 5, evaluation=True, parts=(("labels", torch.ones(2, dtype=torch.uint8)),)),
        Message("bye", 3, 6, fields={}),
    )
]


def spoiled(draw, words):
    """True bytes that are cut or changed; or others."""
    if draw.random() < 0.1:
        return draw.randbytes(draw.randrange(200))
    words = bytearray(words)
    for _ in range(draw.randrange(3)):
        at = draw.randrange(len(words))
        words[at : at + draw.choice((1, 4, 8))] = draw.choice((b"", b"\xff" * 8, draw.randbytes(8)))[: len(words) - at]
    return bytes(words[: draw.randrange(len(words) + 1)] if words and draw.random() < 0.3 else words)


def test_an_edge_trains_as_if_nobody_else_had_come():
    """Guests come by another name, say a hello of some kind, and then send what they like."""
    front, back = halves()
    draw = random.Random(0)
    edge = edge_end(front)
    hello = json.dumps(edge.hello() | {"edge": "guest", "session": "x"}).encode()
    with serving(back) as server, linked(server, edge) as (link, edge):
        losses = []
        for step in range(6):
            for _ in range(20):
                with contextlib.suppress(PairError):
                    guest = connect("127.0.0.1", server.port, spoiled(draw, hello), PeerIdentity("edge", 0))
                    for frame, tensor in draw.choices(GOOD, k=3):
                        guest.send_frame(spoiled(draw, frame))
                        guest.send_tensor(tensor, 10.0)
                    guest.close()
            losses.append(float(edge.step(batch_of(step))))
        edge.bye()
    assert_same(losses, front, back, in_process())
    assert link.reconnects == 0
