"""Every verb runs in a folder of its own, without torchrun's variables and without rights to emulate links."""

import pytest
import torch


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("THINWIRE_LAB_MODE", "loopback")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)
