"""Whatever comes to a split cloud: its reader refuses it in bounds, and an edge trains as it would have."""

import contextlib
import random
import socket

import torch
from split_ends import assert_same, batch_of, edge_end, halves, in_process, linked, serving

from thinwire.systems.split.frames import Message, encode

GOOD = [
    b"".join(encode(message))
    for message in (
        Message("hello", fields={"edge": "x", "steps": [1, 2]}),
        Message("z", 3, 4, parts=(("z", torch.ones(2, 3)), ("lengths", torch.ones(2, dtype=torch.uint16)))),
        Message("labels", 3, 5, evaluation=True, parts=(("labels", torch.ones(2, dtype=torch.uint8)),)),
        Message("bye", 3, 6, fields={}),
    )
]


def spoiled(draw):
    """True messages that are cut, changed, doubled or in another order; or no messages."""
    if draw.random() < 0.1:
        return draw.randbytes(draw.randrange(200))
    words = bytearray(b"".join(draw.choices(GOOD, k=draw.randrange(1, 5))))
    for _ in range(draw.randrange(3)):
        at = draw.randrange(len(words))
        words[at : at + draw.choice((1, 4, 8))] = draw.choice((b"", b"\xff" * 8, draw.randbytes(8)))[: len(words) - at]
    return bytes(words[: draw.randrange(len(words) + 1)] if words and draw.random() < 0.3 else words)


def test_an_edge_trains_as_if_nobody_else_had_come():
    front, back = halves()
    draw = random.Random(0)
    with serving(back) as server, linked(server, edge_end(front)) as (link, edge):
        losses = []
        for step in range(6):
            for _ in range(20):
                with socket.create_connection(("127.0.0.1", server.port)) as stranger, contextlib.suppress(OSError):
                    stranger.sendall(spoiled(draw))
            losses.append(float(edge.step(batch_of(step))))
        edge.bye()
    assert_same(losses, front, back, in_process())
    assert link.reconnects == 0
