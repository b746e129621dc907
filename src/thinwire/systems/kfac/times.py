"""How long the passes and the factors of each layer take: the input for planning fusion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.core.pricing.profiles import ModelProfile, kronecker_shapes
from thinwire.systems.kfac.plan import FactorLayer


@dataclass(frozen=True)
class LayerTimes:
    """Seconds, one entry per layer, in the order of the layers.

    Attributes:
        a_steps: from the previous layer's A being ready, in forward order, to this one's: the work between, and this
            factor.
        g_steps: the same for G, in backward order.
        a_factor, g_factor: the share of these for computing the factor itself.
        a_order, g_order: the layers in the order in which their A, and their G, become ready.
    """

    a_steps: tuple[float, ...]
    g_steps: tuple[float, ...]
    a_factor: tuple[float, ...]
    g_factor: tuple[float, ...]
    a_order: tuple[int, ...]
    g_order: tuple[int, ...]

    @classmethod
    def unknown(cls, layers: int) -> LayerTimes:
        """Return times in which everything is ready at once, in the order of the layers."""
        nothing, order = (0.0,) * layers, tuple(range(layers))
        return cls(nothing, nothing, nothing, nothing, order, order[::-1])

    @classmethod
    def of_profile(cls, profile: ModelProfile, layers: Sequence[FactorLayer]) -> LayerTimes:
        """Return the times from a model's profile. A factor takes d_A/d_G, or d_G/d_A, of its layer's forward time.

        The layer multiplies rows of d_A by a d_A x d_G matrix; A multiplies these rows by one another.
        """
        forward = {module.name: module.forward_seconds for module in profile.modules}
        place = {layer.name: i for i, layer in enumerate(layers)}
        own = [forward.get(layer.name, 0.0) for layer in layers]
        a_factor = tuple(t * layer.d_a / layer.d_g for t, layer in zip(own, layers))
        g_factor = tuple(t * layer.d_g / layer.d_a for t, layer in zip(own, layers))
        a_steps, a_order, waiting = [0.0] * len(layers), [], 0.0
        for module in profile.modules:
            if module.name in place:
                i = place.pop(module.name)
                a_order.append(i)
                a_steps[i], waiting = waiting + a_factor[i], 0.0
            waiting += module.forward_seconds
        a_order += place.values()
        place = {layer.name: i for i, layer in enumerate(layers)}
        g_steps, g_order, waiting = [0.0] * len(layers), [], 0.0
        # G is ready before its layer's own backward, which begins with the layer's first tensor
        for tensor in profile.tensors:
            if tensor.module in place:
                i = place.pop(tensor.module)
                g_order.append(i)
                g_steps[i], waiting = waiting + g_factor[i], 0.0
            waiting += tensor.backward_seconds
        g_order += place.values()
        return cls(tuple(a_steps), tuple(g_steps), a_factor, g_factor, tuple(a_order), tuple(g_order))


def layers_of(profile: ModelProfile, *, max_dim: int = 8192) -> tuple[FactorLayer, ...]:
    """Return the layers of a profile that K-FAC can precondition, in order of registration."""
    shapes = kronecker_shapes(profile)
    return tuple(FactorLayer(name, d_a, d_g) for name, d_a, d_g in shapes if max(d_a, d_g) <= max_dim)
