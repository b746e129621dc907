import pytest
import torch

from thinwire.systems.split.tasks import (
    COLUMNS,
    PACKAGES,
    Task,
    TextData,
    glue_task,
    lines_of,
    local_tokenizer,
    stdlib_task,
    trained_tokenizer,
)

FILES = {  # as gluebenchmark.com hands them out: header, or none for CoLA; two lines
    "cola": ["gj04\t1\t\tIt is here.", 'gj04\t0\t*\tHere it "is.'],
    "sst2": ["sentence\tlabel", "a fine film \t1", "a film\t0"],
    "mrpc": [
        "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String",
        "1\t7\t8\tOne is here\tHere is one",
        "0\t7\t9\tOne\tTwo",
    ],
    "qqp": [
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
        "1\t2\t3\tWhy?\tHow?\t0",
        "2\t3\t4\tWhy?\tWhy so?\t1",
    ],
    "stsb": ["index\tgenre\tsentence1\tsentence2\tscore", "0\tn\tA man\tA woman\t2.500", "1\tn\tA man\tA man\t5.000"],
    "mnli": [
        "index\tsentence1\tsentence2\tgold_label",
        "0\tIt is\tIt is not\tcontradiction",
        "1\tIt is\tIt is\tentailment",
    ],
    "qnli": ["index\tquestion\tsentence\tlabel", "0\tWho?\tHe.\tentailment", "1\tWho?\tNow.\tnot_entailment"],
    "rte": ["index\tsentence1\tsentence2\tlabel", "0\tIt is\tIt is\tentailment", "1\tIt is\tNot\tnot_entailment"],
}
LABELS = {
    "cola": [1, 0], "sst2": [1, 0], "mrpc": [1, 0], "qqp": [0, 1], "stsb": [2.5, 5.0], "mnli": [0, 2], "qnli": [0, 1],
    "rte": [0, 1],
}  # fmt: skip
TOKENIZER = trained_tokenizer(["It is here, a fine film; here is one man, who is not a woman?"] * 3, 200)


def write(folder, name, lines=None):
    for file in ("train.tsv", COLUMNS[name].held_out):
        (folder / file).write_text("\n".join(lines or FILES[name]) + "\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", FILES)
def test_glue_files(name, tmp_path):
    assert set(FILES) == set(COLUMNS)
    task = glue_task(name, write(tmp_path, name), TOKENIZER, 32)
    assert list(task.train.labels) == LABELS[name]
    assert task.classes == (3 if name == "mnli" else 1 if name == "stsb" else 2)
    pair = COLUMNS[name].second is not None
    assert (task.train.types is not None) == pair
    batch = task.train.batch([0, 1])
    assert set(batch.inputs) == ({"input_ids", "token_type_ids"} if pair else {"input_ids"})
    text = TOKENIZER.decode(task.train.tokens[0])
    assert text.startswith("[CLS]")
    assert text.count("[SEP]") == 1 + pair
    if pair:
        assert max(task.train.types[0]) == 1
    assert batch.labels.dtype == (torch.float32 if name == "stsb" else torch.int64)


def test_quotes_are_text_and_long_samples_are_cut_and_counted(tmp_path):
    task = glue_task("cola", write(tmp_path, "cola"), TOKENIZER, 32)
    assert '"' in TOKENIZER.decode(task.train.tokens[1])
    assert task.train.truncated == 0
    short = glue_task("cola", tmp_path, TOKENIZER, 5)
    assert short.train.truncated == short.held_out.truncated == 2
    assert {len(ids) for ids in short.train.tokens} == {5}
    assert short.train.tokens[0][-1] == TOKENIZER.sep_token_id


@pytest.mark.parametrize(
    "name,lines,says",
    [
        ("sst2", ["sentence\tlabel", "no label"], "line 2 does not have the columns of this task"),
        ("sst2", ["sentence\tlabel", "film\tgood"], "line 2 does not have the columns of this task"),
        ("sst2", ["text\tlabel", "film\t1"], "no column 'sentence', only text, label"),
        ("sst2", ["sentence\tlabel"], "holds no samples"),
        ("stsb", ["index\tgenre\tsentence1\tsentence2\tscore", "0\tn\ta\tb\tx"], "line 2"),
    ],
)
def test_files_of_something_else(name, lines, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        glue_task(name, write(tmp_path, name, lines), TOKENIZER)


def test_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match="does not exist: a GLUE task is a directory with train"):
        glue_task("mnli", tmp_path, TOKENIZER)
    with pytest.raises(ValueError, match="GLUE task 'wnli' is unknown"):
        glue_task("wnli", tmp_path, TOKENIZER)
    with pytest.raises(ValueError, match="does not hold a transformers tokeniser"):
        local_tokenizer(tmp_path)


def test_a_tokenizer_of_a_directory(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    assert local_tokenizer(tmp_path)("a fine film")["input_ids"] == TOKENIZER("a fine film")["input_ids"]


def test_the_standard_library_task():
    task = stdlib_task(60, 24, 500)
    assert (task.classes, task.metric) == (len(PACKAGES), "accuracy")
    assert len(task.held_out) == 6 * len(PACKAGES)
    assert len(task.train) == 54 * len(PACKAGES)
    assert max(map(len, task.train.tokens)) <= 24
    assert max(max(ids) for ids in task.held_out.tokens) < task.vocabulary <= 500
    again = stdlib_task(60, 24, 500)
    assert again.train == task.train
    assert stdlib_task(60, 24, 500, seed=1).train != task.train
    halved = stdlib_task(60, 24, 500, every=2)
    assert len(halved.held_out) == len(halved.train) == 30 * len(PACKAGES)
    with pytest.raises(ValueError, match="every=1 leaves no lines to learn from"):
        stdlib_task(60, every=1)


def test_no_line_is_of_two_packages():
    lines = lines_of()
    everything = [line for package in lines.values() for line in package]
    assert len(everything) == len(set(everything)) > 5000


def test_batches_are_padded_to_their_longest():
    data = TextData([[5, 6], [7, 8, 9], [1]], [0, 1, 2], pad=3)
    batch = data.batch([2, 0])
    assert batch.inputs["input_ids"].tolist() == [[1, 3], [5, 6]]
    assert (batch.lengths.tolist(), batch.labels.tolist(), batch.slots.tolist()) == ([1, 2], [2, 0], [2, 0])
    assert data.part([1]).batch([0]).inputs["input_ids"].tolist() == [[7, 8, 9]]


def test_metrics():
    def task(labels, metric):
        return Task("t", TextData([], []), TextData([[1]] * len(labels), labels), 2, 9, metric, "")

    logits = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    assert task([0, 1, 1, 1], "accuracy").score(logits) == 0.75
    from sklearn.metrics import matthews_corrcoef

    assert task([0, 1, 1, 1], "matthews").score(logits) == pytest.approx(matthews_corrcoef([0, 1, 1, 1], [0, 1, 0, 1]))
    numbers = torch.tensor([[0.1], [0.5], [0.4], [9.0]])
    assert task([1.0, 2.0, 3.0, 4.0], "spearman").score(numbers) == pytest.approx(0.8)  # 1 - 6 * 2 / (4 * 15)
