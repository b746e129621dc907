"""Hooks on an attached model's modules that disappear when the model is copied or pickled."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

_nothing = nullcontext().__exit__  # takes anything, does nothing, and pickles without thinwire


class ModuleHook(functools.partial):  # type: ignore[type-arg]
    """A callable like ``functools.partial``; a copied or unpickled one does nothing."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _nothing

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")
