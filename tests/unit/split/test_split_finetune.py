"""Files, the loop over the data, the comparison with the unsplit model."""

import json

import pytest
import split_models as small
import torch
from safetensors.torch import load_file
from split_ends import parameters

from thinwire.systems.split import (
    Back,
    Front,
    Link,
    LocalPair,
    Recipe,
    SplitPlan,
    compare,
    load_half,
    prepare,
    split_finetune,
    split_model,
)
from thinwire.systems.split.finetune import train, train_unsplit
from thinwire.systems.split.models import preset, pretrained
from thinwire.systems.split.surgery import by_role
from thinwire.systems.split.tasks import Task, TextData


def toy_task(samples=160, held_out=40, seed=0):
    """Which of three tokens comes most often?"""
    draw = torch.Generator().manual_seed(seed)
    tokens, labels = [], []
    for _ in range(samples + held_out):
        ids = torch.randint(1, 4, (int(torch.randint(3, 8, (1,), generator=draw)),), generator=draw)
        tokens.append([4, *ids.tolist()])
        labels.append(int(torch.bincount(ids, minlength=4)[1:].argmax()))
    parts = [TextData(tokens[a:b], labels[a:b]) for a, b in ((0, samples), (samples, samples + held_out))]
    return Task("toy", *parts, 3, 5, "accuracy", "toy")


def toy_model(seed=0, dropout=0.0):
    return preset("bert", classes=3, vocabulary=5, length=16, seed=seed, layers=2, hidden=32, heads=4, dropout=dropout)


RECIPE = Recipe(learning_rate=3e-3, epochs=1, batch_size=16)
CUTS = [
    SplitPlan(2),
    SplitPlan(1, "boundary"),
    SplitPlan(3, "ffn"),
    SplitPlan(2, residual="keep"),
    SplitPlan(2, "principal", 5),
    SplitPlan(2, front_on="cloud"),
    SplitPlan(2, rank=3, residual="keep", front_on="cloud"),
]


@pytest.mark.parametrize("architecture, plan", zip(small.ARCHITECTURES, CUTS))
def test_each_half_comes_back_from_its_own_file(architecture, plan, tmp_path):
    whole = small.model(architecture).eval()
    batch = small.batch(architecture)
    samples = [(batch.inputs, batch.lengths)]
    halves = [half.eval() for half in split_model(whole, plan, samples)]
    pair = prepare(whole, plan, tmp_path, samples, notes={"task": "none"})
    loaded = [load_half(tmp_path, role) for role in ("edge", "cloud")]
    assert {half.pair for half in loaded} == {pair}
    assert all((half.plan, half.notes) == (plan, {"task": "none"}) for half in loaded)
    assert [isinstance(half.module, Front) for half in loaded] == [plan.front_on == role for role in ("edge", "cloud")]
    front, back = sorted((half.module.eval() for half in loaded), key=lambda half: isinstance(half, Back))
    z = front(batch.inputs, batch.lengths)
    expected = halves[0](batch.inputs, batch.lengths)
    torch.testing.assert_close(z, expected, rtol=1e-4, atol=1e-4)  # two decompositions differ in their last bits
    torch.testing.assert_close(back(z, batch.lengths), halves[1](expected, batch.lengths), rtol=1e-4, atol=1e-4)
    for role, half in by_role(*halves).items():
        numbers = sum(tensor.numel() for tensor in load_file(tmp_path / f"{role}.safetensors").values())
        assert numbers == sum(tensor.numel() for tensor in (*half.parameters(), *half.buffers()))


def test_another_surgery_is_another_pair(tmp_path):
    made = ((0, 8), (1, 8), (0, 4))
    pairs = [prepare(small.model(seed=seed), SplitPlan(2, rank=rank), tmp_path) for seed, rank in made]
    assert len(set(pairs)) == 3
    cuts = [prepare(small.model(), SplitPlan(2, "boundary"), tmp_path) for _ in range(2)]
    assert cuts[0] == cuts[1]


def test_files_that_are_no_halves(tmp_path):
    (tmp_path / "edge.safetensors").write_bytes(b"nothing")
    for path in (tmp_path, tmp_path / "nowhere.safetensors"):
        with pytest.raises(ValueError, match="is not a half of a model"):
            load_half(path, "edge")
    prepare(small.model(), SplitPlan(2), tmp_path)
    with pytest.raises(ValueError, match="is the half of the edge, not of the cloud"):
        load_half(tmp_path / "edge.safetensors", "cloud")


def test_it_learns_about_as_well_as_the_unsplit_model():
    plan = SplitPlan(1, up=("int8", "pack"), down=("int8", "pack"))
    task, model = toy_task(), toy_model()
    seen = []
    recipe = Recipe(learning_rate=5e-3, epochs=5, batch_size=16)
    report = split_finetune(plan, model, task, recipe=recipe, baseline=True, on_step=lambda *words: seen.append(words))
    assert report.steps == recipe.steps(160) == len(report.losses) == len(seen)
    assert sum(report.losses[-5:]) < 0.7 * sum(report.losses[:5])
    assert report.score > 0.7
    assert abs(report.score - report.baseline_score) < 0.2
    assert report.tokens == 5 * sum(map(len, task.train.tokens))
    assert report.training.messages["z"] == report.steps
    assert report.evaluation.messages == {"z": 3, "logits": 3}
    json.dumps(report.to_data())


def test_the_boundary_split_trains_like_the_unsplit_model_step_by_step():
    task, model = toy_task(48, 16), toy_model()
    recipe = Recipe(learning_rate=3e-3, epochs=2, batch_size=16)
    losses = []
    train_unsplit(model, task, recipe, lambda step, total, loss: losses.append(loss))
    report = split_finetune(SplitPlan(1, "boundary"), model, task, recipe=recipe)
    assert report.losses == pytest.approx(losses, rel=1e-5)


def test_a_training_that_was_stopped_goes_on(tmp_path):
    task = toy_task(48, 8)
    recipe = Recipe(learning_rate=3e-3, epochs=2, batch_size=16)

    class Stop(Exception):
        pass

    def stop(step, total, loss):
        if step == 4:
            raise Stop

    again = {"recipe": recipe, "checkpoint_dir": tmp_path, "checkpoint_every": 3}
    whole = split_finetune(SplitPlan(1, "boundary"), toy_model(dropout=0.1), task, recipe=recipe)
    with pytest.raises(Stop):
        split_finetune(SplitPlan(1, "boundary"), toy_model(dropout=0.1), task, **again, on_step=stop)
    rest = split_finetune(SplitPlan(1, "boundary"), toy_model(dropout=0.1), task, **again)
    assert rest.steps == 3
    assert rest.losses == whole.losses[3:]
    assert torch.equal(parameters(*rest.half), parameters(*whole.half))


def test_compare_rows():
    task = toy_task(64, 32)
    plans = {"boundary": SplitPlan(1, "boundary"), "thin": SplitPlan(1, rank=4, up=("int8",), down=("int8",))}
    names = []
    noted = lambda name, seed: names.append((name, seed))  # noqa: E731
    rows = compare(toy_model, task, plans, RECIPE, Link(1e7, 1e7), seeds=(0, 1), on_row=noted)
    assert [row.name for row in rows] == ["unsplit", "boundary", "thin"]
    assert len(names) == 6
    assert all(len(row.scores) == 2 and 0 <= row.score <= 1 for row in rows)
    unsplit, boundary, thin = rows
    assert unsplit.wire_bytes is None
    assert boundary.state_bytes / thin.state_bytes == pytest.approx(4 * 32 / (4 + 2))
    assert boundary.wire_bytes > thin.wire_bytes > thin.state_bytes
    assert boundary.step_seconds > boundary.compute_seconds > 0


@pytest.mark.parametrize(
    "words,says",
    [
        ({"plan": None}, "role='local' needs a plan"),
        ({"task": None}, "role='local' needs a plan"),
        ({"halves": "x.safetensors"}, "role='local' needs a plan"),
        ({"role": "edge"}, "takes a file that split.prepare wrote"),
    ],
)
def test_arguments_that_do_not_fit(words, says):
    given = {"plan": SplitPlan(1), "halves": toy_model(), "task": toy_task(8, 8)} | words
    with pytest.raises(ValueError, match=says):
        split_finetune(given.pop("plan"), given.pop("halves"), given.pop("task"), **given)


def test_roles_and_their_data(tmp_path):
    prepare(toy_model(), SplitPlan(1), tmp_path)
    for role, task in (("edge", None), ("cloud", toy_task(8, 8)), ("middle", None)):
        with pytest.raises(ValueError, match=f"role='{role}': use local, edge"):
            split_finetune(None, tmp_path, task, role=role)


def test_an_edge_whose_steps_are_done_only_evaluates():
    task = toy_task(16, 8)
    recipe = Recipe(epochs=1, batch_size=16)
    pair = LocalPair(*split_model(toy_model(), SplitPlan(1)), recipe, 1)
    assert train(pair, task, pair.ledger, 0, None).steps == 1
    again = train(pair, task, pair.ledger, 0, None)
    assert (again.steps, again.losses) == (0, [])
    assert again.score is not None


def test_presets_and_directories(tmp_path):
    model = preset("bert-base", classes=2, vocabulary=10, length=8, layers=1)
    assert (model.config.hidden_size, model.config.intermediate_size, model.config.num_hidden_layers) == (768, 3072, 1)
    for name in ("roberta", "distilbert", "gpt2", "vit"):
        assert preset(name, classes=2, vocabulary=10, length=8, layers=1, hidden=8, heads=2) is not None
    for name, more in (("bart", {}), ("bert-huge", {}), ("bert", {"hidden": 10, "heads": 3})):
        with pytest.raises(ValueError, match=r"unknown|multiple of heads"):
            preset(name, classes=2, vocabulary=10, **more)
    small_one = toy_model()
    small_one.save_pretrained(tmp_path)
    loaded = pretrained(tmp_path, 7)
    assert loaded.config.num_labels == 7
    assert torch.equal(loaded.bert.embeddings.word_embeddings.weight, small_one.bert.embeddings.word_embeddings.weight)
    heads = [pretrained(tmp_path, 7, seed).classifier.weight for seed in (1, 1, 2)]
    assert torch.equal(heads[0], heads[1])  # seeds of a comparison begin alike, whatever was drawn before
    assert not torch.equal(heads[0], heads[2])
    with pytest.raises(ValueError, match="does not hold a transformers model"):
        pretrained(tmp_path / "nowhere", 2)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(ValueError, match="holds a t5, which cannot be split"):
        pretrained(tmp_path, 2)
