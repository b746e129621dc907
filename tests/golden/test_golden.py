import json

import pytest
import torch
from regenerate import cases, path, trajectory


@pytest.mark.parametrize("case", cases())
def test_the_trajectory_is_the_one_on_file(case):
    torch.set_num_threads(1)
    want, got = json.loads(path(case).read_text()), trajectory(case)
    assert want.keys() == got.keys()
    for key, values in want.items():
        assert got[key] == pytest.approx(values, rel=1e-6, abs=1e-6), key
