"""Adapters for the training loops of other libraries, one file each.

Methods, the exchange and state belong to the layers below; adapters only translate.
"""

from __future__ import annotations

import importlib
from typing import Any

# Loaded on first use: each may need a library that is not installed.
_FILES = ("accelerate", "ddp", "fsdp2", "lightning", "torchft", "trainer")


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module 'thinwire.adapters' has no attribute {name!r}")
    return importlib.import_module(f"thinwire.adapters.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_FILES})
