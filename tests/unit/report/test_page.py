import re
from html.parser import HTMLParser

import pytest
import report_files as results

from thinwire.tools.report.inputs import read_files
from thinwire.tools.report.page import render

NASTY = '<script>alert("x")</script><img src=http://evil/a.png> & %{x}'


class Reader(HTMLParser):
    """Sections, attributes that load something, and the texts outside scripts and styles."""

    def __init__(self, page):
        super().__init__()
        self.sections, self.loads, self.tags, self.texts = [], [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        found = dict(attrs)
        if tag == "section":
            self.sections.append(found["id"])
        self.loads += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]

    def handle_data(self, data):
        if self.tags[-1:] not in (["script"], ["style"]):
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(self.texts)


def page_of(folder, **data):
    return render(read_files(results.write(folder, **data)))


@pytest.mark.parametrize(
    "data,sections",
    [
        ({"a": results.winners()}, ["map"]),
        ({"a": results.ranking()}, ["ranking"]),
        ({"a": results.bench()}, ["bench"]),
        ({"a": results.demo()}, ["bench", "loss"]),
        ({"a": results.trace()}, ["timeline", "buckets"]),
        ({"a": {"map": results.winners(), "ranking": results.ranking()}}, ["map", "ranking"]),
        (
            {"a": results.trace("measured"), "b": results.demo(), "c": results.winners(), "d": results.ranking()},
            ["map", "ranking", "bench", "timeline", "buckets", "loss"],
        ),
    ],
)
def test_sections_of_what_there_is(data, sections, tmp_path):
    page = page_of(tmp_path, **data)
    read = Reader(page)
    assert read.sections == [*sections, "sources"]
    assert all(value.startswith("#") for value in read.loads)
    assert not re.search(r"<(script|link|img|iframe)[^>]*\s(src|href)=", page)
    assert "@import" not in page.split("</style>")[0]
    assert page.count("plotly.js v") == 1
    assert page.count("Plotly.newPlot(") >= len(sections)
    for name in data:
        assert f"{name}.json" in read.text


def test_what_comes_from_files_is_escaped(tmp_path):
    bench = results.bench(labels=("ddp", NASTY), note=NASTY)
    nasty_map = results.winners()
    nasty_map["cells"][0][0].update(winner=NASTY, why=NASTY)
    trace = results.trace()
    trace["traceEvents"][-1]["name"] = NASTY
    plain = Reader(page_of(tmp_path, a=results.bench(), b=results.ranking(), c=results.winners(), d=results.trace()))
    (tmp_path / "x").mkdir()
    page = page_of(tmp_path / "x", a=bench, b=results.ranking(NASTY, sentence=NASTY), c=nasty_map, d=trace)
    read = Reader(page)
    assert "<script>alert" not in page
    assert sorted(set(read.tags)) == sorted(set(plain.tags))
    assert read.tags.count("script") == plain.tags.count("script")
    assert NASTY in read.text


def test_what_the_texts_say(tmp_path):
    read = Reader(page_of(tmp_path, a=results.winners(), b=results.bench(), c=results.demo(), d=results.ranking()))
    for said in (
        "Of 4 clusters: ssgd in 2, acp rank=4 in 1, topk density=0.01 in 1. At most they are worth 16.0×",
        "A small model; 1.0 M parameters, 4.0 MB of gradients; 2 workers; link 10mbit.",
        "Shortest step: thinwire acp, 2.00 s, 2.00× as fast as ddp.",
        "floor of exact methods at 10mbit: 3.50 s",
        "predicted at 10mbit, a lower bound",
        "link not emulated",
        "acp rank=4 is fastest",
        "ddp 4.000 after 3 steps and 12.0 s",
        "Where: in network namespaces.",
    ):
        assert said in read.text, said


def test_a_second_map_where_exact_methods_differ(tmp_path):
    data = results.winners()
    one = page_of(tmp_path, a=data)
    data["cells"][0][0]["winner_exact"] = "ssgd fusion=single"
    two = page_of(tmp_path, a=data)
    assert "Of the exact methods, ssgd is best everywhere." in Reader(one).text
    assert "Exact methods only" in Reader(two).text
    assert two.count("Plotly.newPlot(") == one.count("Plotly.newPlot(") + 1


def test_a_row_that_failed_is_named_and_not_drawn(tmp_path):
    bench = results.bench()
    bench["rows"][-1].update(step_seconds=None, error="rank 1: ValueError: no")
    read = Reader(page_of(tmp_path, a=bench))
    assert "thinwire acp failed: rank 1: ValueError: no" in read.text
    bench["rows"] = bench["rows"][-1:]
    assert Reader(page_of(tmp_path, a=bench)).sections == ["bench", "sources"]


def test_results_without_anything_in_them(tmp_path):
    with pytest.raises(ValueError, match="no results"):
        page_of(tmp_path, a={"cells": [], "bits_per_second": [], "workers": []})
