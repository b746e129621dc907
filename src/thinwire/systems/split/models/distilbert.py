"""DistilBERT: BERT's layer with other names, without token types and pooler."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from thinwire.systems.split.models.base import View


class _Attend(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.attention: nn.Module = layer.attention  # type: ignore[assignment]
        self.norm: nn.Module = layer.sa_layer_norm  # type: ignore[assignment]

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        out: Tensor = self.norm(self.attention(hidden, attention_mask=mask)[0] + hidden)
        return out


class _Head(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.dense: nn.Module = model.pre_classifier  # type: ignore[assignment]
        self.dropout: nn.Module = model.dropout  # type: ignore[assignment]
        self.classifier: nn.Module = model.classifier  # type: ignore[assignment]

    def forward(self, hidden: Tensor, lengths: Tensor | None) -> Tensor:
        logits: Tensor = self.classifier(self.dropout(nn.functional.relu(self.dense(hidden[:, 0]))))
        return logits


class DistilBertView(View):
    """DistilBERT with a classifier on the first token."""

    model_type = "distilbert"
    classes = ("DistilBertForSequenceClassification",)
    embeddings_at = "distilbert.embeddings"
    layers_at = "distilbert.transformer.layer"
    parts_at: ClassVar = {
        "first": "ffn.lin1", "activation": "ffn.activation", "second": "ffn.lin2", "dropout": "ffn.dropout",
        "after": "output_layer_norm",
    }  # fmt: skip

    @property
    def intermediate(self) -> int:
        """Width inside the feed-forward block."""
        return int(self.config.hidden_dim)

    def attend(self, layer: nn.Module) -> nn.Module:
        return _Attend(layer)

    def head(self, model: nn.Module) -> nn.Module:
        """Return dense layer, ReLU, dropout and classifier."""
        return _Head(model)
