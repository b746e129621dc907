"""A run of the bench as it is heard: events of ranks, and whatever else their libraries print."""

from types import SimpleNamespace

import pytest

from thinwire.tools.bench.rows import parse_rows
from thinwire.tools.bench.session import BenchError, BenchSpec, run_session

SPEC = BenchSpec(model="mlp", rows=parse_rows("ddp"), workers=1, steps=1)


def test_what_a_library_prints_into_the_line_of_an_event_ends_no_run():
    lines = [
        '@@{"state": "building", "row": "ddp"}',
        '@@{"state": "step", "row": "ddp"}2026-11-26 INFO a quorum was formed',
        "@@ is how a word of somebody else's begins",
        '@@"words"',
        "RuntimeError: the last word",
    ]

    def launch(command, *, on_line, timeout_seconds):
        for line in lines:
            on_line(0, line)
        return SimpleNamespace(exit_code=1, emulated=False, note="")

    events = []
    with pytest.raises(BenchError) as error:
        run_session(SPEC, launch, events.append)
    assert [event["state"] for event in events] == ["building", "step"]
    said = str(error.value)
    assert "[0] 2026-11-26 INFO a quorum was formed" in said
    assert "[0] @@ is how a word" in said
    assert said.endswith("[0] RuntimeError: the last word")


def test_a_model_that_a_rank_cannot_build_is_one_sentence():
    def launch(command, *, on_line, timeout_seconds):
        on_line(1, '@@{"refused": "width=65 is not a multiple of heads=6"}')
        on_line(1, "Traceback of what came after")
        return SimpleNamespace(exit_code=1, emulated=False, note="")

    with pytest.raises(BenchError, match=r"^width=65 is not a multiple of heads=6$"):
        run_session(SPEC, launch)
