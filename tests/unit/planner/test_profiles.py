import json

import pytest
from random_nets import SHAPE_FILE

from thinwire.core.methods.topk import TopK
from thinwire.core.pricing.profiles import BUILTIN, builtin
from thinwire.predict.timeline.simulate import plan_of

# Elements, tensors, forward GFLOPs of one image (or of one token, without attention), as widely published.
KNOWN = {
    "resnet50": (25_557_032, 161, 8.2),
    "resnet152": (60_192_808, 467, 23.1),
    "densenet201": (20_013_928, 604, 8.7),
    "vgg16": (138_357_544, 32, 31.0),
    "bert-base": (109_482_240, 199, None),
    "bert-large": (335_141_888, 391, None),
    "gpt2": (124_439_808, 148, None),
}


@pytest.mark.parametrize("name", BUILTIN)
def test_totals(name):
    elements, tensors, gflops = KNOWN[name]
    profile = builtin(name, batch_size=1, device_flops=1e9)
    assert profile.elements == elements
    assert len(profile.tensors) == tensors
    if gflops:
        assert profile.forward_seconds == pytest.approx(gflops, rel=0.02)
    assert 1.9 < sum(profile.backward_seconds) / profile.forward_seconds <= 2
    assert sum(m.forward_seconds for m in profile.modules) == pytest.approx(profile.forward_seconds)
    assert profile.provenance == "assumed"
    modules = {module.name for module in profile.modules}
    assert {tensor.module for tensor in profile.tensors} <= modules


def test_transformer_flops():
    """Two per parameter of the matrices and token, plus attention."""
    profile = builtin("bert-base", batch_size=1, device_flops=1e9, sequence_length=128)
    matrices = 12 * 12 * 768**2
    want = 2 * matrices * 128 + 12 * 4 * 128**2 * 768
    assert profile.forward_seconds * 1e9 == pytest.approx(want, rel=0.01)


def test_resnet50_is_the_shape_on_file():
    want = [(name, tuple(shape)) for name, shape in json.loads(SHAPE_FILE.read_text())["tensors"]]
    assert [(tensor.name, tensor.shape) for tensor in builtin("resnet50").tensors] == want


def test_batch_and_rate_scale_the_seconds():
    one, two = builtin("vgg16", batch_size=8), builtin("vgg16", batch_size=16, device_flops=4e13)
    assert two.forward_seconds == pytest.approx(one.forward_seconds / 2)
    half = one.scaled(0.5)
    assert half.backward_seconds == pytest.approx(two.backward_seconds)
    assert half.forward_seconds == pytest.approx(two.forward_seconds)
    assert "scaled by 0.5" in half.source
    assert half.sizes == one.sizes


def test_a_topk_plan_keeps_embeddings_and_vectors_dense():
    profile = builtin("gpt2")
    plan = plan_of(TopK(density=0.01), profile, "gloo")
    plan.check(t.name for t in profile.tensors)
    dense = {name for bucket in plan.phases[0] if bucket.dense for name in bucket.names}
    assert {"transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f.bias"} <= dense
    assert "transformer.h.0.mlp.c_fc.weight" not in dense
