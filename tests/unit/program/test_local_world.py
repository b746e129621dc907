import pytest
import torch

from thinwire.core.methods.ssgd import SSGD
from thinwire.core.methods.topk import TopK
from thinwire.core.program import LocalWorld, Plan, PlanBucket, Topology
from thinwire.core.program.bucket import Bucket, Slot
from thinwire.core.program.state import State


def slot(name, value):
    return Slot(name, value.shape, value, value.dtype, value.device)


def test_average_of_uneven_nodes_and_unused_parameters():
    world = LocalWorld(3, [2, 1], plan=[["b", "a"]])
    gradients = [{"a": torch.full((2,), float(r)), "b": None if r == 1 else torch.ones(1)} for r in range(3)]
    out = world.step(SSGD(), gradients)
    assert all(torch.equal(rank["a"], torch.ones(2)) for rank in out)
    torch.testing.assert_close(out[1]["b"], torch.tensor([2 / 3]))
    assert gradients[2]["a"].tolist() == [2.0, 2.0]  # not edited
    assert world.bytes_sent() == [round(2 * 2 * 12 / 3)] * 3


def test_dense_buckets_are_averaged_by_their_own_method_if_one_is_given():
    plan = Plan.of([["w"], ["b"]])
    plan = Plan((tuple(PlanBucket(bucket.names, bucket.names == ("b",)) for bucket in plan.buckets()),))
    world = LocalWorld(2, plan=plan, dense=SSGD())
    out = world.step(TopK(0.5), [{"w": torch.tensor([1.0, 3.0]), "b": torch.tensor([1.0, 3.0])}] * 2)
    assert [out[0][name].tolist() for name in ("w", "b")] == [[0.0, 3.0], [1.0, 3.0]]
    assert world.residuals()[0].keys() == {"w"}


def test_a_parameter_that_no_rank_used_stays_none():
    out = LocalWorld(2).step(SSGD(), [{"a": torch.ones(1), "b": None}] * 2)
    assert out[0]["b"] is None


def test_sixteen_bits_do_not_overflow():
    out = LocalWorld(4).step(SSGD(), [{"a": torch.full((3,), 4e4, dtype=torch.float16)}] * 4)
    assert torch.equal(out[0]["a"], torch.full((3,), 4e4, dtype=torch.float16))


def test_refusals():
    one = {"a": torch.zeros(2)}
    with pytest.raises(ValueError, match="2 ranks need 2 dicts"):
        LocalWorld(2).step(SSGD(), [one])
    with pytest.raises(ValueError, match="other names"):
        LocalWorld(2).step(SSGD(), [one, {"b": torch.zeros(2)}])
    with pytest.raises(ValueError, match="a is"):
        LocalWorld(2).step(SSGD(), [one, {"a": torch.zeros(3)}])
    with pytest.raises(ValueError, match="missing \\['a'\\]"):
        LocalWorld(1, plan=[["b"]]).step(SSGD(), [one])
    with pytest.raises(ValueError, match="mixes dtypes"):
        LocalWorld(1, plan=[["a", "b"]]).step(SSGD(), [{**one, "b": torch.zeros(1).double()}])


def test_plan_json_hash_and_check():
    plan = Plan.of([["a", "b"], ["c"]], [["a"], ["b", "c"]], rule="by hand")
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.rule == "by hand"
    assert again.hash == plan.hash == Plan(plan.phases, "other words").hash
    assert Plan((tuple(PlanBucket(b.names, True) for b in plan.phases[0]),)).hash != Plan((plan.phases[0],)).hash
    assert plan.buckets(3) == plan.phases[1]
    assert plan.names() == ("a", "b", "c")
    plan.check(["c", "b", "a"])
    with pytest.raises(ValueError, match="unknown \\['c'\\]"):
        plan.check(["a", "b"])
    with pytest.raises(ValueError, match="appear twice"):
        Plan.of([["a", "a"]]).check(["a"])
    kept = '{"phases": [[{"names": ["a"], "dense": false, "kept": %s}]]}'
    deep = "[" * 100_000
    for text in ("", "[]", '{"phases": 3}', '{"phases": [[{"dense": true}]]}', kept % '"x"', kept % "1e999", deep):
        with pytest.raises(ValueError, match="not a thinwire plan"):
            Plan.from_json(text)


@pytest.mark.parametrize("size", ["x", 2.5, 0, None])
def test_a_world_of_no_size(size):
    with pytest.raises(ValueError, match=f"world_size must be a whole number of at least 1, not {size!r}"):
        LocalWorld(size)


def test_topology():
    uneven = Topology(6, [1, 3, 2])
    assert (uneven.nodes, uneven.uniform, uneven.layout) == (3, False, (1, 3, 2))
    assert [uneven.node_of(r) for r in range(6)] == [0, 1, 1, 1, 2, 2]
    assert [uneven.local_rank(r) for r in range(6)] == [0, 0, 1, 2, 0, 1]
    assert Topology(3).layout == (1, 1, 1)
    for size, layout, words in (
        (0, None, "at least 1"),
        (7, 2, "for example"),
        (4, 0, "cannot be placed"),
        (4, [2, 1], "add up to 4"),
        (4, [4, 0], "positive"),
    ):
        with pytest.raises(ValueError, match=words):
            Topology(size, layout)


def test_bucket_units():
    scale = torch.tensor(8.0)
    a, b = torch.arange(4.0).view(2, 2), torch.ones(3)
    bucket = Bucket(
        0, [slot("a", a.clone()), slot("b", b.clone()), Slot("c", (2,), None, a.dtype, a.device)], scale=scale
    )
    torch.testing.assert_close(bucket.gradient(), torch.cat([a.view(-1), b, torch.zeros(2)]) / 8)
    assert torch.equal(bucket.slots[0].matrix(), a / 8)
    bucket.write_gradient(torch.ones(9))
    assert all((s.result == 8).all() for s in bucket.slots)
    bucket.write(torch.full((9,), 5.0))
    assert all((s.result == 5).all() for s in bucket.slots)


def test_flat_aliases_the_buffer():
    buffer = torch.arange(5.0)
    bucket = Bucket(0, [slot("a", buffer[:2]), slot("b", buffer[2:])], buffer=buffer)
    assert bucket.flat.data_ptr() == buffer.data_ptr()
    bucket.write(bucket.flat.mul_(2))
    assert buffer.tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("end", ["end_step", "end_step_on_device"])
def test_state_commits_whole_steps_only(end):
    state, s = State(0, Topology(1)), slot("a", torch.zeros(2))
    assert state.residual(s).tolist() == [0, 0]
    for flags, value in ((([True, True]), 1.0), ([True, False], 2.0), ([], 3.0)):
        state.stage("a", residual=torch.full((2,), value), shared={"q": torch.full((1,), value)})
        for flag in flags:
            state.verdict(torch.tensor(flag))
        getattr(state, end)()
        want = 1.0 if value == 2.0 else value
        assert state.residual(s).tolist() == [want, want]
        assert state.shared("q", "a").item() == want
    assert state.step == 3


@pytest.mark.parametrize("end", ["end_step", "end_step_on_device"])
def test_pieces_of_one_memory_are_accepted_or_dropped_together(end):
    state, want = State(0, Topology(1)), {}
    plans = [
        [("a", 0), ("b", 3)],
        [("a", 0), ("b", 3)],
        [("b", 0), ("a", 3)],
        [("b", 0), ("a", 3)],
        [("c", 5), ("a", 1)],
    ]
    for value, (plan, flag) in enumerate(zip(plans * 3, [True, False, False, True, True, False, True] * 2)):
        memory = torch.full((9,), float(value))
        memory[2] = torch.nan  # between the pieces; or NaN is what is dropped
        for name, begin in plan:
            piece = memory[begin : begin + 2]
            state.stage(name, residual=piece.fill_(10.0 * value + begin if flag else torch.nan))
            want[name] = piece.tolist() if flag else want.get(name, [0, 0])
        state.verdict(torch.tensor(flag))
        getattr(state, end)()
        assert {name: x.tolist() for name, x in state.residuals.items()} | want == want


def test_snapshot_is_a_copy():
    world = LocalWorld(1)
    world.step(TopK(0.5), [{"a": torch.arange(4.0)}])
    shot = world.states[0].snapshot()
    world.step(TopK(0.5), [{"a": torch.arange(4.0)}])
    other = State(0, Topology(1))
    other.restore(shot)
    assert other.step == 1
    assert shot["residual"]["a"].tolist() == [0, 1, 0, 0]
    assert other.residuals["a"].data_ptr() != shot["residual"]["a"].data_ptr()
