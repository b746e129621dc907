"""A merge: which neighbouring tensors share a message, and when the last message arrives."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from thinwire.core.pricing.checks import Hashed
from thinwire.core.records import UNREADABLE


@dataclass(frozen=True)
class Merge(Hashed):
    """Groups of consecutive tensors in backward order. Plain data that is printed, hashed, broadcast and pinned.

    Attributes:
        groups: indices; every index once, in order.
        finish_seconds: end of the last message, by the timeline of ``planner.clock``.
        rule: how it was made: "optimal", "mgwfbp" or "omgs".
        exact: whether no other grouping can be faster under the same costs.
    """

    groups: list[list[int]]
    finish_seconds: float
    rule: str
    exact: bool

    def __hash__(self) -> int:
        return hash(self.to_json())

    def to_json(self) -> str:
        """Return the merge as JSON text."""
        return json.dumps(
            {"groups": self.groups, "finish_seconds": self.finish_seconds, "rule": self.rule, "exact": self.exact}
        )

    @classmethod
    def from_json(cls, text: str) -> Merge:
        """Read back what ``to_json`` wrote.

        Raises:
            ValueError: the text is not a merge.
        """
        try:
            data: Any = json.loads(text)
            groups = [[int(i) for i in group] for group in data["groups"]]
            return cls(groups, float(data["finish_seconds"]), str(data["rule"]), bool(data["exact"]))
        except UNREADABLE as error:
            raise ValueError(f"this is not a thinwire merge: {error}") from error
