import json

import pytest
import torch
from optimizers import CASES, path, trajectory


@pytest.mark.parametrize("case", CASES)
def test_the_trajectory_is_the_one_on_file(case):
    torch.set_num_threads(1)
    want, got = json.loads(path(case).read_text()), trajectory(case)
    assert want.keys() == got.keys()
    assert got["loss"][-1] < 0.9 * got["loss"][0]
    for key, values in want.items():
        assert got[key] == pytest.approx(values, rel=1e-9, abs=1e-12), key
