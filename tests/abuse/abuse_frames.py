"""What somebody sends who wants to do harm, or runs another program: frames of a parameter server, more or less."""

import random
import struct

from thinwire.systems.link.codec import FRAME
from thinwire.systems.parameter_server import messages as msg

EDGES = (0, 1, 2, 3, 7, -1, 44, 45, 255, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63))
REAL = tuple(struct.unpack("<q", struct.pack("<d", x))[0] for x in (0.0, 1.0, -1.0, 1e308, float("nan"), float("inf")))
ONE = REAL[1]
OF_A_MEMBER = (msg.IterationNumber, msg.IterationNumber, msg.Grad, msg.Grad, msg.Grad, msg.Bye)
OF_A_SHARD = (msg.ShardUpdated, msg.ShardSaved, msg.PieceArrived, msg.MemberLeft, msg.Ping)
OF_A_VISITOR = (msg.Piece, msg.Piece, msg.Ping)
OF_A_WORKER = (msg.Result, msg.Result, msg.Buffers, msg.Ping)
WITH_TENSORS = (msg.Grad, msg.ShardUpdated, msg.Piece, msg.Result)


def number(draw, near, wild):
    if draw.random() >= wild:
        return draw.choice((*near, 0, 1, 2, 3, -1, 2**40, ONE))
    return draw.choice(EDGES) if draw.random() < 0.5 else draw.choice(REAL)


def frame(draw, near, wild, likely):
    """128 bytes: mostly a known kind with odd values, sometimes rows and a tensor that follow or do not.

    Args:
        near: numbers that may be right, the first one in the first place.
        wild: how likely something is that ends the connection at once.
        likely: kinds of message that who is there may send.
    """
    if draw.random() < wild / 4:
        return draw.randbytes(FRAME.size)
    kind = draw.choice(msg.CODEC.kinds) if draw.random() < wild else draw.choice(likely)
    rows = draw.choice((0, 1, 2)) if kind is msg.Grad else 0
    tensor = draw.choice((176, 88, 8, 7)) if rows or (kind in WITH_TENSORS and draw.random() < 0.5) else 0
    if draw.random() < wild / 2:
        rows, tensor = draw.choice((0, 1, 2, 2**16, 2**40)), draw.choice((0, 8, 176, 352, 2**40))
    values = [number(draw, near, wild) for _ in range(13)]
    if draw.random() >= wild:
        values[0] = near[0]
    head = FRAME.pack(msg.CODEC.kinds.index(kind), rows, tensor, *values)
    if 0 < rows < 3:
        head += struct.pack(f"<{4 * rows}q", *(number(draw, near, wild) for _ in range(4 * rows)))
    return head if draw.random() >= wild / 4 else head[: draw.randrange(len(head))]


def stream(seed, near, likely=OF_A_MEMBER, most=40):
    """Up to so many of them one after another; some come again, some in another order."""
    draw = random.Random(seed)
    wild = draw.choice((0.0, 0.02, 0.2))
    out = [frame(draw, near, wild, likely) for _ in range(draw.randrange(1, most))]
    if draw.random() < 0.3:
        out += out[: draw.randrange(len(out) + 1)]
    if draw.random() < 0.3:
        draw.shuffle(out)
    return out


def hello(node, layout, instance):
    return msg.encode(msg.Hello(node, 1, layout, instance=instance))
