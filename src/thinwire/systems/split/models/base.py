"""How the surgery sees a model: embeddings, layers, and one layer taken apart around its feed-forward block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Parts:
    """A transformer layer in pieces: ``y = after(a + drop(second(activation(first(before(a))))))``, a = attend(x).

    Attributes:
        attend: ``(hidden, mask) -> a``: the attention with its own residual connection and norm.
        first: dense, h to f.
        activation: between the two.
        second: dense, f to h.
        dropout: after the second dense layer.
        before: the norm before the feed-forward block (ViT, GPT-2); None if there is none.
        after: the norm after the block's residual connection (BERT and similar models); None if there is none.
    """

    attend: nn.Module
    first: nn.Module
    activation: nn.Module
    second: nn.Module
    dropout: nn.Module
    before: nn.Module | None = None
    after: nn.Module | None = None


class View(ABC):
    """One architecture of transformers. Its only state is the configuration; modules are passed in.

    Attributes:
        model_type: as in the configuration.
        classes: names of the classes of transformers that can be cut.
        inputs: names of its embedding inputs; every batch has the first.
        uses_lengths: whether padding is masked.
        embeddings_at: path in a model to the embeddings.
        layers_at: path in a model to the list of layers.
        parts_at: paths in a layer, by the names of :class:`Parts`, for the parts that it has.
    """

    model_type: ClassVar[str]
    classes: ClassVar[tuple[str, ...]]
    inputs: ClassVar[tuple[str, ...]] = ("input_ids",)
    uses_lengths: ClassVar[bool] = True
    embeddings_at: ClassVar[str]
    layers_at: ClassVar[str]
    parts_at: ClassVar[Mapping[str, str]]

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    def hidden(self) -> int:
        """Width h of the residual stream."""
        return int(self.config.hidden_size)

    @property
    def intermediate(self) -> int:
        """Width f inside the feed-forward block."""
        return int(self.config.intermediate_size)

    @property
    def pixels(self) -> int:
        """Numbers per picture; 0 if the inputs are tokens."""
        return 0

    def embeddings(self, model: nn.Module) -> nn.Module:
        """Return a module ``(**inputs) -> [B, L, h]``."""
        return model.get_submodule(self.embeddings_at)

    def layers(self, model: nn.Module) -> nn.ModuleList:
        """Return the layers, in order."""
        found = model.get_submodule(self.layers_at)
        assert isinstance(found, nn.ModuleList)
        return found

    def parts(self, layer: nn.Module) -> Parts:
        """Return one layer in pieces."""
        found = {name: layer.get_submodule(path) for name, path in self.parts_at.items()}
        return Parts(attend=self.attend(layer), **found)

    @abstractmethod
    def attend(self, layer: nn.Module) -> nn.Module:
        """See :class:`Parts`."""

    @abstractmethod
    def head(self, model: nn.Module) -> nn.Module:
        """Return a module ``(hidden, lengths) -> logits``: everything after the last layer."""

    def mask(self, hidden: Tensor, lengths: Tensor | None) -> Tensor | None:
        """Return the attention mask for the layers."""
        from transformers.masking_utils import create_bidirectional_mask

        made: Any = create_bidirectional_mask(
            config=self.config, inputs_embeds=hidden, attention_mask=valid_tokens(hidden, lengths)
        )
        return made  # type: ignore[no-any-return]

    def run(self, layer: nn.Module, hidden: Tensor, mask: Tensor | None) -> Tensor:
        out: Tensor = layer(hidden, attention_mask=mask)
        return out


def valid_tokens(hidden: Tensor, lengths: Tensor | None) -> Tensor | None:
    """Return 1 at real tokens and 0 at padding, ``[B, L]``; None if nothing is padded."""
    length = hidden.shape[1]
    if lengths is None or bool((lengths == length).all()):
        return None
    return (torch.arange(length, device=hidden.device) < lengths.to(hidden.device)[:, None]).long()


def inputs_of(inputs: Mapping[str, Tensor], *names: str) -> dict[str, Tensor]:
    """Return the named inputs that are present."""
    return {name: inputs[name] for name in names if name in inputs}


def dense_weight(dense: nn.Module) -> Tensor:
    """Return the weight ``[out, in]`` of a Linear, or of transformers' Conv1D, which stores it transposed."""
    weight: Tensor = dense.weight  # type: ignore[assignment]
    return weight if isinstance(dense, nn.Linear) else weight.T


def dense_bias(dense: nn.Module) -> Tensor:
    """Return the bias ``[out]``; zeros if there is none."""
    bias: Tensor | None = dense.bias  # type: ignore[assignment]
    weight = dense_weight(dense)
    return bias if bias is not None else weight.new_zeros(len(weight))
