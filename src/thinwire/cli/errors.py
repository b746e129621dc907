"""The error of a verb whose words were right but whose run was not."""

from __future__ import annotations


class RunFailed(RuntimeError):
    """Printed as one sentence; exit code 1."""
