import json
from dataclasses import asdict

import pytest

from thinwire.tools.pictures import Level, Mark, Panel, Picture, Series, check_plot, write_picture
from thinwire.tools.report.inputs import read_files
from thinwire.tools.report.page import render
from thinwire.tools.report.runs import RunPicture, grouped, read_run

LOSS = Series("scaffold", (0.0, 1.0, 2.0), (2.3, 1.0, 0.5), at=(2.0, 0.5), said="0.5 in 2 s")
PICTURE = Picture(
    "digits <b>",
    (
        Panel(
            "seconds", "loss", (LOSS, Series("fedavg", (0.0, 2.0), (2.3, 0.7), look="steps")), (Mark(1.5, "killed"),)
        ),
        Panel("round", "accuracy", (Series("scaffold", (0.0, 1.0), (0.1, 0.9)),), (), (Level(0.1, "chance"),), (0, 1)),
        Panel(
            "",
            "MB",
            (Series("scaffold", (0.0, 1.0), (2.0, 1.0), "bars"), Series("fedavg", (1.0,), (3.0,), "bars")),
            x_names=("up", "down <i>"),
        ),
        Panel("kB", "error", (Series("candidates", (1.0, 9.0), (3.0, 1.0), look="points"),), log_x=True),
    ),
)


PANEL = {"x": "seconds", "y": "loss", "lines": []}


def on_disk(folder, name, picture, **more):
    path = folder / name
    path.write_text(json.dumps({"picture": asdict(picture), **more}))
    return path


def test_a_picture_as_png_shows_every_line_and_word(tmp_path, monkeypatch):
    plt = pytest.importorskip("matplotlib.pyplot")
    drawn = []
    monkeypatch.setattr(plt, "close", drawn.append)
    write_picture(PICTURE, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    loss, accuracy, sent, error = drawn[0].axes
    assert loss.get_legend_handles_labels()[1] == ["scaffold: 0.5 in 2 s", "fedavg"]
    assert [text.get_text() for text in loss.texts] == ["killed"]
    assert accuracy.get_ylim() == (0, 1)
    assert [text.get_text() for text in accuracy.texts] == ["chance"]
    assert error.get_xscale() == "log"
    assert [(bar.get_y(), bar.get_height()) for bar in sent.patches] == [(0, 2), (0, 1), (1, 3)]
    assert [label.get_text() for label in sent.get_xticklabels()] == ["up", "down <i>"]
    assert loss.lines[0].get_color() == accuracy.lines[0].get_color()


def test_a_picture_as_html_has_each_name_once_in_its_legend(tmp_path):
    pytest.importorskip("plotly")
    write_picture(PICTURE, tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text()
    assert page.count('"showlegend":true') == 3
    assert "digits \\u003cb" not in page


def test_a_report_draws_what_a_result_brings(tmp_path):
    pytest.importorskip("plotly")
    inputs = read_files([on_disk(tmp_path, "run.json", PICTURE, rounds=[1, 2])])
    assert inputs.of(RunPicture) == [RunPicture("run.json", PICTURE)]
    page = render(inputs)
    assert "digits &lt;b&gt;" in page
    assert "was predicted" not in page


def test_runs_over_the_same_axes_are_drawn_together_and_told_apart():
    def run(file, name, chance=0.1):
        line = Series(name, (0.0, 1.0), (0.1, 0.9))
        return RunPicture(file, Picture(name, (Panel("round", "accuracy", (line,), (), (Level(chance, "chance"),)),)))

    (one,) = grouped([run("a.json", "fedavg"), run("b.json", "scaffold"), run("c.json", "scaffold")])
    assert list(one.names()) == ["fedavg", "scaffold (b.json)", "scaffold (c.json)"]
    assert one.panels[0].levels == (Level(0.1, "chance"),)
    assert one.title == "fedavg; scaffold"
    (same,) = grouped([run("a.json", "fedavg"), run("a.json", "fedavg")])
    assert list(same.names()) == ["fedavg (a.json, 1.)", "fedavg (a.json, 2.)"]
    assert len(grouped([run("a.json", "fedavg"), RunPicture("x", PICTURE)])) == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"panels": 3}, "'panels' is not a list"),
        ({"panels": [{**PANEL, "lines": [{"name": "a", "x": [1], "y": "no"}]}]}, "'y' is not a list"),
        ({"panels": [{**PANEL, "lines": [{"name": "a", "x": [1], "y": [1, 2]}]}]}, "argument 2 is longer"),
        ({"panels": [{**PANEL, "y_range": [1]}]}, "y_range: .*not a list of 2"),
        ({"panels": [{**PANEL, "lines": [{"name": "a", "x": [], "y": [], "look": "pie"}]}]}, "not one of line, steps"),
        ({"panels": [{**PANEL, "z": 1}]}, "unknown fields z"),
        ({"panels": []}, "'panels' is empty"),
    ],
)
def test_broken_pictures_are_sentences(change, says):
    with pytest.raises(ValueError, match=says):
        read_run("run.json", {"picture": {"title": "a run", **change}})


def test_values_that_are_not_finite_are_left_out():
    line = {"name": "a", "x": [0, 1, 2], "y": [1, None, float("nan")]}
    data = {"title": "a run", "panels": [{**PANEL, "lines": [line]}]}
    (panel,) = read_run("r", {"picture": data}).picture.panels
    assert panel.lines[0] == Series("a", (0,), (1,))


def test_a_plot_that_cannot_be_written_is_refused_at_once(tmp_path):
    check_plot(None)
    check_plot(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"\.png, \.svg or \.html"):
        check_plot(tmp_path / "a.jpg")
