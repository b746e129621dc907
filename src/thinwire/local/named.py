"""Whether what a user names is local steps, for those who take a method and local steps in one place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thinwire.local.settings import PRESETS, Local, local_settings


def named_local(method: object, options: Mapping[str, Any]) -> Local | None:
    """The settings of "local", "diloco" or Local(...), with their options; None: it is something else.

    Raises:
        ValueError: an option is unknown or out of range.
    """
    if isinstance(method, Local) or (isinstance(method, str) and method.lower() in PRESETS):
        return local_settings(method, options)
    return None
