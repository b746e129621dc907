import json
import subprocess
import sys

import pytest
from typer.main import get_command

from thinwire.tools.cli.main import app
from verbs import CliRunner

runner = CliRunner()


@pytest.mark.parametrize(
    "words,says",
    [
        (["--model", "chargtp"], "did you mean 'chargpt'"),
        (["--methods", "ssdg"], "did you mean 'ssgd'"),
        (["--methods", "acp:rank=-1"], "rank"),
        (["--link", "1furlong"], "furlong"),
        (["--workers", "0"], "at least 1"),
        (["--steps", "0"], "at least 1"),
        (["--plot", "a.gif"], ".png or .html"),
        (["--plot", "new/a.png"], "folder that exists"),
        (["--operation-timeout", "nan"], "time-outs must be positive"),
        (["--methods", "ddp:bucket=x"], "bucket='x' must be a size in MB"),
        (["--methods", "ddp-best:buckets=nan"], "must be sizes in MB"),
        (["--methods", "torch-powersgd:rank=0"], "rank=0 must be a whole number"),
        (["--methods", "auto:lossy=maybe"], "lossy=true"),
        (["--methods", "atuo"], "did you mean 'auto'"),
    ],
)
def test_wrong_words_of_bench_are_one_sentence_and_exit_2(words, says):
    result = runner.invoke(app, ["bench", *words])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert says in result.stderr
    assert "Traceback" not in result.output
    assert len(result.stderr.strip().splitlines()) == 1


def test_wrong_steps_of_the_demo():
    assert runner.invoke(app, ["demo", "--steps", "0"]).exit_code == 2


@pytest.mark.parametrize(
    "words,says",
    [
        (["--nope"], "No such option: --nope (see "),
        (["bnch"], "Did you mean 'bench'"),
        (["race"], " race --help)"),
        (["ps", "node"], "Missing option '--server' (see "),
        (["bench", "--steps", "x"], "'--steps'"),
        (["plan", "resnet50", "gpt2"], "gpt2"),
    ],
)
def test_words_that_no_verb_knows_are_told_in_the_same_style(words, says):
    result = runner.invoke(app, words)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert says in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


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


@pytest.mark.parametrize(
    "words",
    [
        ["demo", "--quick"],
        ["race", "mlp"],
        ["plan", "resnet50"],
        ["profile", "mlp"],
        ["probe"],
        ["kfac", "plan", "resnet50"],
        ["kfac", "calibrate"],
        ["federated", "run", "digits"],
        ["supernet", "train"],
        ["supernet", "table"],
        ["split", "plan"],
    ],
)
def test_an_output_that_cannot_be_written_is_told_before_the_work(words):
    result = runner.invoke(app, [*words, "--out", "/proc/x"])  # even root may not write there
    assert result.exit_code == 2, result.output
    assert result.stderr.splitlines()[-1].startswith("error: --out /proc/x ")
    assert "can be written" in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["--rounds", "0"],
        ["--devices", "0"],
        ["--schedule", "nope"],
        ["--reduction", "nope"],
        ["--checkpoint-dir", "/proc/x"],
        ["--clients-per-round", "9999"],
    ],
)
def test_a_federation_that_cannot_run_prints_nothing_before_it_is_told(words):
    result = runner.invoke(app, ["federated", "run", "digits", *words])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("verb", ["bench", "federated run", "kfac tune", "split compare", "ps run --updates 1"])
def test_a_plot_that_cannot_be_written_is_told_before_the_work(verb):
    result = runner.invoke(app, [*verb.split(), "--plot", "/proc/x.png"])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --plot /proc/x.png is not a file that can be written")


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
    assert runner.invoke(app, ["bench"]).exit_code == 130


def test_doctor():
    result = runner.invoke(app, ["doctor", "--json"])
    found = json.loads(result.stdout)
    assert result.exit_code == 0
    assert "gloo" in found["backends"]
    assert {"torch", "cores", "lab", "interface", "gpus", "extras"} <= set(found)
    assert runner.invoke(app, ["doctor"]).exit_code == 0


def test_help_and_version_do_not_import_torch():
    code = (
        "import sys; from thinwire.tools.cli.main import app\n"
        "try:\n    app(sys.argv[1:])\nfinally:\n    assert 'torch' not in sys.modules"
    )
    for words in (["--help"], ["bench", "--help"], ["demo", "--help"], ["--version"]):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
