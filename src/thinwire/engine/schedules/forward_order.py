"""Find out which parameters a module's forward reads, from the order in which modules are called.

The parameters of a module that is never called go to the nearest enclosing module that is: ``MultiheadAttention`` reads
the weight of its ``out_proj`` without calling it. A shared parameter is read by all its owners.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from thinwire.engine.parameters import Managed


class ForwardOrder:
    """The forward order of one model.

    Args:
        model: the root module.
        managed: its trainable parameters.
        early: indices of parameters that are needed before all others.

    Attributes:
        index: of the parameters, by ``id``.
        learning: whether the order is still unknown.
    """

    def __init__(self, model: nn.Module, managed: Sequence[Managed], early: Iterable[int] = ()) -> None:
        self.model, self.index, self.early = model, {id(m.parameter): m.index for m in managed}, sorted(early)
        self.learning, index = True, self.index
        self._names: dict[nn.Module, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self._names.setdefault(module, []).append(name)
        self._own = {
            module: [index[id(p)] for p in module.parameters(recurse=False) if id(p) in index] for module in self._names
        }
        self._called: dict[nn.Module, None] = {}
        self._reads = {module: tuple(own) for module, own in self._own.items()}

    @property
    def modules(self) -> list[nn.Module]:
        """All modules that may read a parameter: those with a trainable one in or below them."""
        return [m for m in self._names if any(p.requires_grad for p in m.parameters())]

    def called(self, module: nn.Module) -> None:
        """Note that a module's forward begins, until the order is known."""
        if self.learning:
            self._called.setdefault(module)

    def reads(self, module: nn.Module) -> tuple[int, ...]:
        """Return indices of the parameters that must be up to date when a module's forward begins."""
        return self._reads.get(module, ())

    def order(self) -> list[int]:
        """Return all parameters in the order in which they are needed, and stop learning.

        From now on, parameters of modules that were never called count as read by the modules around them.
        """
        self.learning = False
        by_name = {name: module for module, names in self._names.items() for name in names}
        adopted: dict[nn.Module, list[int]] = {}
        orphans: list[int] = []
        for module, own in self._own.items():
            if not own or module in self._called:
                continue
            parents = {parent for name in self._names[module] if (parent := self._nearest(name, by_name)) is not None}
            for parent in parents:
                adopted.setdefault(parent, []).extend(own)
            if not parents:
                orphans.extend(own)
        if self._called:
            adopted.setdefault(next(iter(self._called)), []).extend(orphans)
        self._reads = {m: tuple(dict.fromkeys([*own, *adopted.get(m, ())])) for m, own in self._own.items()}
        wanted = [*self.early, *orphans, *(i for module in self._called for i in self._reads[module])]
        return list(dict.fromkeys([*wanted, *range(len(self.index))]))

    def _nearest(self, name: str, by_name: dict[str, nn.Module]) -> nn.Module | None:
        while name:
            name = name.rpartition(".")[0]
            if by_name[name] in self._called:
                return by_name[name]
        return None
