"""DiLoCo in fragments whose exchange runs beside the next inner steps, on real ranks, against its formula."""

import pytest
import torch

import thinwire as tw
from spawned import run
from thinwire.parameter_server import DiLoCo

pytestmark = pytest.mark.dist
H, STEPS, LR, D = 6, 20, 0.1, (4, 6)


def gradient(theta, rank, step):
    draw = torch.Generator().manual_seed(1000 * step + rank)
    return 0.3 * theta + torch.randn(sum(D), generator=draw, dtype=torch.float64)


def start():
    return torch.linspace(0, 1, sum(D), dtype=torch.float64)


def plain(params):
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


def on_ranks(rank, size, fragments, delay, alpha):
    model = torch.nn.ParameterList(torch.nn.Parameter(part.clone()) for part in start().split(D))
    inner = torch.optim.SGD(model.parameters(), lr=LR)
    sync = tw.attach(model, inner, "ssgd")
    diloco = DiLoCo(
        model, sync_every=H, outer=plain, fragments=fragments, fragment_sync_delay=delay, fragment_update_alpha=alpha
    )
    came = []
    for step in range(STEPS):
        for p, g in zip(model, gradient(torch.cat([p.detach() for p in model]), rank, step).split(D)):
            p.grad = g
        inner.step()
        if diloco.step(sync):
            came.append(step)
    last = diloco.finish()
    theta = torch.cat([p.detach() for p in model])
    sync.close()
    return theta.tolist(), came, last


def by_formula(size, fragments, delay, alpha):
    """The same in one process, step by step."""
    every, theta = H // fragments, [start() for _ in range(size)]
    cuts = [slice(0, sum(D))] if fragments == 1 else [slice(0, D[0]), slice(D[0], sum(D))]
    anchors = [start()[cut].clone() for cut in cuts]
    outers, under_way = [plain([anchor]) for anchor in anchors], None

    def land():
        part, mean = under_way
        anchors[part].grad = mean
        outers[part].step()
        for x in theta:
            x[cuts[part]] = alpha * x[cuts[part]] + (1 - alpha) * anchors[part]

    for step in range(1, STEPS + 1):
        for rank, x in enumerate(theta):
            x -= LR * gradient(x, rank, step - 1)
        if under_way is not None and step % every == delay:
            land()
            under_way = None
        if step % every == 0:
            part = (step // every - 1) % fragments
            under_way = part, sum(anchors[part] - x[cuts[part]] for x in theta) / size
            if delay == 0:
                land()
                under_way = None
    if under_way is not None:
        land()
    return theta


CASES = [(2, 2, 0.5), (1, 5, 0.0)]


def every_case(rank, size):
    return [on_ranks(rank, size, *case) for case in CASES]


def test_fragments_under_way_beside_inner_steps_are_the_formula():
    results = run(every_case, 2)
    for place, (fragments, delay, alpha) in enumerate(CASES):
        expected = by_formula(2, fragments, delay, alpha)
        for rank in range(2):
            theta, came, last = results[rank][place]
            torch.testing.assert_close(torch.tensor(theta, dtype=torch.float64), expected[rank], rtol=1e-12, atol=1e-12)
            every = H // fragments
            assert came == [s + delay - 1 for s in range(every, STEPS + 1, every) if s + delay <= STEPS]
            assert last == (delay > 0 and any(s + delay > STEPS for s in range(every, STEPS + 1, every)))
