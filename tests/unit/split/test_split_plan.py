import json

import pytest

from thinwire.systems.split import Recipe, SplitPlan


@pytest.mark.parametrize(
    "plan,width",
    [
        (SplitPlan(1), 8),
        (SplitPlan(1, kind="ffn"), 3072),
        (SplitPlan(1, kind="boundary"), 768),
        (SplitPlan(1, rank=4, residual="keep"), 772),
        (SplitPlan(1, rank=4, residual="lowrank:12"), 16),
        (SplitPlan(1, kind="ffn", residual="keep"), 3840),
    ],
)
def test_width_and_json(plan, width):
    assert plan.width(768, 3072) == width
    again = SplitPlan.from_json(plan.to_json())
    assert again == plan
    assert again.hash == plan.hash


def test_what_crosses_which_way_follows_the_front():
    here, there = SplitPlan(1, up=("delta:4", "pack")), SplitPlan(1, down=("delta:4", "pack"), front_on="cloud")
    assert [here.carries("up"), here.carries("down")] == ["activation", "gradient"]
    assert [there.carries("up"), there.carries("down")] == ["gradient", "activation"]
    assert (here.chain("up").needs_slots, there.chain("down").needs_slots) == (True, True)
    assert here.leaves is None
    assert "token ids" in there.leaves
    assert "labels" in SplitPlan(1, labels="cloud").leaves


def test_hash_tells_plans_apart():
    plans = [SplitPlan(1), SplitPlan(2), SplitPlan(1, rank=4), SplitPlan(1, up=("int8",)), SplitPlan(1, down=("int8",))]
    plans.append(SplitPlan(1, front_on="cloud"))
    assert len({plan.hash for plan in plans}) == len(plans)
    assert Recipe().hash != Recipe(seed=1).hash


@pytest.mark.parametrize(
    "words,says",
    [
        ({"kind": "middle"}, "kind='middle' is unknown"),
        ({"cut": 0}, "cut=0 must be a whole number"),
        ({"rank": True}, "rank=True must be"),
        ({"residual": "lowrank:0"}, "use drop, keep or a rank such as lowrank:4"),
        ({"residual": "lowrank:x"}, "use drop, keep or a rank such as lowrank:4"),
        ({"residual": "most"}, "use drop, keep or a rank such as lowrank:4"),
        ({"kind": "boundary", "residual": "keep"}, "leave residual out"),
        ({"kind": "ffn", "init": "activation"}, "kind='lowrank'"),
        ({"labels": "both"}, "labels='both' is unknown"),
        ({"up": ("int3",)}, "up: codec 'int3' is unknown"),
        ({"up": ("pack", "int8")}, "use one value codec, then pack"),
        ({"up": ("int8", "fp16")}, "use one value codec"),
        ({"down": ("delta:4", "pack")}, "delta is for activations"),
        ({"up": ("delta:4",)}, "use delta:4,pack"),
        ({"front_on": "both"}, "front_on='both' is unknown"),
        ({"front_on": "cloud", "labels": "cloud"}, "cannot be used with front_on='cloud'"),
        ({"front_on": "cloud", "up": ("delta:4", "pack")}, "up: delta is for activations"),
        ({"front_on": "cloud", "down": ("delta:4",)}, "use delta:4,pack"),
    ],
)
def test_what_is_no_plan(words, says):
    with pytest.raises(ValueError, match=says):
        SplitPlan(**{"cut": 1, **words})


@pytest.mark.parametrize("text", ['{"cut": 1, "colour": "red"}', "[1]", '"x"', "{"])
def test_json_of_something_else(text):
    with pytest.raises(ValueError, match="not a split plan"):
        SplitPlan.from_json(text)


@pytest.mark.parametrize(
    "words", [{"learning_rate": -1.0}, {"epochs": 0}, {"warmup": 1.0}, {"loss": "hinge"}, {"eps": float("nan")}]
)
def test_what_is_no_recipe(words):
    with pytest.raises(ValueError, match=next(iter(words))):
        Recipe(**words)


def test_recipe_covers_every_sample_once_an_epoch_in_another_order():
    recipe = Recipe(batch_size=4, epochs=2)
    orders = [recipe.batches(10, epoch) for epoch in range(2)]
    assert [len(batch) for batch in orders[0]] == [4, 4, 2]
    assert all(sorted(i for batch in order for i in batch) == list(range(10)) for order in orders)
    assert orders[0] != orders[1]
    assert recipe.steps(10) == 6
    assert json.loads(recipe.to_json())["batch_size"] == 4


def test_rate_rises_and_falls_to_nothing():
    import torch

    recipe = Recipe(learning_rate=1.0, warmup=0.2)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    rates = []
    for step in range(10):
        recipe.set_rate(optimizer, step, 10)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[-1] == pytest.approx(1 / 8)
    assert rates[2:] == sorted(rates[2:], reverse=True)
