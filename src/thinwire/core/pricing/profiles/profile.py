"""What the planner knows of a model: its tensors in backward order, and how long compute takes."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from thinwire.core.pricing.checks import Hashed, check_number
from thinwire.core.pricing.curves import Provenance, check_provenance
from thinwire.core.records import UNREADABLE


@dataclass(frozen=True)
class TensorTime:
    """One parameter, and the backward seconds from the previous gradient to this one.

    ``kind``: class of the module that owns it ("Embedding"), if known: some methods keep some kinds dense.
    """

    name: str
    shape: tuple[int, ...]
    backward_seconds: float
    kind: str = ""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def module(self) -> str:
        """The module that owns it."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class ModuleTime:
    """One module, in forward order, and its own forward seconds."""

    name: str
    forward_seconds: float


@dataclass(frozen=True)
class ModelProfile(Hashed):
    """A model as numbers, for one batch size and device.

    Attributes:
        name: name of the model.
        tensors: in backward order: the gradient that is ready first comes first.
        forward_seconds: the whole forward pass; may exceed the sum over modules.
        modules: in forward order; a tensor belongs to the module whose name its own name begins with.
        dtype_bytes: bytes of one gradient element.
        provenance: where the seconds come from.
        source: provenance in free text.
    """

    name: str
    tensors: tuple[TensorTime, ...]
    forward_seconds: float
    modules: tuple[ModuleTime, ...] = ()
    dtype_bytes: int = 4
    provenance: Provenance = "assumed"
    source: str = ""

    def __post_init__(self) -> None:
        check_provenance(self.provenance)
        check_number("forward_seconds", self.forward_seconds)
        if self.dtype_bytes < 1:
            raise ValueError(f"dtype_bytes must be at least 1, not {self.dtype_bytes}")
        for i, tensor in enumerate(self.tensors):
            check_number(f"tensors[{i}].backward_seconds", tensor.backward_seconds)
        for i, module in enumerate(self.modules):
            check_number(f"modules[{i}].forward_seconds", module.forward_seconds)
        if len({tensor.name for tensor in self.tensors}) < len(self.tensors):
            raise ValueError("tensors: a name appears twice")

    @property
    def sizes(self) -> list[int]:
        """Elements per tensor, in backward order, as the merge rules need them."""
        return [tensor.size for tensor in self.tensors]

    @property
    def backward_seconds(self) -> list[float]:
        """Seconds per tensor, in backward order, as the merge rules need them."""
        return [tensor.backward_seconds for tensor in self.tensors]

    @property
    def elements(self) -> int:
        """Elements of the whole model."""
        return sum(self.sizes)

    def scaled(self, factor: float) -> ModelProfile:
        """Return the same model on a device that takes ``factor`` times as long."""
        check_number("factor", factor)
        tensors = tuple(replace(t, backward_seconds=t.backward_seconds * factor) for t in self.tensors)
        modules = tuple(replace(m, forward_seconds=m.forward_seconds * factor) for m in self.modules)
        source = f"{self.source}, scaled by {factor:g}".lstrip(", ")
        return replace(
            self,
            tensors=tensors,
            modules=modules,
            forward_seconds=self.forward_seconds * factor,
            provenance="assumed",
            source=source,
        )

    def to_json(self) -> str:
        """Return the profile as JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ModelProfile:
        """Read back what ``to_json`` wrote.

        Raises:
            ValueError: the text is not a profile.
        """
        try:
            data: Any = json.loads(text)
            tensors = tuple(
                TensorTime(
                    str(t["name"]),
                    tuple(int(n) for n in t["shape"]),
                    float(t["backward_seconds"]),
                    str(t.get("kind", "")),
                )
                for t in data["tensors"]
            )
            modules = tuple(ModuleTime(str(m["name"]), float(m["forward_seconds"])) for m in data["modules"])
            return cls(
                str(data["name"]),
                tensors,
                float(data["forward_seconds"]),
                modules,
                int(data["dtype_bytes"]),
                data["provenance"],
                str(data["source"]),
            )
        except UNREADABLE as error:
            raise ValueError(f"this is not a thinwire profile: {error}") from error
