import pytest

import thinwire as tw
from thinwire.core.methods.chain import chain

MAJORITY = tw.SignSGD(error_feedback=False, vote="majority")


@pytest.mark.parametrize(
    "methods,want",
    [
        ([tw.ACP(rank=2)], tw.ACP(rank=2)),
        (["qsgd"], tw.QSGD()),
        ([tw.TopK(0.1), tw.Cast("fp16")], tw.TopK(0.1, value_dtype="fp16")),
        ([tw.TopK(0.1, fusion=2), "cast"], tw.TopK(0.1, value_dtype="bf16", fusion=2)),
        ([tw.TopK(0.1), tw.Cast("fp16", fusion=2)], tw.TopK(0.1, value_dtype="fp16", fusion=2)),
        ([tw.HiTopK(0.1), tw.Cast("bf16")], tw.HiTopK(0.1, value_dtype="bf16")),
        ([tw.LAGS(20), tw.Cast("fp16")], tw.LAGS(20, value_dtype="fp16")),
        ([tw.OMGS(0.1), tw.Cast("fp16")], tw.OMGS(0.1, value_dtype="fp16")),
        ([tw.TopK(0.1, value_dtype="bf16"), "cast"], tw.TopK(0.1, value_dtype="bf16")),
        (["ssgd", "cast"], tw.Cast()),
        ([tw.ACP(rank=2), tw.SSGD(deterministic=True)], tw.ACP(rank=2, deterministic=True)),
        ([tw.SSGD(fusion="single"), tw.QSGD()], tw.QSGD(fusion="single")),
        (["cast", "dear"], tw.Cast(decoupled=True)),
        ([tw.DeAR(check_finite=False), tw.Cast("fp16")], tw.Cast("fp16", decoupled=True, check_finite=False)),
        (["ssgd", tw.TopK(0.1), "cast", tw.SSGD(fusion="none")], tw.TopK(0.1, value_dtype="bf16", fusion="none")),
    ],
)
def test_sound_compositions_are_one_method(methods, want):
    assert chain(*methods) == want
    assert type(chain(*methods)) is type(want)


@pytest.mark.parametrize(
    "methods,words",
    [
        ([], "at least one method"),
        (["acpp"], "did you mean 'acp'"),
        ([tw.ACP(), tw.QSGD()], "the sum of codes is not the code of the sum"),
        ([tw.PowerSGD(), tw.TernGrad()], "the sum of codes is not the code of the sum"),
        ([tw.ACP(), tw.Cast("int8")], "the sum of codes is not the code of the sum"),
        ([tw.ACP(), tw.SignSGD()], "the sum of codes is not the code of the sum"),
        ([tw.ACP(), tw.Cast("fp16")], "orthogonal in fp32"),
        ([tw.TopK(0.1), MAJORITY], "a majority vote has no gradient units"),
        ([MAJORITY, tw.ACP()], "a majority vote has no gradient units"),
        ([tw.TopK(0.1), tw.ACP()], "two residuals"),
        ([tw.SignSGD(), tw.TopK(0.1)], "two residuals"),
        ([tw.TopK(0.1), tw.Cast("int8")], "two residuals"),
        ([tw.TopK(0.1), tw.HiTopK(0.1)], "two residuals"),
        ([tw.TopK(0.1), tw.QSGD()], "would need scales of their own"),
        ([tw.QSGD(), tw.TernGrad()], "what is sent are codes"),
        ([tw.QSGD(), tw.Cast()], "what is sent are codes"),
        ([tw.Cast(), tw.TopK(0.1)], "put the Cast last"),
        ([tw.Cast(), tw.Cast("fp16")], "leave one of them out"),
        ([tw.Cast(), tw.QSGD()], "leave one of them out"),
        ([tw.TopK(0.1, value_dtype="bf16"), tw.Cast("fp16")], "a second time"),
        ([tw.TopK(0.1, error_feedback=False), tw.ACP(error_feedback=False)], "not what the first sends"),
        ([tw.SignSGD(), tw.SSGD(deterministic=True)], "SignSGD has no option 'deterministic'"),
        ([tw.TopK(0.1), tw.Cast(deterministic=True)], "TopK has no option 'deterministic'"),
        ([tw.ACP(fusion=2), tw.SSGD(fusion=4)], "fusion=2 and fusion=4 in one chain"),
    ],
)
def test_others_are_refused_with_the_reason(methods, words):
    with pytest.raises(ValueError) as error:
        chain(*methods)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
