"""``parameter_server.run`` in a script under torchrun, and ``thinwire ps`` as processes of their own."""

import os
import subprocess
import sys

import pytest
from parameter_cluster import model, sgd, started

from thinwire.systems.parameter_server import Service
from thinwire.systems.parameter_server.presets import bsp

pytestmark = [pytest.mark.dist, pytest.mark.slow]

SCRIPT = """
import sys
import time

import torch
from parameter_cluster import model
from thinwire.systems import parameter_server as ps

torch.set_num_threads(1)
batches = [torch.randn(8, 4, generator=torch.Generator().manual_seed(i)) for i in range(7)]
network = model()


def loss(m, x):
    time.sleep(0.1)  # so that the second worker is there before the end
    return (m(x) - x[:, :2]).square().mean()


stats = ps.run(network, batches, loss, server=sys.argv[1], node_id=3)
print(f"submissions {stats.submissions} version {stats.version}", flush=True)  # one write: two ranks share the pipe
"""


def test_a_script_under_torchrun_is_a_node_of_two_workers(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    network = model()
    service = Service(network, bsp(), host="127.0.0.1", outer=sgd(), updates=150)
    thread = started(service.run)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    here = os.path.dirname(__file__)
    paths = os.pathsep.join(filter(None, (here, os.path.dirname(here), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, f"127.0.0.1:{service.port}"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    thread.join(60)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("version 150") == 2
    assert service.machine.counters["applied"] > 150  # of both workers, from when the second is there
