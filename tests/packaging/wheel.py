"""Builds sdist and wheel, installs the wheel into a clean environment, and tries it there. `make package` runs this.

Usage: python tests/packaging/wheel.py [--out dist]
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
IN_THE_SDIST = (
    "pyproject.toml", "README.md", "LICENSE", "CITATION.cff", "src/thinwire/py.typed", "tests/spawned.py",
    "docs/quickstart.md", "examples/chargpt/README.md",
)  # fmt: skip
TRY = """
import torch, thinwire as tw
world = tw.LocalWorld(4)
sent = world.step(tw.ACP(rank=2), [{"w": torch.ones(16, 8)} for _ in range(4)])
assert all(torch.isfinite(one["w"]).all() for one in sent) and len(set(world.bytes_sent())) == 1
"""
ATTACH = """
import torch, thinwire as tw
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before, sync = model.weight.detach().clone(), tw.attach(model, optimizer, "powersgd", rank=4)
model(torch.ones(3, 8)).sum().backward()
optimizer.step()
assert not torch.equal(before, model.weight)
print(sync.stats().note)
"""


def build(out):
    """The wheel is built from the sdist, so that the sdist is known to be whole. Returns both."""
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(out), str(ROOT)], check=True)
    (wheel,) = out.glob("*.whl")
    (sdist,) = out.glob("*.tar.gz")
    return wheel, sdist


def check_contents(wheel, sdist):
    names = zipfile.ZipFile(wheel).namelist()
    kept = (path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    missing = sorted({path.relative_to(ROOT / "src").as_posix() for path in kept} - set(names))
    assert not missing, f"the wheel lacks {missing}"
    strange = [name for name in names if not name.startswith("thinwire") or name.endswith(".pyc")]
    assert not strange, f"the wheel holds {strange}"
    assert wheel.name.endswith("-py3-none-any.whl"), "the wheel must be pure Python"
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    missing = [name for name in IN_THE_SDIST if name not in inside]
    assert not missing, f"the sdist lacks {missing}"


def install(wheel, folder, *packages, with_dependencies=True, interpreter=sys.executable):
    """Make an environment with the wheel; returns its folder of programs."""
    subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    pip = [str(programs / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if with_dependencies:
        subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), str(wheel), *packages], check=True)
    else:
        subprocess.run([*pip, *packages], check=True)
        subprocess.run([*pip, "--no-deps", str(wheel)], check=True)
    return programs


def call(programs, *words, codes=(0,), **environment):
    """What a command of the environment prints, run in an empty folder."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [str(programs / words[0]), *words[1:]], cwd=folder, env={**clean, **environment}, text=True,
            capture_output=True, timeout=300, check=False,
        )  # fmt: skip
    assert done.returncode in codes, f"{' '.join(words)}: exit code {done.returncode}\n{done.stderr[-3000:]}"
    return done.stdout


def check_completion(programs):
    """Completion as bash asks for it, and the script that makes bash ask."""
    offered = call(
        programs, "thinwire", _THINWIRE_COMPLETE="complete_bash", COMP_WORDS="thinwire do", COMP_CWORD="1"
    ).split()  # fmt: skip
    assert offered == ["doctor"], offered
    script = call(programs, "thinwire", "--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "_THINWIRE_COMPLETE=complete_bash" in script


def check_words(programs):
    """What works without torch."""
    version = call(programs, "thinwire", "--version").split()[1]
    assert version in call(programs, "python", "-m", "pip", "show", "thinwire")
    verbs = call(programs, "thinwire", "--help")
    for verb in ("demo", "bench", "doctor", "probe", "profile", "plan", "report", "lab"):
        assert verb in verbs
        assert "Usage" in call(programs, "thinwire", verb, "--help")
    check_completion(programs)


def check_verbs(programs):
    """What needs torch."""
    found = json.loads(call(programs, "thinwire", "doctor", "--json", codes=(0, 1)))
    assert found["prevents_training"] is False, found["findings"]
    plan = json.loads(call(programs, "thinwire", "plan", "bert-base", "--link", "1gbit", "--workers", "8", "--json"))
    assert plan["ranking"]["entries"] if "ranking" in plan else plan["entries"]
    assert "resnet50" in call(programs, "thinwire", "plan", "resnet50", "--link", "1gbit", "--workers", "4")
    assert "one rank only" in call(programs, "python", "-c", ATTACH)
    call(programs, "python", "-W", "error", "-c", TRY)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for old in [*out.glob("thinwire-*.whl"), *out.glob("thinwire-*.tar.gz")]:
        old.unlink()
    wheel, sdist = build(out)
    check_contents(wheel, sdist)
    with tempfile.TemporaryDirectory() as folder:
        programs = install(wheel, Path(folder) / "environment")
        check_words(programs)
        check_verbs(programs)
    for made in (sdist, wheel):
        print(
            f"{made.relative_to(Path.cwd()) if made.is_relative_to(Path.cwd()) else made}: {made.stat().st_size} bytes"
        )
    print("installed into a clean environment: version, help, completion, doctor, plan, LocalWorld and attach work")


if __name__ == "__main__":
    main()
