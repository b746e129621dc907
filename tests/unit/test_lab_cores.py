"""Emulated machines have cores of their own."""

import os
import sys

import pytest

from thinwire.tools import lab
from thinwire.tools.lab.ranks import own_cores


@pytest.mark.parametrize("nodes", range(1, 9))
@pytest.mark.parametrize("cores", [(0,), (0, 1), (2, 3, 5, 7), tuple(range(16))])
def test_every_node_has_as_much_as_any_other(nodes, cores):
    dealt = [own_cores(node, nodes, cores) for node in range(nodes)]
    used = [core for own in dealt for core in own]
    assert set(used) <= set(cores)
    assert len({len(own) for own in dealt}) == 1
    assert dealt[0]
    counts = [used.count(core) for core in set(used)]
    assert max(counts) - min(counts) <= 1
    if nodes <= len(cores):
        assert max(counts) == 1


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not tie processes to cores")
@pytest.mark.parametrize("share", [False, True])
def test_ranks_see_the_cores_of_their_node(share):
    lines, all_cores = {}, sorted(os.sched_getaffinity(0))
    command = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]
    result = lab.run(lab.Cluster(2), command, on_line=lambda rank, line: lines.update({rank: line}), share_cores=share)
    assert result.exit_code == 0
    for node in range(2):
        assert lines[node] == str(all_cores if share else list(own_cores(node, 2, all_cores)))
