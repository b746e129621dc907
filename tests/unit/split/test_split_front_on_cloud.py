"""The roles of the published program: the front in the cloud, the back and the labels at the edge."""

import copy
from dataclasses import replace

import pytest
import split_models as small
import torch
from split_ends import (
    RECIPE,
    Noting,
    assert_same,
    batch_of,
    edge_end,
    halves,
    held,
    in_process,
    parameters,
    serving,
)

from between import Between
from thinwire.systems.split import (
    Back,
    Batch,
    CloudEnd,
    LocalPair,
    Recipe,
    Shape,
    SplitPlan,
    crossings,
    split_model,
)
from thinwire.systems.split.errors import SessionError
from thinwire.systems.split.estimate import shape_of, steps_of
from thinwire.systems.split.frames import Message
from thinwire.systems.split.models import view_of
from thinwire.systems.split.tasks import TextData

PLAN = SplitPlan(2, front_on="cloud")
CODED = {"up": ("delta:4", "pack"), "down": ("int8", "pack")}


def swapped(front, back):
    """The same halves, the other way round: what goes up there comes down here."""
    plan = replace(front.plan, up=front.plan.down, down=front.plan.up, front_on="cloud")
    front, back = copy.deepcopy((front, back))
    front.plan = back.plan = plan
    return front, back


@pytest.mark.parametrize("codecs", [{}, CODED, {"up": ("fp16",), "down": ("int4",)}], ids=["none", "delta", "casts"])
def test_it_trains_as_with_the_front_at_the_edge_bit_for_bit(codecs):
    ends = halves(SplitPlan(2, **codecs), dropout=0.3)
    pairs = [LocalPair(*placed, RECIPE, 20) for placed in (copy.deepcopy(ends), swapped(*ends))]
    losses = [[float(pair.step(batch_of(step))) for step in range(6)] for pair in pairs]
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 6
    assert torch.equal(*(parameters(pair.front) for pair in pairs))
    assert torch.equal(*(parameters(pair.back) for pair in pairs))
    logits = [pair.evaluate(batch_of(0)) for pair in pairs]
    assert torch.equal(*logits)
    assert pairs[0].ledger.state == pairs[1].ledger.state


@pytest.mark.parametrize("architecture", ["distilbert", "gpt2-lm", "vit"])
def test_every_input_crosses(architecture):
    recipe = Recipe(learning_rate=1e-2, loss="next_token" if architecture == "gpt2-lm" else "classification")
    ends = split_model(small.model(architecture), SplitPlan(1))
    pairs = [LocalPair(*placed, recipe, 4) for placed in (copy.deepcopy(ends), swapped(*ends))]
    batches = [small.batch(architecture, seed) for seed in range(3)]
    assert torch.equal(*(torch.stack([pair.step(batch) for batch in batches]) for pair in pairs))
    assert torch.equal(*(parameters(pair.front, pair.back) for pair in pairs))


def typed(batch):
    types = (torch.arange(batch.inputs["input_ids"].shape[1]) > 2).long().expand_as(batch.inputs["input_ids"])
    return Batch({**batch.inputs, "token_type_ids": types}, batch.labels, batch.lengths, batch.slots)


def test_token_types_cross_to_models_that_take_them():
    batch = typed(small.batch())
    for architecture in ("bert", "distilbert"):
        ends = split_model(small.model(architecture), SplitPlan(1))
        pairs = [LocalPair(*placed, RECIPE, 4) for placed in (copy.deepcopy(ends), swapped(*ends))]
        assert torch.equal(*(pair.step(batch) for pair in pairs))
        assert torch.equal(*(parameters(pair.front, pair.back) for pair in pairs))
        sent = pairs[1].ledger.sent
        assert (sent["ids"], sent["types"]) == (4 * 3 * 7, 3 * 7 if architecture == "bert" else 0)
        shape = replace(shape_of(view_of(small.model(architecture)), small.LABELS))
        data = TextData([[1] * n for n in small.LENGTHS], [0] * 3, types=[[0] * n for n in small.LENGTHS])
        (step,) = steps_of(ends[0].plan, shape, data, Recipe(epochs=1))
        assert [message.kind for message in step] == ["z", "logits", "dlogits", "dz"]
        (step,) = steps_of(pairs[1].front.plan, shape, data, Recipe(epochs=1))
        found = {name: count for name, count in sent.items() if name != "header"}
        assert found == {name: count for m in step if m.up for name, count in m.parts}
        assert sent["header"] == sum(m.header for m in step if m.up)


def test_what_a_listener_on_the_wire_sees():
    """Ids, every step; never a label. Both ledgers count what crosses."""
    of_edge, of_cloud = held(PLAN)
    assert isinstance(of_edge, Back)
    with serving(of_cloud) as server:
        cable = Between(server.port)
        edge = edge_end(of_edge)
        with Noting("127.0.0.1", cable.port) as link:
            with pytest.warns(UserWarning, match=r"front_on='cloud': the inputs \(token ids\) leave the edge") as seen:
                link.attach(edge)
            losses = [float(edge.step(batch_of(step))) for step in range(3)]
            edge.evaluate(batch_of(0))
            edge.bye()
        assert len(seen) == 1
        cable.close()
    assert_same(losses, of_edge, of_cloud, in_process(PLAN, steps=3))
    up, down = link.noted[::2], link.noted[1::2]
    assert [m.kind for m in up] == [*["ids", "dz"] * 3, "ids", "bye"]
    assert [m.kind for m in down] == [*["z", "done"] * 3, "z", "done"]
    frames = {(kind, tensor.dtype) for m in up for kind, tensor in m.parts}
    assert frames == {("ids", torch.int32), ("lengths", torch.uint16), ("dz", torch.float32)}
    for step, message in enumerate(m for m in up if m.kind == "ids" and not m.evaluation):
        assert message.one("ids").numpy().tobytes() in bytes(cable.crossed[0])
        assert torch.equal(message.one("ids").long(), batch_of(step).inputs["input_ids"])
    assert sum(link.ledger.sent.values()) == sum(server.ledger.received.values()) == len(cable.crossed[0])
    assert sum(link.ledger.received.values()) == sum(server.ledger.sent.values()) == len(cable.crossed[1])
    kinds = {*link.ledger.sent, *link.ledger.received}
    assert not kinds & {"labels", "logits", "dlogits", "loss"}


def test_halves_of_the_other_end_are_refused():
    for plan, due in ((PLAN, ("back", "front")), (SplitPlan(2), ("front", "back"))):
        of_edge, of_cloud = held(plan)
        with pytest.raises(ValueError, match=f"gives the edge the {due[0]}: this is the {due[1]}"):
            edge_end(of_cloud)
        with pytest.raises(ValueError, match=f"gives the cloud the {due[1]}: this is the {due[0]}"):
            CloudEnd(of_edge, "pair", RECIPE)


def ids_of(ids=None, lengths=(7, 4, 5), **more):
    ids = batch_of(0).inputs["input_ids"].int() if ids is None else ids
    parts = {"ids": ids, "lengths": torch.tensor(lengths).to(torch.uint16)} | more
    return Message("ids", 0, 1, parts=tuple((kind, tensor) for kind, tensor in parts.items() if tensor is not None))


@pytest.mark.parametrize(
    "request_,says",
    [
        (ids_of(torch.full((3, 7), small.VOCABULARY, dtype=torch.int32)), "'ids' must be 0 to 49 for this model"),
        (ids_of(torch.full((3, 7), -1, dtype=torch.int32)), "'ids' must be 0 to 49 for this model, got -1 to -1"),
        (ids_of(torch.zeros(3, 7)), "'ids' came as torch.float32"),
        (ids_of(torch.zeros(21, dtype=torch.int32)), r"'ids' cannot have the shape \[21\]"),
        (ids_of(torch.zeros(0, 7, dtype=torch.int32)), r"'ids' cannot have the shape \[0, 7\]"),
        (ids_of(torch.zeros(3, 600, dtype=torch.int32)), "step 0: "),  # more tokens than the model has places
        (ids_of(torch.zeros(1 << 12, 1 << 12, dtype=torch.int32)), "are too many"),
        (ids_of(lengths=(7, 4)), "got 3 x 7 tokens, which do not fit their lengths"),
        (ids_of(lengths=(8, 4, 5)), "got 3 x 7 tokens, which do not fit their lengths"),
        (ids_of(lengths=(7, 0, 5)), "a sample without a token"),
        (ids_of(types=torch.full((3, 7), 9, dtype=torch.uint8)), "'types' must be 0 to 1 for this model"),
        (ids_of(types=torch.zeros(3, 6, dtype=torch.uint8)), r"'types' came as torch.uint8 \[3, 6\]"),
        (Message("z", 0, 1, parts=(("z", torch.zeros(3, 7, 8)),)), "nothing waits for"),
        (Message("dz", 0, 1, parts=(("dz", torch.zeros(3, 7, 8)),)), "nothing waits for"),
    ],
)
def test_requests_that_may_not_come(request_, says):
    of_edge, of_cloud = held(PLAN)
    cloud = CloudEnd(of_cloud, "pair", RECIPE)
    cloud.hello(edge_end(of_edge).hello())
    before = parameters(of_cloud)
    with pytest.raises(SessionError, match=says):
        cloud.handle(request_)
    assert torch.equal(parameters(of_cloud), before)
    assert not cloud.training


def test_answers_that_do_not_fit():
    of_edge, of_cloud = held(PLAN)
    cloud = CloudEnd(of_cloud, "pair", RECIPE)
    cloud.hello(edge_end(of_edge).hello())
    cloud.handle(ids_of())
    with pytest.raises(SessionError, match="the other end sent 2 x 7 tokens"):
        cloud.handle(Message("dz", 0, 2, parts=(("dz", torch.zeros(2, 7, 8)),)))
    before = parameters(of_edge)
    for z in (torch.zeros(3, 8, 8), torch.zeros(2, 7, 8), torch.zeros(3, 7, 9)):
        edge = edge_end(of_edge)
        edge.open(lambda request, z=z: Message("z", 0, request.sequence, parts=(("z", z),)), {"resume": 0})
        with pytest.raises(SessionError, match="step 0: "):
            edge.step(batch_of(0))
    assert torch.equal(parameters(of_edge), before)


def test_pictures_need_their_size():
    pictures = Shape(768, 3072, 2, uses_lengths=False)
    with pytest.raises(ValueError, match="how many numbers a picture has"):
        crossings(PLAN, pictures, None, 8, 197)
    assert crossings(PLAN, replace(pictures, pixels=10), None, 8, 197)[0].parts == (("pixels", 4 * 10 * 8),)
