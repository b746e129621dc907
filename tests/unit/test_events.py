"""Lines that ranks write for whoever started them, among all that their libraries print."""

import pytest

from thinwire.core.events import LastWords, event_in, tell_event


def test_an_event_comes_back_and_what_was_printed_into_its_line_stays(capsys):
    tell_event({"step": 3, "row": "a @@{ b"})
    line = capsys.readouterr().out
    assert line.endswith("\n")
    assert event_in(line.strip()) == ({"step": 3, "row": "a @@{ b"}, "")
    assert event_in(line.strip() + "WARNING: late") == ({"step": 3, "row": "a @@{ b"}, "WARNING: late")


@pytest.mark.parametrize("line", ["", "loss 2.3", '@@{"step": 3, "ro', "@@ {}", ' @@{"step": 3}'])
def test_what_is_no_whole_event_is_text(line):
    assert event_in(line) == (None, line)


def test_last_words_are_the_last_of_what_is_no_event():
    heard = []
    words = LastWords(lambda rank, event: heard.append((rank, event)))
    for number in range(40):
        words(number % 2, f"line {number}  ")
        words(1, f'@@{{"step": {number}}}')
        words(0, " ")
    assert heard == [(1, {"step": number}) for number in range(40)]
    said = words.after("the ranks ended with exit code 3").splitlines()
    assert said[0] == "the ranks ended with exit code 3; last output:"
    assert said[1:] == [f"[{number % 2}] line {number}" for number in range(25, 40)]
