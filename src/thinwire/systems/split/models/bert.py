"""BERT and RoBERTa: norms after the residual connections."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from thinwire.systems.split.models.base import View


class _Attend(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        out: Tensor = self.attention(hidden, mask)[0]
        return out


class _BertHead(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.pooler = model.get_submodule("bert.pooler")
        self.dropout = model.get_submodule("dropout")
        self.classifier = model.get_submodule("classifier")

    def forward(self, hidden: Tensor, lengths: Tensor | None) -> Tensor:
        logits: Tensor = self.classifier(self.dropout(self.pooler(hidden)))
        return logits


class _RobertaHead(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.classifier: nn.Module = model.classifier  # type: ignore[assignment]

    def forward(self, hidden: Tensor, lengths: Tensor | None) -> Tensor:
        logits: Tensor = self.classifier(hidden)
        return logits


class BertView(View):
    """BERT with a classifier on the first token."""

    model_type = "bert"
    classes = ("BertForSequenceClassification",)
    inputs = ("input_ids", "token_type_ids")
    embeddings_at = "bert.embeddings"
    layers_at = "bert.encoder.layer"
    parts_at: ClassVar = {
        "first": "intermediate.dense", "activation": "intermediate.intermediate_act_fn", "second": "output.dense",
        "dropout": "output.dropout", "after": "output.LayerNorm",
    }  # fmt: skip

    def attend(self, layer: nn.Module) -> nn.Module:
        return _Attend(layer.get_submodule("attention"))

    def head(self, model: nn.Module) -> nn.Module:
        """Return pooler, dropout and classifier."""
        return _BertHead(model)


class RobertaView(BertView):
    """RoBERTa with its two-layer classifier on the first token."""

    model_type = "roberta"
    classes = ("RobertaForSequenceClassification",)
    embeddings_at = "roberta.embeddings"
    layers_at = "roberta.encoder.layer"

    def head(self, model: nn.Module) -> nn.Module:
        """Return its classification head."""
        return _RobertaHead(model)
