"""Gradients that come in other orders, and on other streams, than they are made in one layer after another."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from nccl import disagreement
from sim_cases import METHODS, STEPS, WAYS
from training import DEVICE, Branches, place, training

from thinwire.core.collectives.exchange import Pending
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.program import AllReduce
from thinwire.engine.executors.streams import StreamExecutor


@pytest.mark.parametrize("method", ["ssgd", "topk", "dear"])
def test_gradients_of_one_bucket_from_several_streams(method):
    """As autograd makes them after a forward on several streams: at its end the main stream waits for all."""
    with training(method, **({"density": 0.1} if method == "topk" else {})) as run:
        streams = [torch.cuda.Stream(DEVICE) for _ in range(2)]
        main = torch.cuda.current_stream(DEVICE)
        for _ in range(STEPS):
            for stream in streams:
                stream.wait_stream(main)
            for index, parameter in reversed([*enumerate(run.model.parameters())]):
                with torch.cuda.stream(streams[index % 2]):
                    parameter.grad = torch.randn_like(parameter)
                    for hook in parameter._post_accumulate_grad_hooks.values():
                        hook(parameter)
            for stream in streams:
                main.wait_stream(stream)
            run.sync.services.source.finish()
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.sync.synchronize()
    assert not Counter(map(str, run.card.findings))


def test_one_bucket_computes_while_another_is_on_the_wire():
    """The second comes after nothing that the first has sent; the third after all of it, on its stream."""
    with place(0, None, None) as (card, nccl):
        x = torch.ones(8, device=DEVICE)
        seen = []

        def program():
            seen.append(nccl.world.stream in card.current_stream(DEVICE).clock)
            yield AllReduce(torch.ones(8, device=DEVICE) * x)

        def issue(op, *_):
            return Pending((dist.all_reduce(op.tensor, group=nccl.world, async_op=True),), lambda: op.tensor)

        executor = StreamExecutor(SimpleNamespace(issue=issue), DEVICE)
        executor.begin(3, lambda bucket: program())
        for bucket in range(3):
            executor.ready(bucket)
        assert executor.finish() is None
        assert seen == [False, False, True]
        assert not card.findings


ISSUING = [name for name in METHODS if "select=" not in name]
"""Selections issue nothing."""
OTHER_NUMBERS = ("dtype=", "bits=", "levels=", "nesterov=")
"""What changes numbers or their coding issues what the same method without it does, which is a case of its own."""


def coded_otherwise(name):
    return any(word in name for word in OTHER_NUMBERS) and "int8" not in name  # which takes two turns


USUAL = ("ssgd", "cast", "acp", "powersgd", "topk", "hitopk", "dear")
"""Who stands for the others in the short run: every exchange, every schedule."""


def logs(method, *, unused, **options):
    """What three of four ranks issue, whose gradients come in other orders."""
    orders = [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)]
    told, result = {}, []
    for rank in range(3):
        with training(method, rank=rank, model=Branches, told=told, **options) as run:
            for step in range(4):
                turned = orders[rank][step % 4 :] + orders[rank][: step % 4]
                run.model.order = turned[:3] if unused and step == rank else turned
                run.step()
        result.append(run.nccl.log)
        assert not run.card.findings
    return result


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if coded_otherwise(name) or not name.startswith(USUAL) else name
        for name in ISSUING
    ],
)
def test_ranks_agree_on_the_order_of_everything(name):
    """Also where one of them has not used a layer."""
    method, options = METHODS[name].args[0], METHODS[name].keywords
    text = disagreement(logs(replace(method, fusion="none"), unused=True, **{**options, "nodes": 2}))
    assert text is None


LAYER_BY_LAYER = {"schedule": "mpd", "limit": 0}


@pytest.mark.parametrize(
    "rules",
    [
        LAYER_BY_LAYER,
        {**LAYER_BY_LAYER, "transport": "allgather"},
        *({"schedule": s} for s in ("dkfac", "mpd", "kaisa:1/2", "dp")),
    ],
)
def test_ranks_agree_on_the_order_beside_kfac(rules):
    """By rules without times, as plans that are made of measured ones would be each rank's own here."""
    kfac = {**WAYS["K-FAC"].keywords["kfac"], **rules}
    text = disagreement(logs(SSGD(fusion="none"), unused=False, kfac=kfac))
    assert text is None
