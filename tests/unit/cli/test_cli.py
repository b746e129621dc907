import json
import subprocess
import sys

import pytest
from typer.main import get_command

from thinwire.tools.cli.main import app
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


@pytest.mark.parametrize("module", ["typer", "thinwire.systems.cli.supernet"])
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
    ranking = {"entries": [{"label": "ssgd", "exact": True, "step_seconds": 0.5}], "sentence": "ssgd it is"}
    (tmp_path / "ranking.json").write_text(json.dumps(ranking))
    assert f"written: {name}" in call("report", "ranking.json", *words).stdout
    assert "ssgd it is" in (tmp_path / name).read_text()
