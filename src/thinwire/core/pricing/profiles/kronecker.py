"""The layers of a profile that have Kronecker factors, and the sizes of the factors."""

from __future__ import annotations

from thinwire.core.pricing.profiles.profile import ModelProfile


def kronecker_shapes(profile: ModelProfile) -> list[tuple[str, int, int]]:
    """Return (module, d_A, d_G) in order of registration: weights with two or four dimensions; not embeddings.

    Args:
        profile: its tensors are named ``<module>.weight`` and ``<module>.bias``; a bias adds a row to A.
    """
    biased = {tensor.module for tensor in profile.tensors if tensor.name.endswith(".bias")}
    found = []
    for tensor in reversed(profile.tensors):
        matrix = tensor.name.endswith(".weight") and len(tensor.shape) in (2, 4)
        if matrix and not tensor.kind.startswith("Embedding"):
            rows = tensor.shape[0]
            found.append((tensor.module, tensor.size // rows + (tensor.module in biased), rows))
    return found
