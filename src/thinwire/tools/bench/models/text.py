"""Models of text: a character-level GPT and BERT-small, on the source of Python's standard library.

Real text without a download, split into batches by (step, rank).
"""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.core.checks import check_choice
from thinwire.tools.bench.models.workload import Workload, beside, draws

VOCABULARY = 256
_SKIPPED = {"__pycache__", "test", "tests", "site-packages", "dist-packages", "idlelib", "lib-dynload"}
_LEAST = 200_000


@dataclass(frozen=True)
class Corpus:
    train: Tensor
    validation: Tensor

    def batch(
        self, size: int, length: int, *, step: int, rank: int, validation: bool = False, shares: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Inputs and next characters, ``(size, length)`` int64; of ``shares`` pieces of the text, this rank's."""
        text = self.validation if validation else self.train
        text = text.tensor_split(shares)[rank % shares]
        starts = torch.randint(text.numel() - length - 1, (size,), generator=draws(step, rank, held_out=validation))
        windows = text[starts[:, None] + torch.arange(length + 1)].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


@lru_cache(maxsize=2)
def standard_library(most_bytes: int = 4_000_000, validation_share: float = 0.1) -> Corpus:
    """Return the sources of the standard library in sorted order, at most ``most_bytes``; the end is held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED)
        for name in sorted(files):
            if name.endswith(".py") and len(text) < most_bytes:
                text += (Path(folder) / name).read_bytes()
        if len(text) >= most_bytes:
            break
    if len(text) < _LEAST:
        raise ValueError(
            f"this Python has no sources of its standard library under {root}; use --model mlp or resnet18"
        )
    everything = torch.frombuffer(text[:most_bytes], dtype=torch.uint8).clone()
    cut = int(everything.numel() * (1 - validation_share))
    return Corpus(everything[:cut], everything[cut:])


class TransformerBlock(nn.Module):
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

    def __init__(
        self, layers: int = 6, width: int = 384, heads: int = 6, block: int = 64, scaled_init: bool = False
    ) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(block, width)
        blocks = [TransformerBlock(width, heads) for _ in range(layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if scaled_init:
            for one in blocks:
                for last in (one.out, one.down):
                    nn.init.normal_(last.weight, std=0.02 / (2 * layers) ** 0.5)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of the next character, ``(batch, length, 256)``."""
        x = self.characters(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def chargpt(
    layers: int = 6,
    width: int = 384,
    heads: int = 6,
    block: int = 64,
    batch: int = 8,
    lr: float = 1e-3,
    fused: bool = True,
    shares: int = 1,
    optimizer: str = "adamw",
    held_out: int = 16,
    decay: float = 0.01,
    beta2: float = 0.999,
    clip: float = 0.0,
    scaled_init: bool = False,
) -> Workload:
    """``batch`` sequences of ``block`` characters per rank and step, and ``held_out`` to evaluate.

    With ``shares`` rank r trains on piece r alone. ``optimizer``: "adamw", or "muon" for the matrices of the blocks.
    ``clip``: the most that a rank's gradient may be long; 0: any. ``scaled_init``: what is added to a residual starts
    smaller by the root of how many are added, as in GPT-2.
    """
    check_choice("chargpt: optimizer", optimizer, ("adamw", "muon"))
    if shares < 1:
        raise ValueError(f"chargpt: shares={shares} must be at least 1")
    if width % heads:
        raise ValueError(f"chargpt: width={width} is not a multiple of heads={heads}")
    corpus = standard_library()

    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        text, target = beside(model, *corpus.batch(batch, block, step=step, rank=rank, shares=shares))
        return F.cross_entropy(model(text).flatten(0, 1), target.flatten())

    def evaluate(model: nn.Module, step: int, rank: int) -> Tensor:
        text, target = beside(model, *corpus.batch(held_out, block, step=step, rank=rank, validation=True))
        return F.cross_entropy(model(text).flatten(0, 1), target.flatten())

    def made(model: nn.Module) -> Optimizer | list[Optimizer]:
        def clipped(optimizer: Optimizer, args: object, kwargs: object) -> None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)

        named = list(model.named_parameters())
        inner = [p for name, p in named if optimizer == "muon" and "blocks." in name and p.dim() == 2]
        rest = [p for _, p in named if not any(p is one for one in inner)]
        adamw: Optimizer = torch.optim.AdamW(
            rest, lr, (0.9, beta2), weight_decay=decay, fused=fused or None,  # None leaves the choice to torch
        )  # fmt: skip
        found = [torch.optim.Muon(inner, lr, decay, adjust_lr_fn="match_rms_adamw"), adamw] if inner else [adamw]
        if clip:
            found[0].register_step_pre_hook(clipped)
        return found if inner else adamw

    return Workload(
        name="chargpt",
        model=CharGPT(layers, width, heads, block, scaled_init),
        loss=loss,
        optimizer=made,
        describe=f"character GPT, {layers} layers, width {width}, batch {batch} x {block}, text: the standard library"
        + (f" in {shares} shares" if shares > 1 else "")
        + ("" if fused else ", torch's default AdamW")
        + (", Muon" if optimizer == "muon" else "")
        + (", GPT-2's initial weights" if scaled_init else ""),
        evaluate=evaluate,
    )


def bert_small(batch: int = 4, length: int = 64, lr: float = 1e-4) -> Workload:
    """15 % of the characters are masked and predicted."""
    try:
        from transformers import BertConfig, BertForMaskedLM
    except ImportError as error:
        raise ValueError("bert-small needs transformers: pip install 'thinwire[transformers]'") from error
    config = BertConfig(hidden_size=512, num_hidden_layers=4, num_attention_heads=8, intermediate_size=2048)
    corpus = standard_library()

    def loss_of(model: nn.Module, step: int, rank: int, size: int, validation: bool) -> Tensor:
        text, _ = corpus.batch(size, length, step=step, rank=rank, validation=validation)
        hidden = torch.rand(text.shape, generator=torch.Generator().manual_seed(step * 1_000_003 + rank)) < 0.15
        hidden[:, 0] = True
        shown = torch.where(hidden, torch.full_like(text, 103), text + 1000)
        labels = torch.where(hidden, text + 1000, torch.full_like(text, -100))
        shown, labels = beside(model, shown, labels)
        return model(input_ids=shown, labels=labels).loss  # type: ignore[no-any-return]

    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        return loss_of(model, step, rank, batch, validation=False)

    def evaluate(model: nn.Module, step: int, rank: int) -> Tensor:
        return loss_of(model, step, rank, 16, validation=True)

    return Workload(
        name="bert-small",
        model=BertForMaskedLM(config),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=lr, fused=True),
        describe=f"BERT-small, masked characters, batch {batch} x {length}",
        evaluate=evaluate,
    )
