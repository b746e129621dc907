"""The places where thinwire plugs into other people's training loops, one file each.

What does not live here: methods, the exchange, state (layers below); adapters only translate.
"""

from __future__ import annotations

import importlib
from typing import Any

_FILES = (
    "accelerate",
    "ddp",
    "fsdp2",
    "lightning",
    "torchft",
    "trainer",
)  # loaded when first used: each may want a library that is not installed


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module 'thinwire.adapters' has no attribute {name!r}")
    return importlib.import_module(f"thinwire.adapters.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_FILES})
