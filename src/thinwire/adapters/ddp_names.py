"""Names for parameters that a DDP hook sees without names: dtype and index, counted from the last registered."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from thinwire.core.program import State, working_dtype

log = logging.getLogger("thinwire")


class Ordinals:
    """``float32/0`` is the last registered float32 parameter, ``float32/1`` the one before it.

    In its first backward, DDP presents the buckets of each dtype from last to first and the parameters of a bucket from
    first to last, whatever its ``bucket_cap_mb``. Later it uses its own order, and the names stay.

    Args:
        known: names and parameters, if they are known beforehand.
    """

    def __init__(self, known: Iterable[tuple[str, Tensor]] = ()) -> None:
        given = list(known)
        self._names: dict[int, str] = {id(p): name for name, p in given}
        self._parameters: list[Tensor] = [p for _, p in given]  # keeps the ids from being reused
        self._counts: dict[torch.dtype, int] = {}
        self._open = not given
        self.source = "model" if given else "ddp"

    def of(self, parameters: Sequence[Tensor], last: bool, state: State) -> list[str]:
        """Return the names of a bucket's parameters. ``last``: this is the last bucket of a step.

        Raises:
            RuntimeError: the parameters belong to another model.
            ValueError: what was loaded into ``state`` does not fit.
        """
        if self._open:
            for p in reversed(parameters):
                if id(p) not in self._names:
                    count = self._counts.get(p.dtype, 0)
                    self._counts[p.dtype] = count + 1
                    self._names[id(p)] = f"{str(p.dtype).removeprefix('torch.')}/{count}"
                    self._parameters.append(p)
                    _fit(self._names[id(p)], p, state)
            if last:
                self._open = False
                self._check(state)
        try:
            return [self._names[id(p)] for p in parameters]
        except KeyError:
            raise RuntimeError("this hook serves another DDP model already: call ddp_hook once for each") from None

    @property
    def names(self) -> Mapping[int, str]:
        """Names known so far, by the ``id`` of their parameters."""
        return self._names

    def items(self) -> list[tuple[str, Tensor]]:
        """Return the names and parameters known so far."""
        return [(self._names[id(p)], p) for p in self._parameters]

    def fit(self, state: State) -> None:
        """Check a state that has just been loaded, and move it to the parameters' device."""
        for name, parameter in self.items():
            _fit(name, parameter, state)
        if not self._open:
            self._check(state)

    def _check(self, state: State) -> None:
        """Leave out state of parameters of which DDP has no gradients: frozen since it was saved."""
        extra = {*state.residuals, *(owner for _, owner in state.locals)} - set(self._names.values())
        if extra:
            log.warning(
                "thinwire: %s: frozen now, so what the state holds for it is left out", ", ".join(sorted(extra)[:3])
            )
            for name in extra:
                state.residuals.pop(name, None)
            for key in [key for key in state.locals if key[1] in extra]:
                del state.locals[key]


def _fit(name: str, parameter: Tensor, state: State) -> None:
    loaded = state.residuals.get(name)
    if loaded is not None:
        if loaded.shape != parameter.shape:
            raise ValueError(
                f"the state has a residual of shape {list(loaded.shape)} for {name} (numbers count from the last), "
                f"but the model's is {list(parameter.shape)}: it was saved by another model"
            )
        state.residuals[name] = loaded.to(parameter.device, working_dtype(parameter.dtype))
    for (kind, owner), value in list(state.locals.items()):
        if owner == name:
            state.locals[kind, owner] = value.to(parameter.device, working_dtype(parameter.dtype))
    for (kind, owner), value in list(state.fields.items()):
        if owner == name:
            state.fields[kind, owner] = value.to(parameter.device)
