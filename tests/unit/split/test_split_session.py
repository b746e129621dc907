"""The two ends without sockets: every request is carried out once, and ends that do not fit refuse one another."""

import numpy as np
import pytest
import split_models as small
import torch
from split_ends import RECIPE, assert_same, batch_of, edge_end, halves, held, in_process, parameters

from thinwire.systems.split import Batch, CloudEnd, LocalPair, Recipe, SplitPlan
from thinwire.systems.split.errors import SessionError
from thinwire.systems.split.frames import Message


def opened(of_edge, of_cloud, directory=None, call=None, **more):
    edge = edge_end(of_edge, checkpoint_dir=directory and directory / "edge", **more)
    cloud = CloudEnd(of_cloud, "pair", RECIPE, directory and directory / "cloud")
    edge.open(call(cloud) if call else cloud.handle, cloud.hello(edge.hello()))
    return edge, cloud


def test_a_repeated_request_is_answered_and_not_carried_out_again():
    def twice(cloud):
        def call(request):
            first = cloud.handle(request)
            again = cloud.handle(request)
            assert again is first
            return again

        return call

    front, back = halves()
    edge, _ = opened(front, back, call=twice)
    assert_same([float(edge.step(batch_of(step))) for step in range(6)], front, back, in_process())


def test_dropout_is_drawn_apart_from_everything_else():
    plain = in_process(dropout=0.3)
    front, back = halves(dropout=0.3)
    pair = LocalPair(front, back, RECIPE, 20)
    losses = []
    for step in range(6):
        torch.rand(step + 1)  # other draws of the program change nothing
        losses.append(float(pair.step(batch_of(step))))
        pair.evaluate(batch_of(step))
    assert losses == plain[0]
    assert losses != in_process(dropout=0.0)[0]


def test_evaluation_is_without_dropout_and_changes_nothing():
    front, back = halves(dropout=0.5)
    pair = LocalPair(front, back, RECIPE, 20)
    before = parameters(front, back)
    first, second = pair.evaluate(batch_of(0)), pair.evaluate(batch_of(0))
    assert torch.equal(first, second)
    assert torch.equal(parameters(front, back), before)
    assert pair.steps == 0
    front.train()
    back.train()
    batch = batch_of(0)
    draws = torch.stack([back(front(batch.inputs, batch.lengths), batch.lengths) for _ in range(4)])
    assert draws.var(0).min() > 0
    z = front(batch.inputs, batch.lengths).detach()
    assert torch.stack([back(z, batch.lengths) for _ in range(4)]).var(0).min() > 0  # on the cloud's side too


def test_where_the_labels_are_does_not_change_the_training():
    plain = in_process(SplitPlan(2), dropout=0.0)
    found = in_process(SplitPlan(2, labels="cloud"), dropout=0.0)
    assert found[0] == pytest.approx(plain[0], rel=1e-6)
    torch.testing.assert_close(found[1], plain[1])


@pytest.mark.parametrize(
    "words,says",
    [
        ({"plan": "x"}, "the plan of edge and cloud differ"),
        ({"recipe": "x"}, "the recipe of edge and cloud differ"),
        ({"pair": "x"}, "the two files are not from the same surgery"),
        ({"protocol": 1}, "install the same version"),
        ({"steps": [7]}, "no step in common"),
        ({"steps": "7"}, "malformed"),
        ({"more": 1}, "malformed"),
    ],
)
def test_ends_that_do_not_fit(words, says):
    front, back = halves()
    with pytest.raises(SessionError, match=says):
        CloudEnd(back, "pair", RECIPE).hello(edge_end(front).hello() | words)


def z_of(edge, step=0, sequence=1, **more):
    batch = batch_of(step)
    z = edge.half(batch.inputs, batch.lengths)
    parts = {"z": z, "lengths": batch.lengths.to(torch.uint16)} | more
    return Message("z", step, sequence, parts=tuple((k, v) for k, v in parts.items() if v is not None))


HUGE = torch.cat([torch.tensor([65535]), torch.ones(100_000, dtype=torch.int64)]).to(torch.uint16)  # all memory


@pytest.mark.parametrize(
    "request_of,says",
    [
        (lambda edge: z_of(edge, sequence=2), "expected request 1, got 2"),
        (lambda edge: z_of(edge, step=3), "step 3 begins, expected step 0"),
        (lambda edge: z_of(edge, lengths=None), "without the lengths"),
        (lambda edge: z_of(edge, lengths=torch.tensor([7, 0, 5]).to(torch.uint16)), "without a token"),
        (lambda edge: z_of(edge, lengths=torch.tensor([9, 1, 5]).to(torch.uint16)), "do not fit"),
        (lambda edge: z_of(edge, lengths=torch.tensor([1, 5]).to(torch.uint16)), "do not fit"),
        (lambda edge: z_of(edge, z=torch.zeros(3, 7, 9)), "the other end sent"),
        (lambda edge: z_of(edge, z=torch.zeros(3, 7, 8, dtype=torch.float16)), "the other end sent"),
        (lambda edge: z_of(edge, z=torch.zeros(0, 7, 8), lengths=torch.zeros(0).to(torch.uint16)), "none at all"),
        (lambda edge: Message("dlogits", 0, 1, parts=(("dlogits", torch.zeros(3, 5)),)), "nothing waits for"),
        (lambda edge: Message("bye", 3, 1, fields={}), "bye at step 3"),
        (lambda edge: Message("hello", 0, 1, fields={}), "nothing waits for"),
        (lambda edge: Message("z", 0, 1, parts=(("z", torch.zeros(165_535, 8)), ("lengths", HUGE))), "are too many"),
    ],
)
def test_requests_that_may_not_come(request_of, says):
    front, back = halves()
    edge, cloud = opened(front, back)
    before = parameters(back)
    with pytest.raises(SessionError, match=says):
        cloud.handle(request_of(edge))
    assert torch.equal(parameters(back), before)
    assert not cloud.training


def test_a_gradient_of_another_shape():
    front, back = halves()
    edge, cloud = opened(front, back)
    before = parameters(back)
    cloud.handle(z_of(edge))
    with pytest.raises(SessionError, match=r"expected torch.float32 \[3, 5\]"):
        cloud.handle(Message("dlogits", 0, 2, parts=(("dlogits", torch.zeros(3, 4)),)))
    assert torch.equal(parameters(back), before)


def test_before_hello_and_after_bye():
    front, back = halves()
    with pytest.raises(SessionError, match="call open first"):
        edge_end(front).step(batch_of(0))
    cloud = CloudEnd(back, "pair", RECIPE)
    with pytest.raises(SessionError, match="before hello"):
        cloud.handle(Message("bye", fields={}))
    edge, cloud = opened(front, back)
    edge.step(batch_of(0))
    edge.bye()
    with pytest.raises(SessionError, match="this session is over"):
        edge.step(batch_of(1))
    with pytest.raises(SessionError, match="before hello"):
        cloud.handle(z_of(edge, step=1, sequence=4))


RESUMED = [
    SplitPlan(2),
    SplitPlan(2, up=("delta:4", "pack"), down=("int8", "pack")),
    SplitPlan(2, up=("int8", "pack"), down=("delta:4", "pack"), front_on="cloud"),
]


@pytest.mark.parametrize(
    "dies, plan",
    [("edge", RESUMED[1]), ("cloud", RESUMED[0]), ("cloud", RESUMED[2]), ("edge within a step", RESUMED[1])],
)
def test_both_go_on_from_the_newest_common_checkpoint(dies, plan, tmp_path):
    died = []

    def call(cloud):
        return lambda request: cloud.handle(request) if not died or request.kind in ("z", "ids") else 1 / 0

    edge, cloud = opened(*held(plan), tmp_path, call)
    losses = []
    for step in range(5):
        if step in (2, 4):
            edge.checkpoint()
        losses.append(float(edge.step(batch_of(step))))
    if dies == "edge within a step":
        died.append("edge")
        with pytest.raises(ZeroDivisionError):
            edge.step(batch_of(5))
        assert cloud.training
    if dies == "cloud":
        cloud = CloudEnd(held(plan)[1], "pair", RECIPE, tmp_path / "cloud")
    edge = edge_end(held(plan)[0], checkpoint_dir=tmp_path / "edge")
    edge.open(cloud.handle, cloud.hello(edge.hello()))
    assert edge.steps == 4
    del losses[4:]
    losses += [float(edge.step(batch_of(step))) for step in range(4, 8)]
    assert_same(losses, edge.half, cloud.half, in_process(plan, steps=8))


def test_a_recipe_of_numpy_numbers_is_the_same_recipe():
    assert Recipe(learning_rate=np.float32(0.5), warmup=np.float64(0.25)).hash == Recipe(0.5, warmup=0.25).hash


def test_what_could_not_be_loaded_again_is_refused_by_its_key(tmp_path):
    edge, cloud = opened(*halves(), tmp_path)
    edge.step(batch_of(0))
    cloud.half.state_dict = lambda: {"folder": tmp_path}
    with pytest.raises(SessionError, match=r"the cloud cannot write its checkpoint: .*'folder'\] is a pathlib"):
        edge.checkpoint()


def test_a_side_that_saved_one_less_decides(tmp_path):
    front, back = halves()
    edge, cloud = opened(front, back, tmp_path)
    edge.checkpoint()
    edge.step(batch_of(0))
    cloud.handle(Message("checkpoint", 1, 4, fields={}))  # the edge died before it saved its own
    again = edge_end(halves()[0], checkpoint_dir=tmp_path / "edge")
    again.open(cloud.handle, cloud.hello(again.hello()))
    assert again.steps == 0
    assert cloud.steps_of("edge") == 0


def test_a_cloud_that_lost_its_checkpoints_does_not_make_the_edge_lose_its_own(tmp_path):
    front, back = halves()
    edge, _ = opened(front, back, tmp_path)
    edge.step(batch_of(0))
    edge.checkpoint()
    again = edge_end(halves()[0], checkpoint_dir=tmp_path / "edge")
    with pytest.raises(SessionError, match=r"has step 1, the cloud is after step 0 with it and has no checkpoint"):
        CloudEnd(halves()[1], "pair", RECIPE, tmp_path / "empty").hello(again.hello())
    assert again.hello()["steps"] == [1]


def test_checkpoints_of_other_halves_are_not_taken(tmp_path):
    edge, cloud = opened(*halves(), tmp_path)
    edge.step(batch_of(0))
    edge.checkpoint()
    with pytest.raises(SessionError, match="cloud holds checkpoints of other halves"):
        CloudEnd(halves()[1], "another", RECIPE, tmp_path / "cloud")
    again = edge_end(halves()[0], pair="another", checkpoint_dir=tmp_path / "edge")
    with pytest.raises(SessionError, match="edge holds checkpoints of other halves"):
        again.open(cloud.handle, {"resume": 1})


def test_padding_beyond_the_longest_sample_need_not_cross():
    batch = batch_of(0)
    wide = torch.nn.functional.pad(batch.inputs["input_ids"], (0, 3))
    longer = Batch({"input_ids": wide}, batch.labels, batch.lengths, batch.slots)
    for up, down in (((), ()), (("pack",), ()), ((), ("pack",)), (("pack",), ("pack",))):
        for front_on in ("edge", "cloud"):
            plan = SplitPlan(2, up=up, down=down, front_on=front_on)
            pairs = [LocalPair(*halves(plan, dropout=0.0), RECIPE, 20) for _ in "ab"]
            losses = [[float(pair.step(each)) for _ in "ab"] for pair, each in zip(pairs, (batch, longer))]
            assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_two_edges_one_after_the_other_train_one_back():
    front, back = halves()
    other = halves(seed=1)[0]
    cloud = CloudEnd(back, "pair", RECIPE)
    for name, half in (("a", front), ("b", other), ("a", front)):
        edge = edge_end(half, name=name)
        edge.steps = cloud.steps_of(name)
        before = parameters(back)
        edge.open(cloud.handle, cloud.hello(edge.hello()))
        edge.step(batch_of(0))
        edge.bye()
        assert not torch.equal(parameters(back), before)
    assert (cloud.steps_of("a"), cloud.steps_of("b")) == (2, 1)


def test_a_loss_that_does_not_fit_the_labels():
    front, back = halves()
    edge = edge_end(front, recipe=Recipe(loss="next_token"))
    cloud = CloudEnd(back, "pair", Recipe(loss="next_token"))
    edge.open(cloud.handle, cloud.hello(edge.hello()))
    with pytest.raises(SessionError, match="the loss does not accept logits"):
        edge.step(small.batch())
