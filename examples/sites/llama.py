"""A decoder as Llama's, in three sizes: to count what 7 and 70 billion parameters need, and to train a small one.

``thinwire plan llama:model:size=7b --memory --shards 8 --sites 2 --dtype bf16`` builds it on the meta device.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

SIZES = {  # layers, width, heads, those of keys and values, hidden, vocabulary
    "small": (4, 128, 4, 2, 344, 256),
    "7b": (32, 4096, 32, 32, 11008, 32000),
    "70b": (80, 8192, 64, 8, 28672, 32000),
}


class Norm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, shared: int, hidden: int):
        super().__init__()
        self.heads, self.shared, self.size = heads, shared, width // heads
        self.norm, self.mlp_norm = Norm(width), Norm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * shared * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.norm(x)
        q = self.q(y).view(batch, length, self.heads, self.size).transpose(1, 2)
        k, v = self.kv(y).view(batch, length, 2, self.shared, self.size).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        y = self.mlp_norm(x)
        return x + self.down(silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """Positions are learnt here, of up to 256 tokens; Llama rotates queries and keys, which needs no parameters."""

    def __init__(self, layers: int, width: int, heads: int, shared: int, hidden: int, vocabulary: int):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(torch.zeros(256, width))
        self.layers = nn.ModuleList(Block(width, heads, shared, hidden) for _ in range(layers))
        self.norm, self.head = Norm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def model(size: str = "small") -> Model:
    return Model(*SIZES[size])
