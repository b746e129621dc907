import inspect
import json
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer.testing
from typer.main import get_command

from thinwire.tools.bench.session import Point, RowRecord, RunRecord
from thinwire.tools.cli import console, options, verb
from thinwire.tools.cli.main import FriendlyErrors, app
from verbs import call


def verbs(group, path=()):
    for name, found in group.commands.items():
        if hasattr(found, "commands"):
            yield from verbs(found, (*path, name))
        elif not found.hidden:
            yield " ".join((*path, name)), found


VERBS = dict(verbs(get_command(app)))


@pytest.mark.parametrize("verb", VERBS)
def test_help_ends_with_an_example_that_can_be_read(verb):
    start = f"Example: thinwire {verb}"
    example = VERBS[verb].epilog
    assert f"{example} ".startswith(f"{start} ")
    VERBS[verb].make_context(verb, example.removeprefix(start).split())


@pytest.mark.parametrize("verb", VERBS)
def test_help_names_no_type_of_python(verb):
    """A flag takes no word, and an option that may be repeated takes one at a time."""
    shown = call(*verb.split(), "--help").stdout
    assert "--help" in shown
    assert "<bool>" not in shown
    assert not [line for line in shown.splitlines() if line.strip(" *│|").startswith("--") and "list[" in line]


def test_a_verb_is_added_as_its_page_says(monkeypatch, tmp_path):
    """The docstring's own verb: its options, its refusals, its JSON and its use from Python."""
    text = inspect.cleandoc(verb.__doc__.partition("::\n")[2].partition("\n\n``")[0])
    found = {**vars(verb), **vars(options), "Any": object, "Path": Path}
    exec("from __future__ import annotations\n" + text, found)
    mine = typer.Typer(cls=FriendlyErrors)
    mine.callback()(lambda: None)
    verb.add(mine, found["CountVerb"])
    runner = typer.testing.CliRunner()
    shown = runner.invoke(mine, ["count", "--help"]).stdout
    for words in ("Count the ranks that answer.", "--most", "--link", "Example: thinwire count --most 3"):
        assert words in shown
    assert runner.invoke(mine, ["count"]).stdout == "2 ranks answer\n"
    assert json.loads(runner.invoke(mine, ["count", "--json"]).stdout) == {"count": 2}
    for words, says in (
        ("--most 0", "--most=0 must be a whole number of at least 1"), ("--out /proc/x", "can be written"),
    ):  # fmt: skip
        refused = runner.invoke(mine, ["count", *words.split()])
        assert (refused.exit_code, says in refused.stderr) == (2, True)
    asked = found["CountVerb"](most=3, out=tmp_path)
    assert asked.run(console.Output()) == {"count": 2}
    assert vars(type(asked).from_json(asked.to_json())) == vars(asked)
    with pytest.raises(ValueError, match="--most=0"):
        found["CountVerb"](most=0)
    with pytest.raises(FrozenInstanceError):
        asked.most = 4


def test_help_begins_with_what_to_try_first():
    shown = " ".join(call("--help").stdout.split())
    assert "thinwire demo --quick" in shown
    assert "thinwire lab run --link 1gbit -- python train.py" in shown
    assert "<bool>" not in shown


def test_one_thing_has_one_name_in_every_verb():
    options = {path: {name for one in found.params for name in one.opts} for path, found in VERBS.items()}
    other_names = {"--latency", "--gpu", "--batch", "--ranks"}  # of --delay, --device, --batch-size, --workers
    assert {path: names & other_names for path, names in options.items() if names & other_names} == {}
    links = {"--link", "--delay", "--jitter", "--loss", "--congestion"}
    for name in ("lab run", "bench", "race", "probe", "ps run"):
        assert links <= options[name], name


def test_the_package_is_the_command():
    ended = subprocess.run([sys.executable, "-m", "thinwire", "--help"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0
    assert "Usage: python -m thinwire" in ended.stdout


@pytest.mark.parametrize("module", ["typer", "thinwire.tools.cli.verb"])
def test_control_c_while_python_imports(module):
    code = f"""import sys
class Interrupted:
    def find_spec(self, name, *rest):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
from thinwire.tools.cli.main import run
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_control_c_is_130(monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("thinwire.tools.lab.Cluster.parse", interrupted)
    call("bench", code=130)


def test_no_help_and_no_version_imports_torch():
    code = """import sys
from thinwire.tools.bench.session import Point, RowRecord, RunRecord
from thinwire.tools.cli import console
from thinwire.tools.cli.main import app
for words in sys.argv[1:]:
    try:
        app(words.split())
    except SystemExit as end:
        assert end.code == 0, words
assert not {"torch", "plotly"} & set(sys.modules)
"""
    some = ("", "bench", "plan", "report", "ps run", "kfac tune", "split plan", "federated run", "supernet train")
    command = [sys.executable, "-c", code, "--version", *(f"{verb} --help" for verb in some)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: ") == len(some)


@pytest.mark.parametrize("words,name", [([], "report.html"), (["--out", "mine.html"], "mine.html")])
def test_a_report_is_one_page(words, name, tmp_path):
    picture = {"title": "it fell", "panels": [{"x": "step", "y": "loss", "lines": [{"name": "a", "x": [1], "y": [2]}]}]}
    (tmp_path / "run.json").write_text(json.dumps({"picture": picture}))
    assert f"written: {name}" in call("report", "run.json", *words).stdout
    assert "it fell" in (tmp_path / name).read_text()


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        ([4.0, 3.0], ["in 4.5 s instead of 6.0 s", 'sync = tw.attach(model, optimizer, "local")']),
        ([4.5, 4.0], ["No row reached DDP's loss (3.500)", "no gain over DDP"]),
    ],
)
def test_the_demo_says_what_its_ranks_have_measured(ours, said, here, monkeypatch):
    asked = []

    def ranks(spec, cluster, total_steps):
        asked.append((spec.steps, cluster.workers, cluster.links))
        usual = {
            "step_seconds": [2.0] * 3,
            "forward_seconds": [0.2] * 3,
            "host_seconds": [0.1] * 3,
            "losses": [4.0] * 3,
        }
        rows = [RowRecord("compute", "compute", **usual)]
        for made, every, losses in ((spec.rows[0], 6.0, [3.5]), (spec.rows[1], 3.0, ours)):
            curve = [Point(3 * n, every * n, loss, loss) for n, loss in enumerate([5.5, *losses])]
            rows.append(RowRecord(made.label, made.kind, curve=curve, wire_bytes=1e6, **usual))
        return RunRecord("a model", 1000, 2, 4000, spec.workers, "eth0", rows), SimpleNamespace(emulated=True, note="")

    monkeypatch.setattr("thinwire.tools.cli.demo.run_ranks", ranks)
    shown = call("demo", "--quick", "--steps", 3, "--out", "results").stdout
    assert asked == [(3, 2, (50_000_000,))]
    found = json.loads((here / "results" / "demo.json").read_text())
    assert found["target"] == 3.5
    assert [row["label"] for row in found["rows"]] == ["ddp", "thinwire local"]
    assert (here / "results" / "demo.png").stat().st_size > 10_000
    for words in said:
        assert words in shown


def test_a_bar_never_counts_more_than_all(capsys, monkeypatch):
    """The period of "local" as it comes is the ranks' to find, so more steps may be run than were foreseen."""
    monkeypatch.setattr(console, "EVERY_SECONDS", -1.0)
    with console.progress("timing", 2) as bar:
        for _ in range(3):
            console.moving(bar)({"step": 1, "row": "local", "loss": 1.0})
    said = [line.rpartition("  ")[2] for line in capsys.readouterr().err.splitlines()]
    assert said == ["... timing", "1 of 2", "2 of 2", "3 of 3"]
