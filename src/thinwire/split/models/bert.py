"""BERT and RoBERTa: norms behind the residual connections."""

from __future__ import annotations

from torch import Tensor, nn

from thinwire.split.models.base import Parts, View


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
    layers_at = "bert.encoder.layer"

    def embeddings(self, model: nn.Module) -> nn.Module:
        """Words, positions, token types."""
        return model.get_submodule(f"{self.model_type}.embeddings")

    def parts(self, layer: nn.Module) -> Parts:
        """The names of transformers' BertLayer."""
        first, second = layer.get_submodule("intermediate"), layer.get_submodule("output")
        return Parts(
            attend=_Attend(layer.get_submodule("attention")),
            before=None,
            first=first.get_submodule("dense"),
            activation=first.intermediate_act_fn,  # type: ignore[arg-type]
            second=second.get_submodule("dense"),
            dropout=second.get_submodule("dropout"),
            after=second.get_submodule("LayerNorm"),
        )

    def head(self, model: nn.Module) -> nn.Module:
        """Pooler, dropout, classifier."""
        return _BertHead(model)


class RobertaView(BertView):
    """RoBERTa with its two-layer classifier on the first token."""

    model_type = "roberta"
    classes = ("RobertaForSequenceClassification",)
    layers_at = "roberta.encoder.layer"

    def head(self, model: nn.Module) -> nn.Module:
        """Its classification head."""
        return _RobertaHead(model)
