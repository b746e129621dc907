"""One colour per name on the whole page, from Okabe and Ito's and Paul Tol's palettes for colour-blind readers."""

from __future__ import annotations

import re
from collections.abc import Iterable

_FIXED = {
    "ddp": "#8a8a8a",
    "ddp-best": "#4d4d4d",
    "ddp-fp16": "#b8b8b8",
    "torch-powersgd": "#7a4b1e",
    "ssgd": "#0072b2",
    "acp": "#d55e00",
    "topk": "#009e73",
    "powersgd": "#e69f00",
    "dear": "#56b4e9",
    "signsgd": "#cc79a7",
    "cast": "#332288",
    "omgs": "#999933",
    "lags": "#44aa99",
    "hitopk": "#117733",
    "gtopk": "#ddcc77",
    "oktopk": "#aa4499",
    "qsgd": "#882255",
    "dgc": "#cc6677",
    "terngrad": "#88ccee",
    "local": "#ee3377",
    "diloco": "#bbcc33",
}
_KEPT = {"ddp", "ddp-best", "ddp-fp16", "torch-powersgd"}  # grey means: not one of thinwire's methods
_SHADES = (0.0, -0.4, 0.4, -0.65, 0.65)
_OTHER = "#666666"
_SAME = {"dense": "ssgd", "s-sgd": "ssgd"}


class Colours:
    """One colour per name: its method's, or the next free one; variants side by side are shades of it."""

    def __init__(self, groups: Iterable[Iterable[str]]) -> None:
        sides = [list(dict.fromkeys(map(_variant, labels))) for labels in groups]
        present = {_method(variant) for side in sides for variant in side}
        free = [colour for name, colour in _FIXED.items() if name not in present | _KEPT]
        free += [shade(colour, _SHADES[1]) for colour in free]
        base = dict(_FIXED)
        self._of: dict[str, str] = {}
        for side in sides:
            for variant in side:
                name = _method(variant)
                if name not in base:
                    base[name] = free.pop(0) if free else _OTHER
                taken = {self._of[other] for other in side if other in self._of and _method(other) == name}
                shades = [shade(base[name], by) for by in _SHADES]
                if variant not in self._of:
                    self._of[variant] = next((tint for tint in shades if tint not in taken), base[name])

    def of(self, label: str) -> str:
        return self._of.get(_variant(label), _OTHER)


def _variant(label: str) -> str:
    return " ".join(label.strip().lower().removeprefix("thinwire ").replace(":", " ").split())


def _method(variant: str) -> str:
    name = re.split(r"[ (\[]", variant, maxsplit=1)[0]
    name = _SAME.get(name, name)
    return name if name in _FIXED else variant


def shade(colour: str, by: float) -> str:
    """Move a colour (``#rrggbb``) towards white (``by`` up to 1) or black (down to -1).

    Example:
        >>> shade("#808080", 0.5), shade("#808080", -0.5)
        ('#c0c0c0', '#404040')
    """
    target = 255 if by > 0 else 0
    return "#" + "".join(f"{round(c + (target - c) * abs(by)):02x}" for c in _channels(colour))


def ink(colour: str) -> str:
    red, green, blue = _channels(colour)
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 150 else "#1f2933"


def _channels(colour: str) -> tuple[int, int, int]:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return red, green, blue
