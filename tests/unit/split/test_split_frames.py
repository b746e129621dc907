"""Messages as a link carries them: they come back, and what was damaged, is too long or makes no sense is refused."""

import random
import tracemalloc
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.systems.link.codec import FRAME, ROW_BYTES
from thinwire.systems.split.errors import SessionError
from thinwire.systems.split.frames import CODEC, DTYPES, KINDS, ByteLedger, Message, Part, header_bytes, pack, unpack

STEP = Message(
    "z", 7, 3, parts=(("z", torch.arange(24.0).view(2, 3, 4)), ("lengths", torch.tensor([3, 2]).to(torch.uint16)))
)
HELLO = Message("ready", fields={"protocol": 1, "steps": [0, 5]})


def sent(message):
    """Its frame with the rows, and its tensors' bytes."""
    packed = pack(message)
    data = b"" if packed.tensor is None else bytes(packed.tensor.tolist())
    return CODEC.encode(packed, None, len(data)), data


def received(head, data):
    packed, rows, size = CODEC.decode(head[: FRAME.size])
    if len(head) != FRAME.size + ROW_BYTES * rows or size != len(data):
        raise ValueError("it would wait for more")
    packed = CODEC.with_rows(packed, head[FRAME.size :]) if rows else packed
    return unpack(replace(packed, tensor=torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else None))


def same(a, b):
    assert (a.kind, a.step, a.sequence, a.evaluation, a.fields) == (b.kind, b.step, b.sequence, b.evaluation, b.fields)
    assert [kind for kind, _ in a.parts] == [kind for kind, _ in b.parts]
    for (_, x), (_, y) in zip(a.parts, b.parts, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert x.reshape(-1).view(torch.uint8).tolist() == y.reshape(-1).view(torch.uint8).tolist()


@settings(max_examples=30, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=8),
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 5), max_size=4),
    step=st.integers(0, 2**62),
    sequence=st.integers(0, 2**62),
    evaluation=st.booleans(),
)
def test_messages_come_back(kinds, dtype, shape, step, sequence, evaluation):
    tensor = torch.arange(torch.Size(shape).numel()).to(dtype).view(shape)
    message = Message(kinds[0], step, sequence, evaluation, tuple((kind, tensor) for kind in kinds))
    head, data = sent(message)
    found = received(head, data)
    same(found, message)
    there, here = ByteLedger(), ByteLedger()
    there.count(message, there.sent)
    here.count(found, here.received)
    assert there.sent == here.received
    assert sum(there.sent.values()) == len(head) + len(data) == header_bytes(len(kinds)) + len(data)


def test_control_messages_are_json():
    same(received(*sent(HELLO)), HELLO)


def test_every_flipped_bit_is_found():
    head, data = sent(STEP)
    whole, harmless = bytearray(head + data), range(24 + 8 * 4, FRAME.size)  # numbers that a message does not have
    for position in set(range(len(whole))) - set(harmless):
        for bit in (0, 3, 7):
            whole[position] ^= 1 << bit
            with pytest.raises(ValueError):
                received(bytes(whole[: len(head)]), bytes(whole[len(head) :]))
            whole[position] ^= 1 << bit


def forged(rows, data=bytes(16)):
    packed = replace(pack(STEP), rows=tuple(rows), tensor=torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return replace(packed, check=packed.checksum(packed.tensor))


Z, TEXT = KINDS.index("z"), len(DTYPES)


@pytest.mark.parametrize(
    "packed, says",
    [
        (forged([]), "0 parts"),
        (forged([Part.of("z", 0, (0,))] * 9), "9 parts"),
        (forged([replace(Part.of("z", 0, (4,)), kind=-1)]), "unknown"),
        (forged([replace(Part.of("z", 0, (4,)), kind=len(KINDS))]), "unknown"),
        (forged([Part.of("z", TEXT + 1, (4,))]), "unknown"),
        (forged([Part.of("z", -1, (4,))]), "unknown"),
        (forged([replace(Part.of("z", 0, (4,)), first=-(2**40))]), "unknown"),
        (forged([Part.of("z", 0, (5,))]), "cannot hold"),
        (forged([Part.of("z", 0, (3,))]), "more than it announces"),
        (forged([Part.of("z", 0, (2**31 - 2,) * 3 + (0,)), Part.of("z", 0, (4,))]), "cannot have the dimensions"),
        (forged([Part.of("z", 0, (2**31 - 2,) * 4)]), "cannot hold"),
        (forged([Part.of("ready", TEXT, (3,))], b"[1]"), "not a JSON object"),
        (forged([Part.of("ready", TEXT, (2,))], b"{]"), "is not JSON"),
        (forged([Part.of("ready", TEXT, (60_000,))], b"[" * 60_000), "is not JSON"),
        (forged([Part.of("ready", TEXT, (1 << 17,))], bytes(1 << 17)), "over the limit"),
        (forged([Part.of("ready", TEXT, (2,)), Part.of("z", 5, (1,))], b"{}0"), "more than it announces"),
        (replace(forged([Part.of("z", 0, (4,))]), check=1), "damaged on the way"),
    ],
)
def test_well_made_nonsense_is_refused(packed, says):
    with pytest.raises(ValueError, match=says):
        unpack(packed)


def test_announced_dimensions_take_no_memory():
    packed = forged([Part.of("z", 0, (1 << 30,))])
    tracemalloc.start()
    with pytest.raises(ValueError, match="cannot hold"):
        unpack(packed)
    assert tracemalloc.get_traced_memory()[1] < 1 << 16
    tracemalloc.stop()


@pytest.mark.parametrize(
    "message,says",
    [
        (Message("z"), "0 parts"),
        (Message("z", parts=(("z", torch.zeros(1)),) * 9), "9 parts"),
        (Message("z", parts=(("dz", torch.zeros(1)),)), "cannot be sent"),
        (Message("z", parts=(("z", torch.zeros(1, dtype=torch.int64)),)), "no message can hold"),
        (Message("z", parts=(("z", torch.zeros(1, 1, 1, 1, 1)),)), "no message can hold"),
        (Message("ready", fields={"x": "y" * 70000}), "over the limit"),
    ],
)
def test_what_cannot_be_sent(message, says):
    with pytest.raises(ValueError, match=says):
        pack(message)


def test_one_tensor_of_a_kind():
    assert STEP.one("z", torch.float32, (2, 3, 4)).shape == (2, 3, 4)
    for words in (("dz",), ("z", torch.float64), ("z", torch.float32, (1,))):
        with pytest.raises(SessionError, match="step 7"):
            STEP.one(*words)


def test_mutated_messages():
    """Each is one of ours, or is refused."""
    draw, refused = random.Random(0), 0
    for _ in range(6000):
        head, data = map(bytearray, sent(draw.choice([STEP, HELLO])))
        for _ in range(draw.randint(1, 4)):
            words = draw.choice([head, data])
            words[draw.randrange(len(words))] = draw.randrange(256)
        try:
            received(bytes(head), bytes(data))
        except ValueError:
            refused += 1
    assert 4000 < refused < 6000
