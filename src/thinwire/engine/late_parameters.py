"""Detect parameters that became trainable after ``attach`` (unfrozen, added, replaced): nothing averages them."""

from __future__ import annotations

import weakref
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from thinwire.engine.parameters import ignored

_registered = 0  # modules and parameters registered anywhere in the process since the first ``attach``
_counting = False


def _count(*_: Any) -> None:
    global _registered
    _registered += 1


class LateParameters:
    """The check of one attached model before each optimizer step. It walks the model only if something is new."""

    def __init__(self, model: nn.Module) -> None:
        global _counting
        if not _counting:
            _counting = True
            register_module_module_registration_hook(_count)
            register_module_parameter_registration_hook(_count)
        self._model, self._looked = model, _registered
        self._foreign: dict[int, weakref.ref[Tensor]] = {}

    def check(self, optimizer: torch.optim.Optimizer, known: Container[int]) -> bool:
        """Return whether an optimizer that is about to step owns parameters of the model.

        Args:
            optimizer: any.
            known: the ``id`` of each parameter whose gradients are exchanged.

        Raises:
            RuntimeError: the optimizer would use gradients of the model that were not exchanged; names them.
        """
        ours, strange = False, []
        for group in optimizer.param_groups:
            for p in group["params"]:
                if id(p) in known:
                    ours = True
                elif p.grad is not None and ((ref := self._foreign.get(id(p))) is None or ref() is not p):
                    strange.append(p)
        if strange or (ours and self._looked != _registered):
            self._looked = _registered
            self._refuse(known)
            self._foreign.update((id(p), weakref.ref(p)) for p in strange)
        return ours

    def _refuse(self, known: Container[int]) -> None:
        named, left_out = self._model.named_parameters(), ignored(self._model)
        late = [name for name, p in named if p.requires_grad and id(p) not in known and name not in left_out]
        if late:
            more = f" and {len(late) - 3} more" if len(late) > 3 else ""
            raise RuntimeError(
                f"{', '.join(late[:3])}{more}: trainable now, but not when the model was attached (frozen then, added "
                "or replaced since), so what they learn is not averaged. Call close() and attach again after such a "
                "change; state_dict() and load_state_dict() carry residuals over"
            )
