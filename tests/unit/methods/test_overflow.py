"""A non-finite gradient on one rank: every rank sees it in .grad, no state moves, exactly one step is lost."""

import pytest
import torch
from worlds import FEEDBACK, PLAN, SHAPES, draw, label

from thinwire.core.methods.acp import ACP
from thinwire.core.methods.dgc import DGC
from thinwire.core.methods.powersgd import PowerSGD
from thinwire.core.methods.qsgd import QSGD
from thinwire.core.methods.sign import SignSGD
from thinwire.core.methods.terngrad import TernGrad
from thinwire.core.methods.topk import TopK
from thinwire.core.program import LocalWorld

QUANTISERS = [
    *FEEDBACK,
    DGC(0.1),
    DGC(0.2, nesterov=True, clip=1.0, select="exact"),
    DGC(1.0),
    SignSGD(error_feedback=False, vote="majority"),
    QSGD(),
    QSGD(norm="l2"),
    TernGrad(),
]


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else True


@pytest.mark.parametrize("method", QUANTISERS, ids=label)
def test_one_bad_element_on_one_rank(method):
    """One kind after another in one run: after each it goes on as a run that has skipped the step."""
    world, reference, bad = (
        LocalWorld(3, plan=PLAN),
        LocalWorld(3, plan=PLAN),
        {5: torch.inf, 7: -torch.inf, 8: torch.nan},
    )
    for step in range(12):
        gradients = draw(step, ranks=3)
        if step in bad:
            before = [state.snapshot() for state in world.states]
            name = "conv"
            gradients[1][name].view(-1)[7] = bad[step]
            out = world.step(method, gradients)
            for rank in range(3):
                assert out[rank]["conv"].isnan().all()
                assert out[rank]["s"].isnan().all()  # the same bucket
                assert out[rank]["w"].isfinite().all()  # another one
                after = world.states[rank].snapshot()
                assert same(before[rank]["residual"], after["residual"])
                assert same(before[rank]["shared"], after["shared"])
                assert same(before[rank]["local"], after["local"])
            for state in reference.states:
                state.step += 1
        else:
            out, want = world.step(method, gradients), reference.step(method, gradients)
            assert all(torch.equal(out[2][n], want[2][n]) for n in SHAPES)


@pytest.mark.parametrize("method", QUANTISERS, ids=label)
def test_opposite_infinities_do_not_cancel(method):
    world = LocalWorld(2, plan=[["w", "b"]])
    gradients = draw(0, {"w": (12, 9), "b": (5,)}, 2)
    gradients[0]["w"][3, 3], gradients[1]["w"][3, 3] = torch.inf, -torch.inf
    out = world.step(method, gradients)
    assert all(not x.isfinite().any() for rank in out for x in rank.values())
    assert all((r == 0).all() for rank in world.residuals() for r in rank.values())


@pytest.mark.parametrize("method", FEEDBACK, ids=label)
def test_a_bad_vector_rejects_the_matrices_too(method):
    world = LocalWorld(2, plan=[["w"], ["b"]])
    world.step(method, draw(0, {"w": (12, 9), "b": (5,)}, 2))
    before = world.residuals()
    gradients = draw(1, {"w": (12, 9), "b": (5,)}, 2)
    gradients[0]["b"][0] = torch.nan
    out = world.step(method, gradients)
    assert out[1]["b"][0].isnan()
    assert out[1]["w"].isfinite().all()
    assert same(dict(enumerate(before)), dict(enumerate(world.residuals())))


@pytest.mark.parametrize("method", [ACP(rank=2, min_rate=1), PowerSGD(rank=2, min_rate=1)], ids=label)
@pytest.mark.parametrize("rejected", [1, 2, 3])
def test_the_first_steps_may_be_rejected(method, rejected):
    """As GradScaler's first steps are: a Q step then comes first and needs a basis."""
    world = LocalWorld(2)
    for _ in range(rejected):
        world.step(method, [{"w": torch.full((12, 9), torch.inf)}] * 2)
    gradients = draw(9, {"w": (12, 9)}, 2, torch.float32)
    out = world.step(method, gradients)
    assert out[0]["w"].norm() > 0.1
    assert torch.equal(out[0]["w"], out[1]["w"])


def test_fp16_wire_overflow_is_kept_as_debt():
    world = LocalWorld(1)
    out = world.step(TopK(1.0, value_dtype="fp16"), [{"w": torch.tensor([1e6, 1.0])}])
    assert out[0]["w"].tolist() == [65504.0, 1.0]
    assert world.residuals()[0]["w"].tolist() == [1e6 - 65504.0, 0.0]
