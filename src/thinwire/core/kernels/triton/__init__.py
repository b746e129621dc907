"""Triton kernels for CUDA tensors; each has a torch function as twin, with which tests compare it.

Not here: anything that works without Triton. The modules are imported late, by the code that uses them.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from torch import Tensor


@cache
def triton_installed() -> bool:
    return find_spec("triton") is not None


def serves(x: Tensor) -> bool:
    """Return whether to use the kernels for a tensor if the user has not chosen."""
    return x.is_cuda and triton_installed()


def require() -> None:
    if find_spec("triton") is None:
        raise ImportError('engine="triton" needs Triton, which is not installed: pip install triton, or engine="torch"')
