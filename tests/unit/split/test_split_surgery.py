import copy

import pytest
import split_models as small
import torch
from torch import nn

from thinwire.systems.split import SplitPlan, split_model
from thinwire.systems.split.finetune import whole_forward
from thinwire.systems.split.models import view_of
from thinwire.systems.split.surgery import factorise, principal_directions

BARS = {torch.float32: 1e-5, torch.float64: 1e-12}


def logits_of(halves, batch):
    front, back = halves
    return back(front(batch.inputs, batch.lengths), batch.lengths)


def projection(logits, batch):
    """A fixed random projection of the logits of real tokens: sums of squares are constant behind a LayerNorm."""
    draw = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits.dtype)
    if logits.dim() == 3:
        draw[torch.arange(logits.shape[1]) >= batch.lengths[:, None]] = 0
    return (logits * draw).sum()


@pytest.mark.parametrize("architecture, kind, residual, dtype", [
    *((each, "lowrank", "keep", torch.float64) for each in small.ARCHITECTURES),
    ("bert", "boundary", "drop", torch.float32), ("vit", "boundary", "drop", torch.float32),
    ("gpt2", "ffn", "keep", torch.float64), ("distilbert", "lowrank", "keep", torch.float32),
])  # fmt: skip
def test_full_rank_with_the_residual_is_the_unsplit_model(architecture, kind, residual, dtype):
    whole = small.model(architecture, dtype).eval()
    batch = small.batch(architecture, dtype=dtype)
    halves = split_model(whole, SplitPlan(2, kind, 32, residual))
    for half in halves:
        half.eval()
    expected, found = whole_forward(whole, batch), logits_of(halves, batch)
    projection(expected, batch).backward()
    projection(found, batch).backward()
    if found.dim() == 3:
        real = torch.arange(found.shape[1]) < batch.lengths[:, None]
        expected, found = expected[real], found[real]
    assert expected.std() > 0.05
    assert (expected - found).abs().max() < BARS[dtype]
    view = view_of(whole)
    own = dict(view.embeddings(whole).named_parameters())
    split = dict(halves[0].embeddings.named_parameters())
    assert own.keys() == split.keys()
    reached = [name for name in own if own[name].grad is not None]
    assert reached
    for name in reached:
        scale = own[name].grad.abs().max().clamp(min=1)
        assert (own[name].grad - split[name].grad).abs().max() / scale < BARS[dtype], name


def hand_written(whole, batch, cut):
    """BERT's layer ``cut`` without the feed-forward residual connection, by the model's own modules."""
    inner = whole.bert
    hidden = inner.embeddings(input_ids=batch.inputs["input_ids"])
    mask = view_of(whole).mask(hidden, batch.lengths)
    for number, layer in enumerate(inner.encoder.layer, 1):
        if number != cut:
            hidden = layer(hidden, mask)
            continue
        a = layer.attention(hidden, mask)[0]
        hidden = layer.output.LayerNorm(layer.output.dense(nn.functional.gelu(layer.intermediate.dense(a))))
    return whole.classifier(inner.pooler(hidden))


@pytest.mark.parametrize("kind, cut", [("ffn", 1), ("lowrank", 2), ("lowrank", 3)])
def test_drop_is_a_layer_without_the_link(kind, cut):
    whole = small.model(dtype=torch.float64).eval()
    batch = small.batch()
    halves = split_model(whole, SplitPlan(cut, kind, 32))
    found = logits_of([half.eval() for half in halves], batch)
    assert (found - hand_written(whole, batch, cut)).abs().max() < 1e-12
    assert (found - whole_forward(whole, batch)).abs().max() > 1e-3


@pytest.mark.parametrize("rank", [1, 5, 16])
def test_truncation_error_is_the_dropped_spectrum(rank):
    weight = torch.randn(48, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u, s, v = factorise(weight, rank)
    dropped = torch.linalg.svdvals(weight)[rank:].square().sum()
    error = (weight - u @ s @ v).square().sum()
    assert (error - dropped).abs() <= 1e-10 * weight.square().sum()


def test_factors_do_not_depend_on_the_sign_that_lapack_picks():
    weight = torch.randn(20, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for v in (factorise(weight, 6)[2], factorise(-weight, 6)[2]):
        assert all(row[row.abs().argmax()] > 0 for row in v)
    torch.testing.assert_close(factorise(weight, 6)[2], factorise(-weight, 6)[2])


def test_activation_aware_factors_have_the_least_output_error():
    draw = torch.Generator().manual_seed(0)
    mix = torch.diag(torch.logspace(0, -2, 16, dtype=torch.float64)) @ torch.randn(16, 16, generator=draw).double()
    x = torch.randn(400, 16, generator=draw).double() @ mix
    weight = torch.randn(48, 16, generator=draw).double()
    moment = x.T @ x / len(x)

    def error(factors):
        u, s, v = factors
        return (x @ weight.T - x @ (u @ s @ v).T).square().sum()

    plain, aware = error(factorise(weight, 4)), error(factorise(weight, 4, moment))
    assert aware < 0.5 * plain
    # The least of all matrices of this rank: what SVD leaves of the outputs themselves.
    least = torch.linalg.svdvals(x @ weight.T)[4:].square().sum()
    assert aware < least * (1 + 1e-3)
    u, s, v = factorise(weight, 16, moment)
    torch.testing.assert_close(u @ s @ v, weight, rtol=0, atol=1e-8)


def test_principal_directions_keep_the_most_energy():
    draw = torch.Generator().manual_seed(0)
    a = torch.randn(300, 12, generator=draw).double() @ torch.randn(12, 12, generator=draw).double()
    kept = principal_directions(a.T @ a, 3)
    torch.testing.assert_close(kept @ kept.T, torch.eye(3, dtype=torch.float64))
    lost = (a - a @ kept.T @ kept).square().sum()
    assert abs(lost / torch.linalg.svdvals(a)[3:].square().sum() - 1) < 1e-9


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_residual_directions_come_from_the_samples(architecture):
    whole = small.model(architecture, torch.float64).eval()
    batches = [small.batch(architecture, seed) for seed in range(4)]
    samples = [(b.inputs, b.lengths) for b in batches]
    halves = split_model(whole, SplitPlan(2, rank=32, residual="lowrank:32"), samples)
    found = logits_of([half.eval() for half in halves], batches[0])
    assert (found - whole_forward(whole, batches[0])).abs().max() < 1e-12  # all directions: nothing is lost
    few = split_model(whole, SplitPlan(2, rank=32, residual="lowrank:16"), samples)
    none = split_model(whole, SplitPlan(2, rank=32), samples)
    away = [
        (logits_of([half.eval() for half in pair], batches[0]) - whole_forward(whole, batches[0])).norm()
        for pair in (few, none)
    ]
    assert 1e-6 < away[0] < away[1]


@torch.no_grad()
@pytest.mark.parametrize("architecture", small.ARCHITECTURES)
def test_principal_directions_of_a_layer(architecture):
    whole = small.model(architecture, torch.float64).eval()
    batch = small.batch(architecture, dtype=torch.float64)
    expected, away = whole_forward(whole, batch), []
    for rank in (32, 12, 3):
        halves = split_model(whole, SplitPlan(2, "principal", rank), [(batch.inputs, batch.lengths)])
        found = logits_of([half.eval() for half in halves], batch)
        if found.dim() == 3:
            real = torch.arange(found.shape[1]) < batch.lengths[:, None]
            found, expected = found * real[..., None], expected * real[..., None]
        away.append(float((found - expected).norm()))
    assert away[0] < 1e-9 < away[1] < away[2]
    front = halves[0]
    crossed = front(batch.inputs, batch.lengths)
    real = torch.arange(crossed.shape[1]) < (batch.lengths[:, None] if batch.lengths is not None else 10**9)
    assert crossed[real.expand(crossed.shape[:2])].mean(0).abs().max() < 1e-9  # centred
    turned = front.directions @ front.directions.T
    torch.testing.assert_close(turned, torch.eye(3).double(), rtol=0, atol=1e-12)


def test_activation_aware_surgery_at_full_rank_is_exact():
    whole = small.model("gpt2", torch.float64).eval()
    samples = [(small.batch("gpt2", s, lengths=(9,) * 8).inputs, None) for s in range(4)]
    batch = small.batch("gpt2")
    halves = split_model(whole, SplitPlan(2, rank=32, residual="keep", init="activation"), samples)
    assert (logits_of([half.eval() for half in halves], batch) - whole_forward(whole, batch)).abs().max() < 1e-8


@pytest.mark.parametrize(
    "architecture, kind",
    [*((each, "lowrank") for each in small.ARCHITECTURES), ("bert", "ffn"), ("vit", "boundary"), ("gpt2", "ffn")],
)
def test_every_parameter_has_one_owner_and_a_gradient(architecture, kind):
    whole = small.model(architecture)
    kept = copy.deepcopy(whole.state_dict())
    batch = small.batch(architecture)
    front, back = split_model(whole, SplitPlan(2, kind))
    owned = [{id(p) for p in half.parameters()} for half in (front, back)]
    assert not owned[0] & owned[1]
    projection(logits_of((front, back), batch), batch).backward()
    missing = [n for half in (front, back) for n, p in half.named_parameters() if p.grad is None]
    assert not [name for name in missing if "mask_token" not in name]
    for p in (*front.parameters(), *back.parameters()):
        p.data.zero_()
    assert all(torch.equal(value, kept[name]) for name, value in whole.state_dict().items())  # the user's is untouched


@pytest.mark.parametrize(
    "plan,model,says",
    [
        ({"cut": 4}, {}, "cut=4 is outside 1 to 3"),
        ({"rank": 33}, {}, "rank=33 is outside 1 to 32"),
        ({"residual": "lowrank:33"}, {}, "more directions than the 32"),
        ({"init": "activation"}, {}, "needs sample batches"),
        ({"residual": "lowrank:2"}, {}, "needs sample batches"),
        ({}, {"architecture": "gpt2-lm", "tie_word_embeddings": True}, "lm_head.weight are one parameter"),
        ({"up": ("pack",)}, {"architecture": "vit"}, "a vit has no padding"),
        ({}, None, "a Linear cannot be split: use one of BertFor"),
    ],
)
def test_what_cannot_be_cut(plan, model, says):
    whole = nn.Linear(2, 2) if model is None else small.model(**model)
    with pytest.raises(ValueError, match=says):
        split_model(whole, SplitPlan(**{"cut": 1, **plan}))
