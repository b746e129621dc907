"""A process with many files open."""

import contextlib
import os

import pytest

SELECT = 1024
"""What ``select.select`` takes: descriptors below that."""


@contextlib.contextmanager
def many_open():
    """Here every new descriptor has a number that ``select.select`` refuses."""
    resource = pytest.importorskip("resource")
    soft, hard = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = SELECT + 512
    if hard != resource.RLIM_INFINITY and hard < enough:
        pytest.skip(f"a process may open {hard} files here")
    opened = []
    try:
        if soft != resource.RLIM_INFINITY and soft < enough:
            resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))
        while not opened or opened[-1] < SELECT:
            opened.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for number in opened:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
