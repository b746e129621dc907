"""The programs alone: in LocalWorld, and on shapes."""

import pytest
import torch

from thinwire.core.program import CROSS, NODE, LocalWorld
from thinwire.systems.kfac.exchange import FACTOR, UPDATES, FactorExchange, FromAll, FromOwner, decay_of

DRAW = torch.Generator().manual_seed(0)


def row(values, count=1.0):
    return torch.cat([torch.as_tensor(values, dtype=torch.float64), torch.tensor([count]).double()])


def test_means_are_over_the_ranks_that_saw_the_layer():
    world = LocalWorld(3, plan=[["a", "b"]])
    method = FactorExchange(decay_of(0.75))
    world.step(method, [{"a": row([1.0, 2.0]), "b": row([0.0], 0)}, {"a": row([3.0, 4.0]), "b": row([6.0])},
                        {"a": row([5.0, 9.0]), "b": row([2.0])}])  # fmt: skip
    for state in world.states:
        torch.testing.assert_close(state.fields[FACTOR, "a"], torch.tensor([3.0, 5.0]).double())  # the first, whole
        torch.testing.assert_close(state.fields[FACTOR, "b"], torch.tensor([4.0]).double())
    nobody = {"a": row([0.0, 0.0], 0), "b": row([8.0])}
    world.step(method, [nobody, nobody, nobody])
    for state in world.states:
        torch.testing.assert_close(state.fields[FACTOR, "a"], torch.tensor([3.0, 5.0]).double())
        torch.testing.assert_close(state.fields[FACTOR, "b"], torch.tensor([5.0]).double())
        assert (state.fields[UPDATES, "a"], state.fields[UPDATES, "b"]) == (1, 2)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_on_one_rank_changes_nothing_on_any(bad):
    world = LocalWorld(2, plan=[["a", "b"]])
    method = FactorExchange(decay_of("warmup"))
    good = {"a": row([1.0]), "b": row([2.0])}
    world.step(method, [{"a": row([bad]), "b": row([2.0])}, good])
    for state in world.states:
        assert (state.fields[UPDATES, "a"], state.fields[UPDATES, "b"]) == (0, 1)
        assert state.fields[FACTOR, "a"] == 0
    world.step(method, [good, good])
    assert all(state.fields[FACTOR, "a"] == 1 for state in world.states)


def test_sixteen_bits_on_the_wire():
    method = FactorExchange(decay_of(0.0), torch.bfloat16)
    world = LocalWorld(2)
    values = torch.rand(50, generator=DRAW).double()
    world.step(method, [{"a": row(values)}, {"a": row(values)}])
    assert all(torch.equal(s.fields[FACTOR, "a"], world.states[0].fields[FACTOR, "a"]) for s in world.states)
    torch.testing.assert_close(world.states[0].fields[FACTOR, "a"], values, rtol=2**-7, atol=0)
    assert world.bytes_sent() == [51 * 2] * 2


def test_from_one_rank_of_a_group_to_the_others():
    world = LocalWorld(4, ranks_per_node=2, plan=[["a"]])
    out = world.step(FromOwner(1, NODE), [{"a": torch.tensor([float(rank)])} for rank in range(4)])
    assert [float(x["a"]) for x in out] == [1, 1, 3, 3]
    out = world.step(FromOwner(0, CROSS), [{"a": torch.tensor([float(rank)])} for rank in range(4)])
    assert [float(x["a"]) for x in out] == [0, 1, 0, 1]


def test_from_all_ranks_in_one_gather():
    world = LocalWorld(3, plan=[["a", "b", "c", "d"]])
    shapes = {"a": 2, "b": 5, "c": 1, "d": 3}
    owners = (2, 0, 2, 0)
    mine = {n: torch.rand(k, generator=DRAW) for n, k in shapes.items()}
    blank = [{n: (x if owners[i] == rank else torch.zeros_like(x)) for i, (n, x) in enumerate(mine.items())}
             for rank in range(3)]  # fmt: skip
    out = world.step(FromAll(owners), blank)
    assert all(torch.equal(rank[name], x) for rank in out for name, x in mine.items())
    assert world.bytes_sent() == [2 * 8 * 4] * 3  # the longest, of rank 0: 5 + 3
