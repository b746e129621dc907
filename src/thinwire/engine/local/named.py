"""Recognise local steps by name, for callers that accept a method or local steps in one argument."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thinwire.core.methods.registry import method as of_registry
from thinwire.core.program import Method
from thinwire.engine.local.settings import PRESETS, Local, local_settings


def named_local(method: object, options: Mapping[str, Any]) -> Local | None:
    """Return the settings of "local", "diloco" or Local(...), with their options; None: it is something else.

    Raises:
        ValueError: an option is unknown or out of range.
    """
    if isinstance(method, Local) or (isinstance(method, str) and method.lower() in PRESETS):
        return local_settings(method, options)
    return None


def named_method(name: str, options: Mapping[str, Any]) -> Method:
    """Return what the planner prices under a name: a method, or local steps.

    Raises:
        ValueError: a name or an option is unknown, or out of range.
        TypeError: a method has no such option.
    """
    local = named_local(name, options)
    return of_registry(name, **options) if local is None else local.priced()
