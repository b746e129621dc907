"""Bytes by formulas against bytes that were counted, and the published ratio."""

import pytest
import split_models as small
import torch

from thinwire.systems.split import (
    Link,
    LocalPair,
    Recipe,
    Shape,
    SplitPlan,
    crossings,
    estimate,
    split_model,
)
from thinwire.systems.split.frames import ByteLedger, Message, header_bytes

BERT_BASE = Shape(768, 3072, 2)


def plan_bytes(plan, batch, length, **more):
    return estimate(crossings(plan, BERT_BASE, [length] * batch, batch, length, **more), Link(1e7, 1e7))


@pytest.mark.parametrize("batch,length", [(32, 32), (32, 66), (32, 96), (32, 128), (12, 384)])
def test_rank_8_of_bert_base_is_96_times_less(batch, length):
    plain, thin = (plan_bytes(SplitPlan(6, kind), batch, length) for kind in ("boundary", "lowrank"))
    assert plain.state == 96 * thin.state
    assert plain.state == 2 * batch * length * 768 * 4
    with_everything = plain.wire / thin.wire
    assert with_everything >= (94 if length == 32 else 95)
    assert plan_bytes(SplitPlan(6, "ffn"), batch, length).state == 384 * thin.state


def test_codecs_go_beyond_300():
    plain = plan_bytes(SplitPlan(6, "boundary"), 32, 128)
    for words, least in ((("int8",), 300), (("int4",), 500), (("int8", "pack"), 300)):
        thin = plan_bytes(SplitPlan(6, up=words, down=words), 32, 128)
        assert plain.state / thin.state >= least
    assert plain.wire / plan_bytes(SplitPlan(6, up=("int4",), down=("int4",)), 32, 128).wire > 450


PLANS = [
    SplitPlan(2, "boundary"),
    SplitPlan(2, "ffn"),
    SplitPlan(2, residual="keep"),
    SplitPlan(2, rank=5, labels="cloud"),
    SplitPlan(2, up=("fp16",), down=("bf16",)),
    SplitPlan(2, up=("int8",), down=("int4", "pack")),
    SplitPlan(2, up=("delta:4", "pack"), down=("int8", "pack"), labels="cloud"),
    SplitPlan(2, up=("delta:2", "pack"), down=("pack",)),
    SplitPlan(2, front_on="cloud"),
    SplitPlan(2, residual="keep", up=("int4", "pack"), down=("delta:4", "pack"), front_on="cloud"),
]


@pytest.mark.parametrize(
    "architecture, plan",
    [
        *(("bert", plan) for plan in PLANS),
        *zip(["gpt2-lm"] * 2, PLANS[3::4]),
        *zip(["vit"] * 3, (PLANS[2], PLANS[4], PLANS[8])),
    ],
)
def test_the_formulas_are_what_is_counted(plan, architecture):
    recipe = Recipe(loss="next_token" if architecture == "gpt2-lm" else "classification")
    pair = LocalPair(*split_model(small.model(architecture), plan), recipe, 3)
    classes = small.VOCABULARY if architecture == "gpt2-lm" else small.LABELS
    inner = 128 if architecture.startswith("gpt2") else 64
    pixels = 3 * 8 * 8 if architecture == "vit" else 0
    shape = Shape(32, inner, classes, architecture != "vit", "lm" in architecture, pixels=pixels)
    for visit, lengths in enumerate([(7, 4, 5), (7, 4, 5), (6, 2)]):  # the last one is a ragged batch
        first = 10 * (visit // 2)
        batch = small.batch(architecture, lengths=lengths, slots=range(first, first + len(lengths)))
        tokens = 17 if architecture == "vit" else max(lengths)
        fresh = 0 if visit == 1 else sum(lengths)
        for training in (True, False):
            pair.ledger.__init__()
            (pair.step if training else pair.evaluate)(batch)
            known = None if architecture == "vit" else lengths
            expected = crossings(
                plan, shape, known, len(lengths), tokens, training=training, fresh_tokens=fresh, tls=False
            )
            assert pair.ledger.messages == {m.kind: 1 for m in expected}
            for up, way in ((True, pair.ledger.sent), (False, pair.ledger.received)):
                there = [message for message in expected if message.up == up]
                found = {name: count for name, count in way.items() if name != "header"}
                assert found == {name: count for message in there for name, count in message.parts}
                assert way["header"] == sum(message.header for message in there)


def test_seconds_of_a_link():
    step = crossings(SplitPlan(6), BERT_BASE, [32] * 32, 32, 32)
    slow, fast = (estimate(step, Link(rate, rate)) for rate in (1e7, 1e8))
    assert slow.link_seconds == pytest.approx(10 * fast.link_seconds)
    assert slow.link_seconds > 8 * slow.wire / 1e7
    late = estimate(step, Link(1e7, 1e7, latency_seconds=0.02), compute_seconds=1.0)
    assert late.link_seconds == pytest.approx(slow.link_seconds + 4 * 0.02)
    assert late.step_seconds == pytest.approx(1 + late.link_seconds)
    assert slow.step_seconds is None
    two = crossings(SplitPlan(6, labels="cloud"), BERT_BASE, [32] * 32, 32, 32)
    assert estimate(two, Link(1e9, 1e9, 0.02)).link_seconds == pytest.approx(2 * 0.02, rel=0.05)
    uneven = estimate(step, Link(1e7, 5e7))
    assert fast.link_seconds < uneven.link_seconds < slow.link_seconds


@pytest.mark.parametrize("words", [{"up": 0}, {"up": 1e7, "down": -1.0}, {"latency_seconds": -1.0}])
def test_what_is_no_link(words):
    with pytest.raises(ValueError):
        Link(**{"up": 1e7, "down": 1e7, **words})


def test_ledger_adds_up():
    ledger = ByteLedger()
    ledger.count(Message("z", parts=(("z", torch.zeros(5, 5, 1)),)), ledger.sent)
    ledger.count(Message("dz", parts=(("dz", torch.zeros(5, 5, 2, dtype=torch.uint8)),)), ledger.received)
    ledger.count(Message("ready", fields={"a": 100}), ledger.sent)
    assert ledger.state == 150
    assert ledger.wire == 150 + len('{"a": 100}') + 3 * header_bytes(1)
    assert ledger.sent == {"activation": 100, "control": 10, "header": 2 * header_bytes(1)}
