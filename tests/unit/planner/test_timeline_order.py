"""The simulator's order of exchanges is the engine's."""

import random

import pytest
from timelines import costs_of, lane, profile_of

from thinwire.core.methods.powersgd import PowerSGD
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.pricing.costs import Linear
from thinwire.core.pricing.profiles import ModelProfile, TensorTime
from thinwire.core.program import CROSS, NODE, WORLD, AllReduce, Plan, Topology
from thinwire.engine.executors.runner import Runner
from thinwire.predict.timeline import simulate
from thinwire.predict.timeline.machine import Wave
from thinwire.predict.timeline.programs import Hop, ProgramPart


def program(scopes):
    for scope in scopes:
        yield AllReduce(None, scope)


def engine_sequence(programs, order):
    """What the engine's runner issues when programs advance in this order; no exchange ends by itself."""
    issued = []
    runner = Runner(len(programs), lambda op, scope, round_, bucket: issued.append((scope, round_, bucket)))
    started, seen = set(), []
    for b in order:
        if b in started:
            runner.completed(b, None)
        else:
            started.add(b)
            runner.start(b, program(programs[b]))
        runner.pump()
        seen.append(list(issued))
    return seen


def simulator_sequence(programs, order):
    parts = [
        ProgramPart(b, (0.0,) * (len(scopes) + 1), tuple(Hop("AllReduce", s, "", 0.0, 0.0, 0) for s in scopes))
        for b, scopes in enumerate(programs)
    ]
    wave = Wave(parts, streams=None)
    issued, rounds, seen = [], {}, []
    for b in order:
        for position, hop in wave.advance(b)[0]:
            round_ = rounds[position, hop.scope] = rounds.get((position, hop.scope), -1) + 1
            issued.append((hop.scope, round_, position))
        seen.append(list(issued))
    assert wave.left == 0
    return seen


def test_it_issues_what_the_engine_issues():
    draw = random.Random(0)
    for _ in range(150):
        programs = [draw.choices([WORLD, NODE, CROSS], k=draw.randint(0, 4)) for _ in range(draw.randint(1, 6))]
        order = [b for b, scopes in enumerate(programs) for _ in range(len(scopes) + 1)]
        draw.shuffle(order)
        assert simulator_sequence(programs, order) == engine_sequence(programs, order)


def test_on_side_streams_one_computes_while_another_sends():
    parts = [ProgramPart(b, (0.0, 0.0, 0.0), (Hop("AllReduce", WORLD, "", 0.0, 0.0, 0),) * 2) for b in range(3)]
    wave = Wave(parts, streams=2)
    assert [wave.ready(b) for b in (1, 0, 2)] == [[], [0, 1], []]  # the third comes after the first, on its stream
    assert [b for b, _ in wave.advance(1)[0]] == []  # its exchange is behind both of the first one's
    assert [b for b, _ in wave.advance(0)[0]] == [0]
    assert [b for b, _ in wave.advance(0)[0]] == [0, 1]
    assert wave.advance(0) == ([], [2])


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_second_exchanges(backend):
    """On Gloo no bucket's second exchange holds up another's first; on NCCL programs follow each other."""
    tensors = tuple(TensorTime(f"m{i}.w", (64, 64), 0.0) for i in range(4))
    profile = ModelProfile("m", tensors, 0.0)
    plan = Plan.of([[t.name] for t in tensors])
    timeline = simulate(PowerSGD(rank=2), profile, Topology(4), costs_of(Linear(1.0, 0), 4), plan=plan, backend=backend)
    buckets = [event.bucket for event in lane(timeline, "link world")]
    assert sorted(buckets) == [0, 0, 1, 1, 2, 2, 3, 3]
    if backend == "nccl":
        assert buckets == sorted(buckets)
    else:
        assert buckets == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_small_bucket_behind_a_slow_one_waits_for_its_turn():
    """Bucket 1's gradients come first, its exchange does not."""
    profile = profile_of([8, 8, 8], [1.0, 1.0, 1.0])
    plan = Plan.of([["m0.w", "m2.w"], ["m1.w"]])
    timeline = simulate(SSGD(), profile, Topology(2), costs_of(Linear(0.5, 0), 2), plan=plan)
    assert [(e.bucket, e.start_seconds) for e in lane(timeline, "link world")] == [(0, 3.5), (1, 4.0)]
