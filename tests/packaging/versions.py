"""Tries the package on every Python that this machine has, 3.10 to 3.13. `make test-versions` runs this.

Without further words: the sources compile, the wheel installs with the lowest versions of its dependencies that
pyproject.toml allows, but torch, and the command line answers. With --torch the named torch is installed too, with the
lowest versions of some extras, and the unit tests run: `--torch 2.9.1` is the oldest that is supported. (A pip
configured for CPU builds of torch keeps that small; the builds for CUDA take several GB.)

Usage: python tests/packaging/versions.py [--torch 2.9.1] [--only 3.12]
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement
from wheel import ROOT, build, check_words, install

try:
    import tomllib
except ImportError:  # Python 3.10, where pytest brings it
    import tomli as tomllib

VERSIONS = ("3.10", "3.11", "3.12", "3.13")
EXTRAS = ("plot", "report", "tensorboard", "data", "keys")


def find(version):
    """An interpreter that really runs and is of this version; None: there is none."""
    managed = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    uv = sorted((Path.home() / ".local" / "share" / "uv" / "python").glob(f"cpython-{version}.*/bin/python3"))
    for path in [sys.executable, shutil.which(f"python{version}"), *map(str, [*managed, *uv])]:
        if path is None:
            continue
        ask = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([path, "-c", ask], capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return path
    return None


def lowest(version, extras=()):
    """What pyproject.toml asks for on that Python, but torch, each at its lowest version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = project["dependencies"] + [line for extra in extras for line in project["optional-dependencies"][extra]]
    found = []
    for asked in map(Requirement, lines):
        if asked.name != "torch" and (asked.marker is None or asked.marker.evaluate({"python_version": version})):
            (floor,) = (one.version for one in asked.specifier if one.operator == ">=")
            found.append(f"{asked.name}=={floor}")
    return found


def attempt(interpreter, version, wheel, torch):
    """Raises where something does not work."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([interpreter, "-m", "compileall", "-q", "-f", str(copied(folder))], check=True)
        packages = lowest(version, EXTRAS if torch else ())
        if torch:
            packages += [f"torch=={torch}", "pytest", "pytest-timeout", "hypothesis"]
        environment = Path(folder) / "environment"
        programs = install(wheel, environment, *packages, with_dependencies=False, interpreter=interpreter)
        check_words(programs)
        if torch:
            packages = ("program", "kernels", "collectives", "planner", "methods", "measure", "engine")
            packages += ("data", "link", "pictures", "report")
            tests = [str(ROOT / "tests" / "unit" / package) for package in packages]
            subprocess.run(
                [str(programs / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests], cwd=ROOT, check=True
            )


def copied(folder):
    """The sources, where compiled files do no harm."""
    place = Path(folder) / "src"
    shutil.copytree(ROOT / "src", place, ignore=shutil.ignore_patterns("__pycache__"))
    return place


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", help="version of torch to install and test with; without it torch is left out")
    parser.add_argument("--only", action="append", choices=VERSIONS, help="this Python alone; may be repeated")
    words = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        wheel, _ = build(Path(folder))
        for version in words.only or VERSIONS:
            interpreter = find(version)
            if interpreter is None:
                results[version] = "missing on this machine"
                continue
            try:
                attempt(interpreter, version, wheel, words.torch)
                results[version] = "works with the lowest versions" + (
                    f" with torch {words.torch}" if words.torch else "; torch not tried"
                )
            except (subprocess.CalledProcessError, AssertionError, json.JSONDecodeError) as error:
                results[version] = f"FAILS: {error}"
    for version, result in results.items():
        print(f"Python {version}: {result}")
    if all(result.startswith("missing") for result in results.values()):
        sys.exit("none of these Pythons is on this machine: install one, for example with pyenv or uv")
    sys.exit(any(result.startswith("FAILS") for result in results.values()))


if __name__ == "__main__":
    main()
