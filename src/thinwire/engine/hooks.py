"""Hooks on the modules of an attached model: a copy of the model, in memory or in a file, has none of them."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

_nothing = nullcontext().__exit__  # takes anything, does nothing, and pickles without thinwire


class ModuleHook(functools.partial):  # type: ignore[type-arg]
    """Calls what it was made of; copied or unpickled, it does nothing."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _nothing

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")
