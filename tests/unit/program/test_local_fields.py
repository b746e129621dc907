"""A rank's own fields beside the residual: committed and rolled back with it, and memory that takes turns."""

import weakref

import pytest
import torch

from thinwire.core.program import Slot, State, Topology


def slot(name, size=3, dtype=torch.float32):
    return Slot(name, (size,), None, dtype, torch.device("cpu"))


@pytest.mark.parametrize("end", ["end_step", "end_step_on_device"])
def test_commit_and_roll_back(end):
    state, a = State(0, Topology(1)), slot("a")
    assert state.local("m", a).tolist() == [0, 0, 0]
    for flag, value, want in ((False, 1.0, 0.0), (True, 2.0, 2.0), (False, 3.0, 2.0), (None, 4.0, 4.0)):
        state.stage("a", local={"m": torch.full((3,), value)})
        assert state.local("m", a).tolist() != [value] * 3
        if flag is not None:
            state.verdict(torch.tensor(flag))
        getattr(state, end)()
        assert state.local("m", a).tolist() == [want] * 3
    state.stage("a", local={"m": torch.ones(3)})
    state.drop_step()
    state.end_step()
    assert state.local("m", a).tolist() == [4.0] * 3


def test_a_snapshot_holds_them():
    state = State(0, Topology(1))
    state.stage("a", local={"m": torch.ones(3)})
    state.end_step()
    shot, other = state.snapshot(), State(0, Topology(1))
    state.locals["m", "a"].add_(1)
    other.restore(shot)
    assert other.local("m", slot("a")).tolist() == [1, 1, 1]
    del shot["local"]  # of an older version
    other.restore(shot)
    assert not other.locals


@pytest.mark.parametrize("field", [None, "m"])
def test_memory_takes_turns_and_is_never_that_in_force(field):
    state, slots = State(0, Topology(1)), [slot("a"), slot("b", 2)]
    seen = set()
    for step in range(12):
        out = state.spare(slots, field)
        in_force = state.residuals if field is None else state.locals
        assert out.numel() == 5
        assert all(out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() for x in in_force.values())
        seen.add(out.data_ptr())
        for s, piece in zip(slots, out.split([3, 2])):
            state.stage(s.name, **({"residual": piece} if field is None else {"local": {field: piece}}))
        state.verdict(torch.tensor(step % 4 != 2))
        state.end_step()
    assert len(seen) <= 3


def test_memory_of_an_old_plan_is_given_back():
    state = State(0, Topology(1))
    of_the_old_plan = weakref.ref(state.spare([slot("a"), slot("b")]))
    for _ in range(20):
        state.spare([slot("a")])
        state.end_step()
    assert of_the_old_plan() is None
