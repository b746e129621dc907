"""A bucket says that it is filled when its gradients are no longer read: another thread may let them go then."""

import torch

from thinwire.core.program import Bucket, Slot


def test_filled_comes_last(monkeypatch):
    values = {"large": torch.ones(1 << 16), "small": torch.ones(3), "unused": None}
    cpu = torch.device("cpu")
    slots = [Slot(n, (3,) if v is None else v.shape, v, torch.float32, cpu) for n, v in values.items()]
    bucket, seen = Bucket(0, slots), []
    for name in ("mul", "_foreach_copy_", "_foreach_mul_"):
        original = getattr(torch, name)

        def noted(*args, original=original, **kwargs):
            seen.append(bucket.filled)
            return original(*args, **kwargs)

        monkeypatch.setattr(torch, name, noted)
    bucket.shares(2)
    assert bucket.filled
    assert seen == [False, False, False]
