"""A folder to write in, without torchrun around."""

import pytest


@pytest.fixture
def alone(monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path
