"""What holds for every method: results and state do not know the loss scale; wrong options are one clear sentence."""

import dataclasses

import numpy as np
import pytest
import torch
from worlds import EVERY, draw, label

from thinwire import DGC, LAGS, QSGD, SSGD, Cast, GTopK, HiTopK, OkTopk, OneBit, SignSGD, TernGrad, TopK, method
from thinwire.core.methods.acp import ACP
from thinwire.core.methods.powersgd import PowerSGD
from thinwire.core.program import Bucket, Slot, State, Topology
from thinwire.core.program.local_world import run_lockstep

SHAPES = {"w": (16, 16), "b": (5,)}


def end_of(chosen, scale):
    """Results of the last of three steps, in gradient units, and the state that it leaves."""
    topology = Topology(4, 2)
    states = [State(rank, topology) for rank in range(4)]
    for step in range(3):
        buckets = []
        for gradients in draw(step, SHAPES, 4, torch.float32):
            slots = [
                Slot(n, x.shape, x * (scale or 1.0), x.dtype, x.device, torch.zeros_like(x))
                for n, x in gradients.items()
            ]
            buckets.append(Bucket(0, slots, scale=None if scale is None else torch.tensor(scale)))
        run_lockstep([chosen.reduce(bucket, state) for bucket, state in zip(buckets, states)], topology)
        for state in states:
            assert state.end_step()
    kept = [{**state.residuals, **state.locals, **state.fields} for state in states]
    return [
        slot.value_or_zeros() if slot.result is None else slot.result / (scale or 1.0) for slot in buckets[1].slots
    ], kept


@pytest.mark.parametrize("chosen", [*EVERY, DGC(0.1, clip=3.0)], ids=label)
def test_a_loss_scale_changes_no_bit(chosen):
    (result, kept), (scaled, kept_scaled) = end_of(chosen, None), end_of(chosen, 1024.0)
    bits = {} if isinstance(chosen, (ACP, PowerSGD)) else {"rtol": 0, "atol": 0}  # their products are the library's
    torch.testing.assert_close(scaled, result, **bits)
    torch.testing.assert_close(kept_scaled, kept, **bits)


@pytest.mark.parametrize(
    "chosen", [ACP(2, seed=3), PowerSGD(2), QSGD(4, 64), Cast("int8", 16), TernGrad(seed=2)], ids=label
)
def test_counts_may_be_those_of_numpy(chosen):
    counts = {name: np.int64(value) for name, value in chosen.options().items() if type(value) is int}
    made = dataclasses.replace(chosen, **counts)
    assert made == chosen
    assert all(type(made.options()[name]) is int for name in counts)
    torch.testing.assert_close(end_of(made, None), end_of(chosen, None), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (method, {"name": "acpp"}, "did you mean 'acp'"),
        (method, {"name": "zzz"}, "known: ssgd, cast"),
        (method, {"name": 3}, "unknown method: 3"),
        (method, {"name": "acp", "rnk": 2}, "unknown option of acp: 'rnk'; did you mean 'rank'"),
        (method, {"name": "topk"}, "needs density"),
        (method, {"name": "ssgd", "rank": 2}, "unknown option of ssgd: 'rank'"),
        (ACP, {"rank": 0}, "rank=0 must be a whole number of at least 1"),
        (ACP, {"rank": 2.0}, "rank=2.0"),
        (ACP, {"rank": True}, "rank=True"),
        (ACP, {"min_rate": -1}, "min_rate=-1"),
        (ACP, {"compress": "all"}, "compress='all' is unknown; use one of paying, matrices"),
        (PowerSGD, {"min_rate": -1}, "min_rate=-1"),
        (PowerSGD, {"compress": "all"}, "paying, matrices"),
        (ACP, {"fusion": 0}, "fusion=0"),
        (ACP, {"deterministic": "yes"}, "True or False"),
        *((kind, {"deterministic": True, "collective": "torus"}, "rank order") for kind in (SSGD, Cast, ACP)),
        *(
            (SSGD, {"collective": way}, "'flat', 'three_phase', 'torus', 'auto' or 'threshold:<MB>'")
            for way in ("ring", "", None, 3, "threshold:", "threshold:-1", "threshold:nan", "threshold:inf")
        ),
        (Cast, {"dtype": "int3"}, "dtype='int3' is unknown; use torch.bfloat16"),
        (Cast, {"dtype": torch.float32}, "torch.bfloat16"),
        (Cast, {"dtype": "int2", "collective": "torus"}, "int2 has its own two-step exchange"),
        (Cast, {"dtype": "int8", "block": 12}, "block=12 must be a multiple of 8"),
        (Cast, {"dtype": "int8", "deterministic": True}, "deterministic=True is not possible with int8"),
        (Cast, {"dtype": "int8", "decoupled": True}, "leave out decoupled=True"),
        (QSGD, {"bits": 3}, "bits=3 is unknown; use one of 2, 4, 8"),
        (QSGD, {"block": 0}, "block=0 must be a whole number of at least 8"),
        (QSGD, {"block": 12}, "block=12 must be a multiple of 8"),
        (QSGD, {"norm": "l1"}, "norm='l1' is unknown"),
        (QSGD, {"seed": -1}, "seed=-1"),
        (QSGD, {"fusion": "some"}, "fusion='some' is unknown"),
        (DGC, {"fusion": "mgwfbp"}, "fusion='mgwfbp' is unknown"),
        *((TernGrad, {"clip": clip}, f"clip={clip} must be a finite number") for clip in (0, float("nan"), True)),
        (OneBit, {"levels": 1}, "OneBit is SignSGD with levels=2: for levels=1 use SignSGD"),
        (SignSGD, {"vote": "majority"}, "error_feedback=False"),
        (SignSGD, {"vote": "majority", "error_feedback": False, "levels": 2}, "levels=2"),
        (SignSGD, {"vote": "most"}, "vote='most' is unknown"),
        (SignSGD, {"levels": 3}, "levels=3 is unknown"),
        (SignSGD, {"error_feedback": 1}, "True or False"),
        *(
            (TopK, {"density": density}, "above 0 and at most 1")
            for density in (0, -0.1, 1.5, "0.1", True, None, float("nan"))
        ),
        (TopK, {"density": 0.1, "exchange": "ring"}, "one of allgather, gtopk, oktopk, auto"),
        (TopK, {"density": 0.1, "exchange": "gtopk", "value_dtype": "bf16"}, 'gTop-k needs "fp32"'),
        *(
            (kind, {"density": 0.1, "exchange": "allgather"}, "for exchange='allgather' use TopK")
            for kind in (GTopK, OkTopk)
        ),
        (TopK, {"density": 0.1, "capacity": 0.9}, "capacity=0.9 must be a finite number and at least 1"),
        (TopK, {"density": 0.1, "select": "best"}, "select='best' is unknown"),
        (TopK, {"density": 0.1, "value_dtype": "int8"}, "use one of fp32, bf16, fp16"),
        (TopK, {"density": 0.1, "warmup": 3}, "Warmup"),
        (TopK, {"density": 0.1, "fusion": "all"}, "fusion"),
        (LAGS, {"max_ratio": 0.5}, "max_ratio=0.5 must be a finite number and at least 1"),
        *((HiTopK, {"density": density}, "above 0 and at most 1") for density in (0, 1.1)),
        *((kind, {"density": 0.1, "select": "most"}, "select='most' is unknown") for kind in (HiTopK, DGC)),
        *((kind, {"density": 0.1, "value_dtype": "int8"}, "use one of fp32, bf16, fp16") for kind in (HiTopK, DGC)),
        (DGC, {"warmup": 4}, "Warmup"),
        (HiTopK, {"density": 0.1, "select_options": {"rounds": 3}}, "rounds"),
        (HiTopK, {"density": 0.1, "fusion": "optimal"}, "no price for two levels"),
        (DGC, {"density": 0}, "density=0"),
        (DGC, {"momentum": 1.0}, "momentum=1.0 must be a finite number and at least 0 and below 1"),
        (DGC, {"momentum": -0.1}, "momentum=-0.1"),
        (DGC, {"weight_decay": -1}, "weight_decay=-1"),
        (DGC, {"clip": 0}, "None does not clip"),
        (DGC, {"clip": "1"}, "clip='1'"),
        (DGC, {"nesterov": True, "momentum": 0.0}, "nesterov=True needs"),
        (DGC, {"masking": 1}, "masking=1 must be True or False"),
    ],
)
def test_wrong_options_are_refused_in_one_sentence(make, options, words):
    with pytest.raises(ValueError) as error:
        make(**options)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
