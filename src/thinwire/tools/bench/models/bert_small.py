"""BERT-small (4 layers, width 512) on masked characters; the model itself comes from transformers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thinwire.tools.bench.corpus import standard_library
from thinwire.tools.bench.models.workload import Workload, beside

MASK = 103


def build(batch: int = 4, length: int = 64, lr: float = 1e-4) -> Workload:
    """Build the workload: 15 % of the characters are masked and predicted.

    Raises:
        ValueError: transformers is not installed.
    """
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
        shown = torch.where(hidden, torch.full_like(text, MASK), text + 1000)
        labels = torch.where(hidden, text + 1000, torch.full_like(text, -100))
        shown, labels = beside(model, shown, labels)
        result: Tensor = model(input_ids=shown, labels=labels).loss
        return result

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
