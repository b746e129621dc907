"""The sentences of "Local steps: what they cost" are those of the recorded whole runs."""

import statistics

import run_tables


def test_the_pages_sentences_are_those_of_its_tables():
    """The steps factors that the text names, from the record."""
    found = {run_tables.kind(one): one for one in run_tables.whole()}
    assert tuple(found) == run_tables.KINDS

    def percent(kind, methods):
        return round(100 * (statistics.median(found[kind]["rows"][methods]["factors"]) - 1))

    every4, bit = "local sync_every=4 codec=int2", "local sync_every=4 codec=int1 look=0.5"
    assert [percent("usual", row) for row in (every4, "alone", "accumulate every=4")] == [2, 87, 56]
    every16, late = "local sync_every=16 codec=int2", "local sync_every=8 codec=int2 fragment_sync_delay=3"
    every8 = "local sync_every=8 codec=int2"
    assert [percent("larger", row) for row in (every4, every8, every16, late)] == [5, 5, 19, 21]
    assert [percent("largest", row) for row in (every4, every8, every16)] == [6, 19, 28]
    assert [round(100 * (factor - 1)) for factor in found["larger"]["rows"][bit]["factors"]] == [-2, 6]
    assert [percent("short", row) for row in ("local sync_every=16 codec=int2",)] == [13]
    assert [percent("usual", row) for row in (every16, late)] == [29, 31]
    assert percent("usual", "cast dtype=int4") <= 0
    assert [percent("usual", row) for row in ("acp rank=32", "powersgd rank=4")] == [22, 52]
    assert [percent("workers", row) for row in ("cast dtype=int8", "cast dtype=int4", "acp rank=32")] == [2, 11, 31]
    assert [percent("workers", row) for row in (every4, "powersgd rank=4")] == [23, 70]
    for bits, looking in (("4 codec=int4", 3), ("2 codec=int2", 4), ("4 codec=int2", 12)):
        assert percent("workers", f"local sync_every={bits} look=0.5") == looking
    assert percent("workers", "local sync_every=4 codec=int4") == 16
    each = [percent(kind, "local sync_every=1 codec=int4") for kind in ("workers", "eight", "sixteen")]
    assert each == [7, 9, 33]
    assert [percent(kind, every4) for kind in ("muon", "muon4")] == [-2, 24]
    eight = found["eight"]["rows"]
    theirs, ours = "diloco sync_every=32", every4
    assert round(eight[theirs]["factors"][0] / eight[ours]["factors"][0], 1) == 2.0
    sent = [run_tables.sent(eight[row]["methods"]) for row in (theirs, ours)]
    assert round(sent[0] / sent[1], 1) == 1.9
    streaming = "diloco sync_every=8 codec=int4 fragments=4 fragment_sync_delay=2 fragment_update_alpha=0.5"
    assert percent("eight", streaming) == 95
    sent = [run_tables.sent(eight[row]["methods"]) for row in (streaming, ours)]
    assert round(sent[0] / sent[1], 1) == 1.0
    for row in ("local_variants:sparse_loco", "local_variants:demo"):
        assert run_tables.finals(found["eight"], row) >= run_tables.finals(found["eight"], "alone")
    rare, theirs = "local sync_every=32 codec=int2", "diloco sync_every=32 codec=int2"
    of_muon = [run_tables.finals(found["muon8"], row) for row in (rare, theirs)]
    assert abs(of_muon[0] - run_tables.finals(found["eight"], ours)) < 0.015
    assert of_muon[0] < of_muon[1]
    sent = [run_tables.sent(text) for text in ("local:sync_every=4:codec=int2", "local:sync_every=32:codec=int2")]
    assert round(sent[0] / sent[1]) == 8
    assert percent("sixteen", every4) == 104
    assert percent("eight", every4) == 33


def test_what_a_row_sends():
    shares = {
        "ddp": 1.0,
        "alone": 0.0,
        "accumulate:every=4": 1 / 4,
        "ssgd:look=0.5": 1.0,
        "local:sync_every=4:codec=int2": 2.125 / 32 / 4,
        "local:sync_every=8:codec=int1:look=0.5": 1.125 / 32 / 8,
        "diloco:sync_every=32": 1 / 32,
    }
    assert {methods: run_tables.sent(methods) for methods in shares} == shares
    assert run_tables.named("local:sync_every=8:codec=int1:look=0.5") == "local, every 8 in 1 bit, look 0.5"
