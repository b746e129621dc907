import json

import pytest
import report_files as results

from thinwire.core.records import plain
from thinwire.predict.choose import Entry, Map, Ranking
from thinwire.predict.choose.grid import Cell
from thinwire.tools.report import read_files


def test_kinds_are_told_by_content(tmp_path):
    data = {
        "a": results.winners(),
        "b": results.ranking(),
        "c": results.bench(),
        "d": results.demo(),
        "e": results.trace(),
        "f": results.trace("measured")["traceEvents"],
    }
    inputs = read_files(results.write(tmp_path, **data))
    counts = len(inputs.maps), len(inputs.rankings), len(inputs.benches), len(inputs.traces)
    assert counts == (1, 1, 2, 2)
    assert [source.name for source in inputs.sources] == [f"{name}.json" for name in data]
    assert all(source.written for source in inputs.sources)


@pytest.mark.parametrize(
    "text,says",
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "nothing that a report can show"),
        ('{"rows": []}', "nothing that a report can show"),
        ("3", "nothing that a report can show"),
        ('{"entries": [3]}', "looks like a ranking"),
        ('{"entries": [{"label": "acp"}]}', "'step_seconds' is not a number"),
        ('{"entries": [{"label": 3, "step_seconds": 1}]}', "'label' is not text"),
        ('{"cells": [[]], "bits_per_second": [1e8], "workers": [2]}', "1 rows"),
        ('{"cells": [[{"step_seconds": 1}]], "bits_per_second": [1e8], "workers": [2]}', "no 'winner'"),
        ('{"traceEvents": [{"ph": "X", "name": "a", "ts": "b", "dur": 1}]}', "'ts' is not a number"),
        ('{"traceEvents": [{"ph": "M", "args": [1]}]}', "'args' is not a JSON object"),
        ('{"entries": [{"label": "acp", "step_seconds": 1' + "0" * 400 + "}]}", "'step_seconds' is not a number"),
        ('{"picture": {"title": "a", "panels": []}}', "'panels' is empty"),
        ('{"kind": "run"}\n{"kind": "step", "step": 1, "values": 3}', "'values' of step 1 is not a JSON object"),
        ('{"settings": {}}\n{"at": 1, "version": 1, "parts": [[Infinity, 0, 0, 0, []]]}', "looks like a journal"),
        ('{"kind": "run"}\n{"kind": "step"}\n', "cannot be read: it is not in the format"),
        ('{"bench": 3, "curves": {}}', "'bench' is not a JSON object"),
    ],
)
def test_what_is_unknown_or_broken_is_one_sentence(text, says, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=says) as caught:
        read_files([path])
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_text(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(ValueError, match="is not JSON"):
        read_files([path])


def test_training_loss_where_nothing_was_held_out(tmp_path):
    data = results.demo()
    for curve in data["curves"].values():
        for point in curve:
            point["validation"] = None
    (found,) = read_files(results.write(tmp_path, a=data)).benches
    assert not found.curves[0].held_out
    assert (found.curves[0].steps, found.curves[0].losses) == ((3.0,), (2.0,))  # the first point has no training loss


def test_map_is_sorted_along_both_axes(tmp_path):
    data = results.winners()
    data["bits_per_second"].reverse()
    data["workers"].reverse()
    (found,) = read_files(results.write(tmp_path, a=data)).maps
    assert (found.bits_per_second, found.workers) == ((1e8, 1e10), (2, 16))
    assert found.cells[0][0] is None
    assert found.cells[1][1].winner == "acp rank=4"
    assert found.facts == "model: bert-base"
    assert found.cells[1][0].factor == pytest.approx(16)


def test_a_band_that_is_missing_is_the_step_itself(tmp_path):
    data = results.ranking()
    data["entries"][0] = {"label": "ssgd", "exact": True, "step_seconds": 1, "low_seconds": None}
    (found,) = read_files(results.write(tmp_path, a=json.loads(json.dumps(data)))).rankings
    assert (found.entries[0].low_seconds, found.entries[0].high_seconds, found.entries[0].bound_by) == (1.0, 1.0, "")


def test_what_plan_writes_holds_both_and_the_question(tmp_path):
    entries = [
        Entry("ssgd", "ssgd", {}, True, True, 0.5, 0.4, 0.6, 0.1, 100, "compute", 1, 1.0, 1.0, "exact", 1.0, 0.25)
    ]
    ranking = Ranking("net", 2, tuple(entries), entries[0], entries[0], "stay with ssgd", (("acp", "no price"),))
    cell = Cell("ssgd", "ssgd", 0.5, 0.5, 0.5, "compute bounds it")
    question = {"device": "cpu", "bits_per_second": 1e9, "latency_seconds": 5e-5, "network": "assumed"}
    answer = {"question": question, "ranking": ranking.to_data(), "map": plain(Map((1e9,), (2,), ((cell,),)))}
    inputs = read_files(results.write(tmp_path, a=answer))
    (ranked,), (found,) = inputs.rankings, inputs.maps
    assert ranked.sentence == "stay with ssgd"
    assert ranked.left_out == ("acp: no price",)
    assert ranked.facts.startswith(
        "device: cpu; link: 1 Gbit/s; latency: 50 us; network: assumed; model: net; workers: 2"
    )
    assert ranked.facts.endswith("measured share: 25%")
    assert found.cells[0][0].why == "compute bounds it"
