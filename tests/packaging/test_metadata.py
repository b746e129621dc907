"""What the package says of itself before it is built: its version, the Pythons on which it is tried, how to cite it."""

import re
from pathlib import Path

import pytest
from versions import VERSIONS

import thinwire

tomllib = pytest.importorskip("tomllib")
ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = SETTINGS["project"]


def test_the_version_is_written_in_the_package_alone():
    assert "version" not in PROJECT
    assert SETTINGS["tool"]["hatch"]["version"]["path"] == "src/thinwire/__init__.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+", thinwire.__version__)


def test_who_cites_it_cites_this_version():
    said = dict(re.findall(r"^([\w-]+): (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE))
    assert said["version"] == thinwire.__version__
    assert said["license"] == PROJECT["license"]


def test_every_python_that_is_claimed_is_tried():
    named = {one.rpartition(" ")[2] for one in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", one)}
    assert named == set(VERSIONS)
    assert PROJECT["requires-python"] == f">={VERSIONS[0]}"


def test_every_dependency_has_a_floor_and_no_ceiling():
    for line in PROJECT["dependencies"]:
        assert re.match(r"[\w-]+>=[\d.]+(;|$)", line.replace(" ;", ";")), line
