import pytest
import report_files as results

import thinwire as tw
from thinwire.core.pricing.costs import Costs
from thinwire.core.program import Topology
from thinwire.predict.timeline import Event, simulate
from thinwire.predict.timeline.result import to_chrome_trace
from thinwire.tools.report.inputs import read_files
from thinwire.tools.report.traces import joined, outermost, read_trace


def test_a_simulated_step_comes_back():
    timeline = results.timeline()
    found = read_trace("a.json", results.trace())
    assert found.predicted
    assert (found.rank, found.ranks) == (0, 1)
    assert found.step_seconds == pytest.approx(timeline.step_seconds)
    assert found.exposed == pytest.approx(timeline.exposed_seconds)
    assert found.bytes_by_bucket == dict.fromkeys(range(6), 2400000)
    assert len(found.events) == len([e for e in timeline.events if e.duration_seconds])


def test_predicted_stands_above_measured_whatever_else_the_label_says(tmp_path):
    paths = results.write(tmp_path, a=results.trace("measured", 1.1), b=results.trace("predicted, acp:rank=4"))
    found = read_files(paths).traces
    assert [(x.name, x.label, x.predicted, x.rank) for x in found] == [
        ("b.json", "predicted, acp:rank=4", True, 0),
        ("a.json", "measured", False, 0),
    ]


def test_neighbours_of_one_bucket_are_one_bar():
    events = [
        Event("forward a", "compute", 0.0, 1.0),
        Event("forward b", "compute", 1.0, 1.0),
        Event("backward b", "compute", 2.0, 1.0, 0),
        Event("backward a", "compute", 3.0, 1.0, 1),
        Event("AllReduce", "link world", 3.0, 0.5, 0, 10),
        Event("AllReduce", "link world", 3.5, 0.5, 0, 10),
        Event("optimizer", "compute", 9.0, 1.0),
    ]
    bars = joined(events, 0.01)
    assert [(e.name, e.duration_seconds) for e in bars if e.lane == "compute"] == [
        ("forward", 2.0),
        ("backward b", 1.0),
        ("backward a", 1.0),
        ("optimizer", 1.0),
    ]
    assert len(bars) == 6  # exchanges stay as they are


def test_what_lies_within_another_event_is_left_out():
    events = [Event("b", "x", 0.1, 0.2), Event("a", "x", 0.0, 1.0), Event("c", "y", 0.1, 0.2), Event("d", "x", 0.5, 1)]
    assert [event.name for event in outermost(events)] == ["a", "c", "d"]


def span(name, start, length, thread=1, **more):
    return {"ph": "X", "name": name, "pid": 77, "tid": thread, "ts": 5e6 + start, "dur": length, **more}


def test_a_profilers_trace_is_cut_to_its_last_step_and_our_ranges():
    events = [span("ProfilerStep#0", 0, 100), span("ProfilerStep#1", 100, 100), span("aten::mm", 100, 90)]
    for start in (0, 100):
        events += [
            span("thinwire::backward::0", start, 40),
            span("thinwire::all_reduce::0", start + 40, 30, thread=2, args={"bytes": 12}),
            span("thinwire::project::0", start + 30, 10, thread=3),
        ]
    found = read_trace("t.json", {"traceEvents": events})
    assert not found.predicted
    assert found.rank is None
    assert [(e.name, e.lane, e.bucket) for e in found.events] == [
        ("backward", "compute", 0),
        ("project", "method", 0),
        ("all_reduce", "link world", 0),
    ]
    assert found.step_seconds == pytest.approx(70e-6)
    assert found.exposed == pytest.approx(30e-6)
    assert found.bytes_by_bucket == {0: 12}


def test_a_trace_of_others_keeps_its_threads():
    named = {"ph": "M", "name": "thread_name", "pid": 77, "tid": 1, "args": {"name": "python"}}
    endless = span("a", 0, 10, args={"bytes": float("inf")})  # no count
    found = read_trace("t.json", [named, endless, span("b", 2, 3, thread=9), {"ph": "i", "name": "c"}])
    assert [(e.name, e.lane) for e in found.events] == [("a", "python"), ("b", "thread 9")]
    assert found.exposed is None
    assert [event.bytes for event in found.events] == [0, 0]
    assert found.bytes_by_bucket == {}


def test_one_rank_of_several():
    events = [span("a", 0, 10), {**span("b", 0, 10), "pid": 3}]
    named = {"ph": "M", "name": "process_name", "pid": 3, "tid": 0, "args": {"name": "measured, rank 3"}}
    found = read_trace("t.json", [named, *events])
    assert [event.name for event in found.events] == ["b"]
    assert (found.rank, found.ranks, found.label) == (3, 2, "measured")


def test_of_a_method_with_two_phases_the_first_step_is_shown():
    profile = results.six()
    timeline = simulate(tw.ACP(rank=2), profile, Topology(4), Costs.of_link(1e9, 1e-4, 4))
    found = read_trace("t.json", to_chrome_trace(timeline.events))
    assert found.steps == 2
    assert found.step_seconds < 0.6 * max(event.end_seconds for event in timeline.events)
    assert 0 < sum(found.bytes_by_bucket.values()) < 2 * timeline.bytes_sent
    assert sum(event.name.startswith("backward") for event in found.events) == len(profile.tensors)
    assert read_trace("t.json", results.trace()).steps == 1
