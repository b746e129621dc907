"""GPT-2: norms before the blocks, causal attention, dense layers stored transposed (Conv1D)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from thinwire.systems.split.models.base import View, valid_tokens


class _Embed(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.wte = model.get_submodule("transformer.wte")
        self.wpe = model.get_submodule("transformer.wpe")
        self.dropout = model.get_submodule("transformer.drop")

    def forward(self, input_ids: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        out: Tensor = self.dropout(self.wte(input_ids) + self.wpe(places))
        return out


class _Attend(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.norm: nn.Module = layer.ln_1  # type: ignore[assignment]
        self.attention: nn.Module = layer.attn  # type: ignore[assignment]

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        out: Tensor = self.attention(self.norm(hidden), attention_mask=mask)[0] + hidden
        return out


class _Head(nn.Module):
    """Outputs for the last real token (classification), or for every token (language model)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.norm = model.get_submodule("transformer.ln_f")
        self.every_token = hasattr(model, "lm_head")
        self.score: nn.Module = model.lm_head if self.every_token else model.score  # type: ignore[assignment]

    def forward(self, hidden: Tensor, lengths: Tensor | None) -> Tensor:
        logits: Tensor = self.score(self.norm(hidden))
        if self.every_token:
            return logits
        last = torch.full((len(hidden),), hidden.shape[1]) if lengths is None else lengths.long()
        return logits[torch.arange(len(hidden), device=hidden.device), last.to(hidden.device) - 1]


class GPT2View(View):
    """GPT-2 as a classifier, or as a language model with an output layer of its own."""

    model_type = "gpt2"
    classes = ("GPT2ForSequenceClassification", "GPT2LMHeadModel")
    layers_at = "transformer.h"
    parts_at: ClassVar = {
        "before": "ln_2", "first": "mlp.c_fc", "activation": "mlp.act", "second": "mlp.c_proj",
        "dropout": "mlp.dropout",
    }  # fmt: skip

    @property
    def intermediate(self) -> int:
        """Width inside the feed-forward block."""
        return int(self.config.n_inner or 4 * self.hidden)

    def embeddings(self, model: nn.Module) -> nn.Module:
        """Return token and position embeddings."""
        return _Embed(model)

    def attend(self, layer: nn.Module) -> nn.Module:
        return _Attend(layer)

    def head(self, model: nn.Module) -> nn.Module:
        """Return norm and output layer."""
        return _Head(model)

    def mask(self, hidden: Tensor, lengths: Tensor | None) -> Tensor | None:
        """Return the causal mask, which also excludes padding."""
        from transformers.masking_utils import create_causal_mask

        made: Any = create_causal_mask(
            self.config,
            hidden,
            valid_tokens(hidden, lengths),
            None,  # no cache; its keyword was renamed in 5.24
        )
        return made  # type: ignore[no-any-return]
