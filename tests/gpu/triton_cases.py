"""Triton kernels against their torch twins: for pytest on a GPU, for ``python triton_cases.py`` in the interpreter."""

import torch

from thinwire.core.kernels.select.histogram import count_digits


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def histograms(device):
    for d in (1, 1000, 5001):
        keys = torch.randn(d, generator=seeded(d)).abs().view(torch.int32).to(device)
        shift, prefix = 31, torch.zeros((), dtype=torch.int64, device=device)
        for bits in (11, 10, 10):
            want = count_digits.twin(keys, prefix, shift, bits)
            got = count_digits.launch(keys, prefix, shift, bits)
            assert torch.equal(got, want), (d, shift)
            shift -= bits
            prefix = (prefix << bits) | want.argmax()


ALL = [histograms]

if __name__ == "__main__":
    for compare in ALL:
        compare("cpu")
    print("equal")
