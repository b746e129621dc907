from collections import Counter

import pytest
import report_files as results

from thinwire.core.records import plain
from thinwire.predict.choose import Entry, Map, Ranking
from thinwire.predict.choose.grid import Cell
from thinwire.tools.bench.summary import BenchResult
from thinwire.tools.report.inputs import Bench, Planned, read_files
from thinwire.tools.report.traces import StepTrace


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
    kinds = Counter(type(getattr(result, "found", result)) for result in inputs.results)
    assert kinds == {Map: 1, Ranking: 1, BenchResult: 2, StepTrace: 2}
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
        (
            '{"entries": [{"label": "acp"}], "answer": "acp", "best": "acp", "best_exact": "acp"}',
            "the field model is missing",
        ),
        ('{"entries": [], "answer": "acp"}', "looks like a ranking .* cannot be read: 'acp'"),
        ('{"cells": [[]], "bits_per_second": [1e8], "workers": [2]}', "a row for each of bits_per_second"),
        ('{"cells": [[{"step_seconds": 1}]], "bits_per_second": [1e8], "workers": [2]}', "the field winner is missing"),
        ('{"traceEvents": [{"ph": "X", "name": "a", "ts": "b", "dur": 1}]}', "'ts' is not a number"),
        ('{"traceEvents": [{"ph": "M", "args": [1]}]}', "'args' is not a JSON object"),
        ('{"cells": [], "bits_per_second": [1' + "0" * 400 + '], "workers": []}', "looks like a map"),
        ('{"picture": {"title": "a", "panels": []}}', "'panels' is empty"),
        ('{"kind": "run"}\n{"kind": "step", "step": 1, "values": 3}', "'values' of step 1 is not a JSON object"),
        ('{"settings": {}}\n{"at": 1, "version": 1, "parts": [[Infinity, 0, 0, 0, []]]}', "looks like a journal"),
        ('{"kind": "run"}\n{"kind": "step"}\n', "cannot be read: it is not in the format"),
        ('{"bench": 3, "curves": {}}', "3 is not the fields of a BenchResult"),
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
    (found,) = read_files(results.write(tmp_path, a=data)).of(Bench)
    (point,) = found.curves["ddp"]  # the first has no training loss
    assert (point.step, point.judged, point.validation) == (3, 2.0, None)


def test_what_plan_writes_holds_both_and_the_question(tmp_path):
    entries = [
        Entry("ssgd", "ssgd", {}, True, True, 0.5, 0.4, 0.6, 0.1, 100, "compute", 1, 1.0, 1.0, "exact", 1.0, 0.25)
    ]
    ranking = Ranking(
        "net", 2, tuple(entries), entries[0], entries[0], entries[0], "stay with ssgd", (("acp", "no price"),)
    )
    cell = Cell("ssgd", "ssgd", 0.5, 0.5, 0.5, 0.5, "compute bounds it")
    question = {"device": "cpu", "bits_per_second": 1e9, "latency_seconds": 5e-5, "network": "assumed"}
    answer = {"question": question, "ranking": ranking.to_data(), "map": plain(Map((1e9,), (2,), ((cell,),)))}
    inputs = read_files(results.write(tmp_path, a=answer))
    ranked, found = inputs.of(Planned)
    assert ranked.found == ranking
    assert ranked.facts.startswith(
        "device: cpu; link: 1 Gbit/s; latency: 50 us; network: assumed; model: net; workers: 2"
    )
    assert ranked.facts.endswith("measured share: 25%")
    assert found.found.cells[0][0].why == "compute bounds it"
