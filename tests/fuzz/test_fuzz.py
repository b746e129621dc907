"""Random scripts on two ranks against plain twins: see run.py, which runs one, or thousands."""

from pathlib import Path

import pytest

import thinwire
from fuzz.mutations import FOUND, MUTATIONS, without_the_mend
from fuzz.pair import Ranks
from fuzz.run import hunt

pytestmark = pytest.mark.dist
SEEDS = 24


def _hunted(seeds):
    with Ranks() as ranks:
        ran, findings = hunt(seeds, ranks=ranks, shrinks=20.0, most=3)
    assert not findings, "\n\n".join(findings)
    assert ran == len(seeds)


def test_scripts():
    _hunted(range(SEEDS))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_scripts():
    _hunted(range(10_000, 11_000))


@pytest.mark.parametrize("name", MUTATIONS)
def test_what_takes_out_a_mend_fits_the_code(name):
    file = Path(thinwire.__file__).parent / MUTATIONS[name][0]
    compile(without_the_mend(name, file.read_text()), str(file), "exec")


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_that_was_mended_is_found(name):
    with Ranks(mutate=name) as ranks:
        _, findings = hunt([FOUND[name], *range(600)], ranks=ranks, shrinks=0.0, most=1)
    assert findings
