"""ViT: norms before attention and feed-forward block; tokens are patches, and none is padding."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from thinwire.systems.split.models.base import View


class _Attend(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.norm: nn.Module = layer.layernorm_before  # type: ignore[assignment]
        self.attention: nn.Module = layer.attention  # type: ignore[assignment]
        self.dropout = nn.Dropout(layer.dropout.p)  # type: ignore[union-attr, arg-type]

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        out: Tensor = self.dropout(self.attention(self.norm(hidden), mask)[0]) + hidden
        return out


class _Head(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.norm = model.get_submodule("vit.layernorm")
        self.classifier: nn.Module = model.classifier  # type: ignore[assignment]

    def forward(self, hidden: Tensor, lengths: Tensor | None) -> Tensor:
        logits: Tensor = self.classifier(self.norm(hidden)[:, 0])
        return logits


class ViTView(View):
    """ViT with a classifier on the class token."""

    model_type = "vit"
    classes = ("ViTForImageClassification",)
    embeddings_at = "vit.embeddings"
    layers_at = "vit.layers"
    parts_at: ClassVar = {
        "before": "layernorm_after", "first": "mlp.fc1", "activation": "mlp.activation_fn", "second": "mlp.fc2",
        "dropout": "dropout",
    }  # fmt: skip
    inputs = ("pixel_values",)
    uses_lengths = False

    @property
    def pixels(self) -> int:
        """Channels times height times width."""
        size = self.config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        return int(self.config.num_channels * height * width)

    def attend(self, layer: nn.Module) -> nn.Module:
        return _Attend(layer)

    def head(self, model: nn.Module) -> nn.Module:
        """Return norm and classifier."""
        return _Head(model)

    def mask(self, hidden: Tensor, lengths: Tensor | None) -> Tensor | None:
        """Return None: there is no padding."""
        return None
