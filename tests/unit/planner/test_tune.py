"""The fusion tuner on step times that are known: few plans, near the optimum, and no change for nothing."""

import math

import numpy as np
import pytest

from thinwire.core.methods.ssgd import SSGD
from thinwire.core.pricing.plans import PlanTensor, make_plan
from thinwire.predict.tune import DISTINCT, TIMES, FusionTuner, distinct, grid

MODELS = {  # seconds of a step over MiB, and where to start: 40 % or more above the optimum
    "start-ups and a late end": (lambda mib: 0.05 + 0.256 / mib + 0.004 * mib, 32.0),
    "hidden up to a point": (lambda mib: max(0.2, 0.1 + 0.02 * mib) + 0.05 / mib, 32.0),
    "the larger the better": (lambda mib: 0.1 + 0.2 * math.sqrt(8 / mib), 2.0),
}


def tuned(seconds, candidates, start, noise, seed):
    draw = np.random.default_rng(seed)
    tuner = FusionTuner(candidates, start)
    while not tuner.done:
        limit = tuner.ask()
        tuner.tell(limit, seconds(limit) * math.exp(noise * draw.standard_normal()))
    return tuner


@pytest.mark.parametrize("noise", [0.02, 0.05])
@pytest.mark.parametrize("model", MODELS)
def test_near_the_optimum_with_few_plans(model, noise):
    seconds, start = MODELS[model]
    candidates = [start, *grid(start)]
    least = min(map(seconds, candidates))
    assert seconds(start) > 1.4 * least
    near = 0
    for seed in range(60):
        tuner = tuned(seconds, candidates, start, noise, seed)
        assert len(tuner.tried) <= DISTINCT == 8
        near += seconds(tuner.best()) <= 1.05 * least
    assert near >= 54


@pytest.mark.parametrize(("gain", "noise"), [(0.0, 0.02), (0.03, 0.05), (0.05, 0.05)])
def test_the_start_is_kept_for_a_gain_below_the_noise(gain, noise):
    def seconds(mib):
        return 1.0 if mib == 4 else 1 - gain if mib == 8 else 1.01

    kept = sum(tuned(seconds, [4.0, *grid(4.0)], 4.0, noise, seed).best() == 4 for seed in range(200))
    assert kept >= 180


def test_a_gain_above_the_noise_is_taken():
    taken = [
        tuned(lambda mib: 0.9 if mib == 8 else 1.0, [4.0, 8.0, 16.0], 4.0, 0.01, seed).best() == 8 for seed in range(20)
    ]
    assert all(taken)


def test_start_and_challenger_are_measured_in_turns():
    tuner, asked = FusionTuner([1.0, 2.0, 4.0], start=2.0), []
    while not tuner.done:
        asked.append(tuner.ask())
        tuner.tell(asked[-1], asked[-1])
    assert asked[0] == 2
    assert sorted(asked[:3]) == [1, 2, 4]
    assert asked[3:] == [2, 1] * (TIMES - 1)
    assert tuner.best() == 1
    assert tuner.noise == 0
    assert tuner.gain(1) == pytest.approx(0.5)
    with pytest.raises(RuntimeError, match="done"):
        tuner.ask()


def test_the_noise_is_that_of_repeats():
    tuner = FusionTuner([1.0, 2.0], start=1.0)
    for limit, seconds in [(1.0, 1.0), (2.0, 0.9), (1.0, 1.2), (2.0, 0.8), (1.0, 1.1), (2.0, 1.0)]:
        tuner.tell(limit, seconds)
    spreads = [np.var(np.log(values), ddof=1) for values in ([1, 1.2, 1.1], [0.9, 0.8, 1])]
    assert tuner.noise == pytest.approx(math.sqrt(sum(spreads) / 2))
    assert tuner.gain(2.0) < 2 * tuner.noise
    assert tuner.best() == 1


def test_one_candidate_is_measured_once():
    tuner = FusionTuner([3.0], start=3.0)
    tuner.tell(tuner.ask(), 1.0)
    assert tuner.done
    assert tuner.best() == 3


def test_equal_plans_count_once():
    tensors = [PlanTensor(f"t{i}", (1 << 18,)) for i in range(4)]  # 1 MiB each

    def make(mib):
        return make_plan(SSGD(fusion=mib), tensors, range(4), (), "gloo")

    start = make(2.0)
    found = distinct({2.0: start}, [0.5, 0.9, 1.0, 2.5, 3.0, 4.0, 64.0], make)
    assert list(found) == [2.0, 0.5, 3.0, 4.0]  # 1 MiB is 0.5 again, 2.5 the start, 64 the single bucket of 4
    assert len({plan.hash for plan in found.values()}) == 4


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: FusionTuner([], 1.0), "above 0"),
        (lambda: FusionTuner([0.0, 1.0], 1.0), "above 0"),
        (lambda: FusionTuner([1.0], 2.0), "not one of the candidates"),
        (lambda: FusionTuner([1.0], 1.0).tell(2.0, 1.0), "not one of the candidates"),
        (lambda: FusionTuner([1.0], 1.0).tell(1.0, float("nan")), "finite"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_until_it_is_measured_tune_is_auto():
    tensors = [PlanTensor(f"t{i}", (1 << 17,)) for i in range(20)]
    for options in ({}, {"decoupled": True}):
        tune, auto = (make_plan(SSGD(m, **options), tensors, range(20), (), "gloo") for m in ("tune", "auto"))
        assert tune == auto
