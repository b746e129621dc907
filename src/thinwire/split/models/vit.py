"""ViT: norms in front of attention and feed-forward block; tokens are patches, and none is padding."""

from __future__ import annotations

from torch import Tensor, nn

from thinwire.split.models.base import Parts, View


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
    layers_at = "vit.layers"
    inputs = ("pixel_values",)
    uses_lengths = False

    @property
    def pixels(self) -> int:
        """Channels, height, width, multiplied."""
        size = self.config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        return int(self.config.num_channels * height * width)

    def embeddings(self, model: nn.Module) -> nn.Module:
        """Patches, positions, the class token."""
        return model.get_submodule("vit.embeddings")

    def parts(self, layer: nn.Module) -> Parts:
        """The names of transformers' ViTLayer."""
        mlp = layer.get_submodule("mlp")
        return Parts(
            attend=_Attend(layer),
            before=layer.get_submodule("layernorm_after"),
            first=mlp.get_submodule("fc1"),
            activation=mlp.get_submodule("activation_fn"),
            second=mlp.get_submodule("fc2"),
            dropout=layer.get_submodule("dropout"),
            after=None,
        )

    def head(self, model: nn.Module) -> nn.Module:
        """Norm and classifier."""
        return _Head(model)

    def mask(self, hidden: Tensor, lengths: Tensor | None) -> Tensor | None:
        """None: every patch is real."""
        return None
