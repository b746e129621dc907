"""Which layers of a model have Kronecker factors, and how large the factors are."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinwire.core.program import working_dtype
from thinwire.systems.kfac.plan import FactorLayer


@dataclass(frozen=True, eq=False)
class Preconditioned:
    """One Linear or Conv2d layer to precondition; ``bias``: if it is trained; ``shape``: from which a plan is made."""

    name: str
    module: nn.Module
    bias: Tensor | None
    shape: FactorLayer

    @property
    def weight(self) -> Tensor:
        return self.module.weight  # type: ignore[return-value]

    def gradient(self) -> Tensor | None:
        """Return the gradient ``[d_G, d_A]``, a new tensor in the working dtype, the bias as last column; or None."""
        if self.weight.grad is None or (self.bias is not None and self.bias.grad is None):
            return None
        matrix = self.weight.grad.detach().to(working_dtype(self.weight.dtype), copy=self.bias is None).flatten(1)
        if self.bias is None:
            return matrix
        assert self.bias.grad is not None
        return torch.cat([matrix, self.bias.grad.to(matrix.dtype).unsqueeze(1)], 1)

    def parts(self, matrix: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return what a matrix ``[d_G, d_A]`` holds beside the gradients that it is for."""
        assert self.weight.grad is not None
        columns = self.shape.d_a - (self.bias is not None)
        parts = [(self.weight.grad, matrix[:, :columns].reshape(self.weight.shape))]
        if self.bias is not None:
            assert self.bias.grad is not None
            parts.append((self.bias.grad, matrix[:, -1]))
        return parts


def find_layers(
    model: nn.Module, skip_layers: Sequence[str] = (), max_dim: int = 8192
) -> tuple[list[Preconditioned], list[str]]:
    """Return the layers to precondition, in order of registration, and a sentence for each kind that is left out."""
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    found: list[Preconditioned] = []
    large: list[str] = []
    for name, module in model.named_modules():
        wanted = isinstance(module, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d))
        if not wanted or not module.weight.requires_grad or any(fnmatch.fnmatchcase(name, p) for p in skip_layers):
            continue
        if problem := _problem(module, owners):
            raise ValueError(f"{name or 'the model'} {problem}; leave it to the optimizer with skip_layers=[{name!r}]")
        bias = module.bias if module.bias is not None and module.bias.requires_grad else None
        weight: Tensor = module.weight
        d_a, itemsize = weight[0].numel() + (bias is not None), working_dtype(weight.dtype).itemsize
        shape = FactorLayer(name, d_a, weight.shape[0], itemsize)
        if max(shape.d_a, shape.d_g) > max_dim:
            large.append(name)
            continue
        found.append(Preconditioned(name, module, bias, shape))
    if not found:
        why = f"; {', '.join(large)} have factors above max_dim={max_dim}" if large else ""
        raise ValueError(
            f"there is no trainable Linear or Conv2d layer left to precondition{why}: check skip_layers= and "
            "max_dim=, or use the optimizer without K-FAC"
        )
    notes = [f"factors above max_dim={max_dim}, left to the optimizer: {', '.join(large)}"] if large else []
    return found, notes


def _problem(module: nn.Module, owners: Counter[int]) -> str:
    if isinstance(module, nn.ConvTranspose2d):
        return "is a transposed convolution, whose factors are not known here"
    if isinstance(module, nn.Conv2d) and module.groups > 1:
        return f"has groups={module.groups}, and a factor for each group would be needed"
    if "weight" not in module._parameters:
        return "makes its weight anew in each forward (weight_norm, spectral_norm, pruning)"
    if owners[id(module.weight)] > 1:
        return "shares its weight with another module, so its gradient is a sum over both"
    return ""
