"""Triton kernels for CUDA tensors, each the twin of a torch function that tests compare it with.

What does not live here: anything that works without Triton; its modules are imported late, by who asks for them.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from torch import Tensor


@cache
def triton_installed() -> bool:
    """Whether Triton can be imported."""
    return find_spec("triton") is not None


def serves(x: Tensor) -> bool:
    """Whether the kernels are to be taken for a tensor, where nobody has asked for them or against."""
    return x.is_cuda and triton_installed()


def require() -> None:
    """Raise ``ImportError`` with one clear sentence where Triton is missing."""
    if find_spec("triton") is None:
        raise ImportError('engine="triton" needs Triton, which is not installed: pip install triton, or engine="torch"')
