"""Models by name and a few numbers, with random weights; or a pre-trained one from a directory on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire.systems.split.models import VIEWS, build, require

_SIZES = {"small": (4, 256, 4, 1024), "base": (12, 768, 12, 3072), "large": (24, 1024, 16, 4096)}
_CLASSES = {
    "bert": "BertForSequenceClassification",
    "roberta": "RobertaForSequenceClassification",
    "distilbert": "DistilBertForSequenceClassification",
    "vit": "ViTForImageClassification",
    "gpt2": "GPT2ForSequenceClassification",
}
_NAMES = {  # the configuration's names for layers, width, heads, inner width, positions
    "bert": ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "max_position_embeddings"),
    "distilbert": ("n_layers", "dim", "n_heads", "hidden_dim", "max_position_embeddings"),
    "gpt2": ("n_layer", "n_embd", "n_head", "n_inner", "n_positions"),
}


def sizes_of(
    name: str,
    layers: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
    intermediate: int | None = None,
) -> tuple[str, tuple[int, int, int, int]]:
    """Return the architecture of a name, and its layers, width, heads and inner width; see :func:`preset`.

    Raises:
        ValueError: the name is unknown, or the numbers do not match.
    """
    kind, dash, size = name.partition("-")
    size = size if dash else "small"
    if kind not in _CLASSES or size not in _SIZES:
        raise ValueError(
            f"model {name!r} is unknown; use one of {', '.join(_CLASSES)}, with -small, -base or -large, or a "
            "directory that holds a pre-trained one"
        )
    of_size = _SIZES[size]
    inner = intermediate or (4 * hidden if hidden else of_size[3])
    numbers = (layers or of_size[0], hidden or of_size[1], heads or of_size[2], inner)
    if min(numbers) < 1 or numbers[1] % numbers[2]:
        raise ValueError(f"hidden={numbers[1]} must be a multiple of heads={numbers[2]}, and all sizes above 0")
    return kind, numbers


def preset(
    name: str,
    *,
    classes: int,
    vocabulary: int,
    length: int = 512,
    pad: int = 0,
    seed: int = 0,
    layers: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
    intermediate: int | None = None,
    dropout: float = 0.1,
) -> nn.Module:
    """Build ``"bert"``, ``"bert-base"``, ``"distilbert-small"``, ...: an architecture and a size, with random weights.

    Args:
        name: bert, roberta, distilbert, vit or gpt2; -small (4 layers, width 256; the default), -base or -large.
        classes: number of outputs.
        vocabulary: number of token ids.
        length: of the longest sequence.
        pad: id of the padding token.
        seed: for the weights.
        layers: replaces the size's number; so do the next three.
        hidden: h.
        heads: of attention.
        intermediate: f; 4 h if only ``hidden`` is given.
        dropout: of hidden states and attention.

    Raises:
        ValueError: the name is unknown, or the numbers do not match.
    """
    kind, numbers = sizes_of(name, layers, hidden, heads, intermediate)
    config: dict[str, Any] = dict(zip(_NAMES.get(kind, _NAMES["bert"]), (*numbers, length + 2)))
    config |= {"num_labels": classes, "pad_token_id": pad}
    if kind != "vit":
        config |= {"vocab_size": vocabulary, "bos_token_id": None, "eos_token_id": None}
    names = {"distilbert": ("dropout", "attention_dropout"), "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    for each in names.get(kind, ("hidden_dropout_prob", "attention_probs_dropout_prob")):
        config[each] = dropout
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(_CLASSES[kind], config)


def pretrained(directory: str | Path, classes: int, seed: int = 0) -> nn.Module:
    """Load a pre-trained encoder from a directory (``config.json``, ``model.safetensors``), with a new head.

    Nothing is downloaded; no code from the directory is run; weights are read only from safetensors.

    Args:
        directory: as transformers saves it.
        classes: number of outputs.
        seed: for weights that the directory does not hold, such as those of the head.

    Raises:
        ValueError: the directory holds no such model, or one without a view.
    """
    transformers = require("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{directory} does not hold a transformers model: {error}") from error
    for view in VIEWS:
        if view.model_type == config.model_type:
            try:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(seed)
                    model: nn.Module = getattr(transformers, view.classes[0]).from_pretrained(
                        directory,
                        num_labels=classes,
                        local_files_only=True,
                        use_safetensors=True,
                        ignore_mismatched_sizes=True,  # a head for other classes is initialised anew
                    )
            except (OSError, ValueError, RuntimeError) as error:
                raise ValueError(f"{directory} cannot be loaded as {view.classes[0]}: {error}") from error
            return model
    known = ", ".join(view.model_type for view in VIEWS)
    raise ValueError(f"{directory} holds a {config.model_type}, which cannot be split: use one of {known}")
