"""A character-level GPT on the standard library's source: about 10.8 million parameters in its default size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.tools.bench.corpus import VOCABULARY, standard_library
from thinwire.tools.bench.models.workload import Workload, beside


class TransformerBlock(nn.Module):
    """Attention and a two-layer perceptron, each behind a layer norm and a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return y


class CharGPT(nn.Module):
    """A causal transformer over bytes; the output layer is its own matrix."""

    def __init__(self, layers: int = 6, width: int = 384, heads: int = 6, block: int = 64) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(block, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of the next character, ``(batch, length, 256)``."""
        x = self.characters(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(
    layers: int = 6,
    width: int = 384,
    heads: int = 6,
    block: int = 64,
    batch: int = 8,
    lr: float = 1e-3,
    fused: bool = True,
    shares: int = 1,
) -> Workload:
    """Build the workload: ``batch`` sequences of ``block`` characters per rank and step; AdamW, fused or default.

    With ``shares`` the training text is cut into that many pieces, and rank r trains on piece r alone (other packages).
    """
    if shares < 1:
        raise ValueError(f"chargpt: shares={shares} must be at least 1")
    if width % heads:
        raise ValueError(f"chargpt: width={width} is not a multiple of heads={heads}")
    corpus = standard_library()

    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        text, target = beside(model, *corpus.batch(batch, block, step=step, rank=rank, shares=shares))
        return F.cross_entropy(model(text).flatten(0, 1), target.flatten())

    def evaluate(model: nn.Module, step: int, rank: int) -> Tensor:
        text, target = beside(model, *corpus.batch(16, block, step=step, rank=rank, validation=True))
        return F.cross_entropy(model(text).flatten(0, 1), target.flatten())

    return Workload(
        name="chargpt",
        model=CharGPT(layers, width, heads, block),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(
            model.parameters(),
            lr=lr,
            weight_decay=0.01,
            fused=fused or None,  # None leaves the choice to torch, False turns it off
        ),
        describe=f"character GPT, {layers} layers, width {width}, batch {batch} x {block}, text: the standard library"
        + (f" in {shares} shares" if shares > 1 else "")
        + ("" if fused else ", torch's default AdamW"),
        evaluate=evaluate,
    )
