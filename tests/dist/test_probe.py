"""A probe on real ranks: everybody ends with the same costs, whole groups and parts of them."""

import json

import pytest
import torch.distributed as dist

from spawned import run
from thinwire.core.pricing.costs import KINDS
from thinwire.core.program import Topology
from thinwire.predict.measure import ProbeResult, probe
from thinwire.tools.cli.main import app
from verbs import CliRunner

pytestmark = pytest.mark.dist
QUICK = {"largest_bytes": 16 << 10, "seconds": 3.0}


def _whole(rank, size):
    told = []
    result = probe(**QUICK, kernel_seconds=0.01, on_progress=lambda done, text: told.append(done))
    assert told[-1] == 1.0
    assert told == sorted(told)
    return result.to_json(), result.costs.hash


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_all_ranks_have_the_same_costs_and_every_kind_a_curve(size):
    answers = run(_whole, size)
    assert len(set(answers)) == 1
    result = ProbeResult.from_json(answers[0][0])
    costs = result.costs
    assert costs.hash == answers[0][1]
    assert set(costs.exchanges) == {(kind, "world", size) for kind in KINDS}
    assert {curve.provenance for curve in costs.exchanges.values()} == {"measured here"}
    assert all(m.seconds > 0 and m.repeats >= 1 and m.cpu_seconds >= 0 for m in result.measurements)
    assert all(m.bytes % (4 * size) == 0 for m in result.measurements)
    assert set(costs.cpu_share) == set(KINDS)
    assert set(costs.compute) == {"select", "memory", "multiply", "orthogonalise", "thin"}
    assert result.flow_bits_per_second > 0
    assert result.backend == "gloo"
    assert f"gloo, torch {__import__('torch').__version__}, {size} ranks" in result.source


def _nodes(rank, size):
    result = probe(topology=Topology(size, [2, 1]), **QUICK, kernel_seconds=0)
    return result.to_json(), sorted(result.costs.exchanges)


def test_machines_of_different_size():
    (answer, keys), *others = run(_nodes, 3)
    assert all(other == (answer, keys) for other in others)
    assert set(keys) == {(kind, *group) for kind in KINDS for group in (("world", 3), ("node", 2), ("cross", 2))}


def _part(rank, size):
    group = dist.new_group([0, 2])
    if rank == 1:
        with pytest.raises(ValueError, match="not in the group"):
            probe(group)
        return None
    first = probe(group, **QUICK, kernel_seconds=0)
    second = probe(group, **QUICK, kernel_seconds=0)  # its lanes were given back
    assert set(second.costs.exchanges) == set(first.costs.exchanges)
    return first.costs.hash, sorted(first.costs.exchanges)


def test_a_part_of_the_ranks():
    a, nobody, b = run(_part, 3)
    assert nobody is None
    assert a == b
    assert a[1] == sorted((kind, "world", 2) for kind in KINDS)


def _hurried(rank, size):
    return probe(largest_bytes=1 << 20, seconds=1e-6, kernel_seconds=0).to_json()


def test_without_time_two_sizes_are_measured_and_the_rest_is_listed():
    answers = run(_hurried, 2)
    assert answers[0] == answers[1]
    result = ProbeResult.from_json(answers[0])
    assert {m.bytes for m in result.measurements} == {4096, 65536}
    assert len(result.dropped) == 7 * len(KINDS)


def _verb(rank, size, folder):
    """The command line on every rank, with torchrun's variables around it."""
    words = ["probe", "--max-bytes", "8192", "--seconds", "2", "--json", "--out", f"{folder}/{rank}.json"]
    result = CliRunner().invoke(app, words)
    return result.exit_code, result.stdout


def test_the_verb_on_ranks_that_are_there_already(tmp_path):
    (code, said), other = run(_verb, 2, str(tmp_path), init=False)
    assert code == 0, said
    assert json.loads(said)["layout"] == [2]
    assert other == (0, "")  # one line, from the first rank alone
    assert [path.name for path in tmp_path.iterdir()] == ["0.json"]


def _alone(rank, size):
    with pytest.raises(ValueError, match="5 ranks"):
        probe(topology=Topology(5))
    result = probe(kernel_seconds=0)
    return result.measurements, result.costs.lookup("AllReduce", "world", 1)(1e6)


def test_one_rank():
    assert run(_alone, 1) == [((), 0.0)]
    with pytest.raises(ValueError, match="torchrun"):
        probe()
