import random
import struct
import tracemalloc
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.systems.split.errors import FrameError, SessionError
from thinwire.systems.split.frames import CHECKSUM, DTYPES, HEADER, KINDS, ByteLedger, Message, MessageReader, encode

LIMIT = 1 << 20
STEP = Message(
    "z", 7, 3, parts=(("z", torch.arange(24.0).view(2, 3, 4)), ("lengths", torch.tensor([3, 2]).to(torch.uint16)))
)
HELLO = Message("hello", fields={"protocol": 1, "steps": [0, 5]})


def raw(message):
    return b"".join(encode(message))


def same(a, b):
    assert (a.kind, a.step, a.sequence, a.evaluation, a.fields) == (b.kind, b.step, b.sequence, b.evaluation, b.fields)
    assert [kind for kind, _ in a.parts] == [kind for kind, _ in b.parts]
    for (_, x), (_, y) in zip(a.parts, b.parts, strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        assert x.reshape(-1).view(torch.uint8).tolist() == y.reshape(-1).view(torch.uint8).tolist()


@settings(max_examples=30, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=8),
    dtype=st.sampled_from(list(DTYPES.values())),
    shape=st.lists(st.integers(0, 5), max_size=4),
    step=st.integers(0, 2**64 - 1),
    sequence=st.integers(0, 2**32 - 1),
    evaluation=st.booleans(),
    pieces=st.integers(1, 50),
)
def test_messages_come_back_in_pieces_of_any_size(kinds, dtype, shape, step, sequence, evaluation, pieces):
    tensor = torch.arange(torch.Size(shape).numel()).to(dtype).view(shape)
    message = Message(kinds[0], step, sequence, evaluation, tuple((kind, tensor) for kind in kinds))
    sent, got = ByteLedger(), ByteLedger()
    data = b"".join(encode(message, sent))
    reader = MessageReader(LIMIT, got)
    found = []
    for start in range(0, len(data), pieces):
        found += reader.feed(data[start : start + pieces])
    assert len(found) == 1
    same(found[0], message)
    assert not reader.middle
    assert sent.sent == got.received
    assert sum(sent.sent.values()) == len(data)


def test_control_messages_are_json():
    reader = MessageReader(LIMIT)
    (found,) = reader.feed(raw(HELLO))
    same(found, HELLO)


def test_header_is_32_bytes_as_documented():
    data = raw(Message("dz", 9, 4, parts=(("dz", torch.zeros(2, 3)),)))
    magic, kind, dtype, dims, flags, step, sequence, size = HEADER.unpack(data[:28])
    assert (magic, KINDS[kind - 1], DTYPES[dtype], dims, flags) == (b"TWF1", "dz", torch.float32, 2, 1)
    assert (step, sequence, size, len(data)) == (9, 4, 24, 32 + 8 + 24)
    assert struct.unpack(">II", data[32:40]) == (2, 3)
    assert data[28:32] == CHECKSUM.pack(zlib.crc32(data[:28] + data[32:]))


def test_every_flipped_bit_is_found():
    data = bytearray(raw(STEP))
    for position in range(len(data)):
        for bit in (0, 3, 7):
            data[position] ^= 1 << bit
            reader = MessageReader(LIMIT)
            try:
                assert reader.feed(bytes(data)) == []  # a longer payload was announced: it waits for more
                assert reader.middle
            except FrameError:
                with pytest.raises(FrameError, match="after a broken frame"):
                    reader.feed(raw(STEP))
            data[position] ^= 1 << bit


def forged(kind=3, dtype=1, dims=(4,), flags=1, size=16, payload=bytes(16), magic=b"TWF1"):
    head = HEADER.pack(magic, kind, dtype, len(dims), flags, 0, 0, size)
    sizes = struct.pack(f">{len(dims)}I", *dims)
    return head + CHECKSUM.pack(zlib.crc32(head + sizes + payload)) + sizes + payload


@pytest.mark.parametrize(
    "data,says",
    [
        (forged(magic=b"HTTP"), "another program"),
        (forged(kind=0), "unknown"),
        (forged(kind=len(KINDS) + 1), "unknown"),
        (forged(dtype=11), "unknown"),
        (forged(dims=(1, 1, 1, 2, 2)), "malformed"),
        (forged(flags=4), "malformed"),
        (forged(dims=(5,)), "cannot hold"),
        (forged(size=LIMIT + 1), "over the limit"),
        (forged(dims=(2**32 - 1,) * 3 + (0,), size=0, payload=b""), "cannot have the dimensions"),
        (forged(dtype=9, dims=(), size=3, payload=b"[1]"), "not a JSON object"),
        (forged(dtype=9, dims=(), size=2, payload=b"{]"), "is not JSON"),
        (forged(dtype=9, dims=(), size=1 << 17, payload=bytes(1 << 17)), "over the limit"),
    ],
)
def test_well_made_nonsense_is_refused(data, says):
    with pytest.raises(FrameError, match=says):
        MessageReader(LIMIT).feed(data)


def test_a_message_stays_within_the_limit_in_sum_and_in_number():
    part = forged(flags=0)
    with pytest.raises(FrameError, match="more than 8 frames"):
        MessageReader(LIMIT).feed(part * 20)
    large = forged(flags=0, dims=(50,), size=200, payload=bytes(200))
    with pytest.raises(FrameError, match="over the limit of 512"):
        MessageReader(512).feed(large * 3)


def test_frames_of_two_messages_do_not_mix():
    first = forged(flags=0)
    other = bytearray(forged())
    other[8:16] = struct.pack(">Q", 5)  # another step
    other[28:32] = CHECKSUM.pack(zlib.crc32(bytes(other[:28] + other[32:])))
    with pytest.raises(FrameError, match="does not belong"):
        MessageReader(LIMIT).feed(first + bytes(other))


def test_an_announced_payload_takes_no_memory_before_it_comes():
    reader = MessageReader(1 << 30)
    head = forged(dims=(1 << 28,), size=1 << 30, payload=b"")
    tracemalloc.start()
    assert reader.feed(head) == []
    assert tracemalloc.get_traced_memory()[1] < 1 << 16
    tracemalloc.stop()


@pytest.mark.parametrize(
    "message,says",
    [
        (Message("z"), "0 frames"),
        (Message("z", parts=(("z", torch.zeros(1)),) * 9), "9 frames"),
        (Message("z", parts=(("dz", torch.zeros(1)),)), "cannot be sent"),
        (Message("z", parts=(("z", torch.zeros(1, dtype=torch.int64)),)), "no frame can hold"),
        (Message("z", parts=(("z", torch.zeros(1, 1, 1, 1, 1)),)), "no frame can hold"),
        (Message("hello", fields={"x": "y" * 70000}), "over the limit"),
    ],
)
def test_what_cannot_be_sent(message, says):
    with pytest.raises(FrameError, match=says):
        list(encode(message))


def test_one_tensor_of_a_kind():
    assert STEP.one("z", torch.float32, (2, 3, 4)).shape == (2, 3, 4)
    for words in (("dz",), ("z", torch.float64), ("z", torch.float32, (1,))):
        with pytest.raises(SessionError, match="step 7"):
            STEP.one(*words)


def fuzz(count, seed):
    """Mutated streams: each ends in messages, in waiting for more, or in a FrameError. Returns how many of each."""
    draw = random.Random(seed)
    seeds = [raw(STEP), raw(HELLO), raw(Message("loss", parts=(("loss", torch.tensor(1.0)),)))]
    outcomes = {"message": 0, "waiting": 0, "refused": 0}
    for _ in range(count):
        data = bytearray(draw.choice(seeds))
        for _ in range(draw.randint(1, 4)):
            way = draw.randrange(5)
            at = draw.randrange(len(data)) if data else 0
            if way == 0 and data:
                data[at] = draw.randrange(256)
            elif way == 1 and data:
                data[at] ^= 1 << draw.randrange(8)
            elif way == 2:
                del data[at : at + draw.randint(1, 40)]
            elif way == 3:
                data[at:at] = draw.randbytes(draw.randint(1, 12))
            else:
                data += draw.choice(seeds)[: draw.randint(1, 60)]
        if draw.random() < 0.5 and len(data) >= 32:  # a checksum that is right, so that the fields behind it are tried
            size = struct.unpack(">Q", data[20:28])[0]
            whole = 32 + 4 * data[6] + size
            if whole <= len(data):
                data[28:32] = CHECKSUM.pack(zlib.crc32(bytes(data[:28] + data[32:whole])))
        reader = MessageReader(4096)
        try:
            found = reader.feed(bytes(data))
        except FrameError:
            outcomes["refused"] += 1
        else:
            outcomes["message" if found else "waiting"] += 1
    return outcomes


def test_mutated_frames():
    outcomes = fuzz(6000, 0)
    assert min(outcomes.values()) > 30, outcomes
