"""torchrun's restarts: the script of the page is killed and goes on bit for bit; one that loads nothing says so."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import cases
import pytest
import torch

import thinwire as tw
from spawned import run
from thinwire.core.program import State, Topology
from thinwire.engine.session import restarts, warn_if_state_missing

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"
SCRIPT = re.search(r"^<!-- tested under torchrun -->\n```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)[1]
KILL = """
    import os, signal
    if step == {step} and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
"""
LAST = """
if rank == 0:
    torch.save({"weights": list(model.state_dict().values()), "start": start}, "end.pt")
owed = sorted(sync.services.state.residuals.items())
torch.save(owed, f"owed-{rank}.pt")
sync.close()
"""


def _job(folder, kill):
    """The page's script under torchrun, with rank 1 killed in the middle of a step."""
    folder.mkdir()
    backward = "    torch.nn.functional.cross_entropy"
    assert SCRIPT.count(backward) == 1
    code = SCRIPT if kill is None else SCRIPT.replace(backward, KILL.format(step=kill) + backward)
    assert code.count("\nsync.close()\n") == 1
    (folder / "train.py").write_text(code.replace("\nsync.close()\n", LAST))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "--max-restarts", "1", "train.py"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},  # as the page says
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    end = torch.load(folder / "end.pt", weights_only=True)
    owed = [torch.load(folder / f"owed-{rank}.pt", weights_only=True) for rank in range(2)]
    return end, owed, done.stderr


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return _job(tmp_path_factory.mktemp("restart") / "through", None)


@pytest.mark.dist
@pytest.mark.slow
def test_a_killed_job_goes_on_bit_for_bit(undisturbed, tmp_path):
    through, owed, quiet = undisturbed
    killed, again, told = _job(tmp_path / "killed", 25)
    assert (through["start"], killed["start"]) == (0, 20)
    assert all(torch.equal(a, b) for a, b in zip(through["weights"], killed["weights"], strict=True))
    for mine, theirs in zip(owed, again, strict=True):
        assert mine
        assert all(n == m and torch.equal(a, b) for (n, a), (m, b) in zip(mine, theirs, strict=True))
    assert "begin at zero" not in quiet
    assert "begin at zero" not in told  # the state was loaded


@pytest.mark.dist
@pytest.mark.slow
def test_a_job_that_was_killed_before_its_first_checkpoint_says_that_it_begins_anew(undisturbed, tmp_path):
    through, _, _ = undisturbed
    killed, _, told = _job(tmp_path / "killed", 4)
    assert killed["start"] == 0
    assert all(torch.equal(a, b) for a, b in zip(through["weights"], killed["weights"], strict=True))
    assert told.count("restart 1 of this job has loaded no state") == 1


def _after_a_restart(rank, size):
    """Whether attach and the hook of DDP warn, without a state and with one."""
    told = []

    class Handler(logging.Handler):
        def emit(self, record):
            told.append(record.getMessage())

    handler = Handler()
    logging.getLogger("thinwire").addHandler(handler)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "2"
    try:
        for loads in (False, True):
            net, sync = cases.train(rank, 2, "acp", {"rank": 2})
            saved = sync.state_dict()
            sync.close()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
            del told[:]
            sync = tw.attach(net, optimizer, "acp", rank=2)
            if loads:
                sync.load_state_dict(saved)
            for step in range(2):
                cases.loss_of(net, rank, step).backward()
                net.zero_grad()
            sync.close()
            yield [text for text in told if "restart" in text]
    finally:
        del os.environ["TORCHELASTIC_RESTART_COUNT"]
        logging.getLogger("thinwire").removeHandler(handler)


def _warnings(rank, size):
    return list(_after_a_restart(rank, size))


@pytest.mark.dist
def test_a_restart_without_a_state_is_told_once_on_rank_0():
    (silent, loaded), (other, none) = run(_warnings, 2)
    assert len(silent) == 1
    assert "restart 2 of this job" in silent[0]
    assert "residuals of acp begin at zero" in silent[0]
    assert not loaded
    assert not other
    assert not none


@pytest.mark.parametrize(("text", "count"), [("0", 0), ("3", 3), ("", 0), ("many", 0), (None, 0)])
def test_the_count_is_read_from_torchruns_variable(monkeypatch, text, count):
    if text is None:
        monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    else:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", text)
    assert restarts() == count


def test_methods_that_owe_nothing_have_nothing_to_say(monkeypatch, caplog):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    state = State(0, Topology(2))
    warn_if_state_missing(tw.SSGD(), state)
    state.step = 5
    warn_if_state_missing(tw.ACP(rank=2), state)
    assert not caplog.records
