"""Small random models of every architecture, and batches for them."""

import torch

from thinwire.systems.split import Batch
from thinwire.systems.split.models import build

SIZES = {
    "bert": {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64},
    "distilbert": {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 40, "bos_token_id": None, "eos_token_id": None},
}
CLASSES = {
    "bert": "BertForSequenceClassification",
    "roberta": "RobertaForSequenceClassification",
    "distilbert": "DistilBertForSequenceClassification",
    "vit": "ViTForImageClassification",
    "gpt2": "GPT2ForSequenceClassification",
    "gpt2-lm": "GPT2LMHeadModel",
}
ARCHITECTURES = tuple(CLASSES)
VOCABULARY, LABELS, LENGTHS = 50, 5, (7, 4, 5)


def model(architecture="bert", dtype=torch.float32, seed=0, dropout=0.1, **more):
    """Weights large enough that every part of the model matters."""
    kind = architecture.partition("-")[0]
    config = dict(SIZES.get(kind, SIZES["bert"]), num_labels=LABELS, vocab_size=VOCABULARY, pad_token_id=0, **more)
    if kind == "vit":
        config |= {"image_size": 8, "patch_size": 2}
    if architecture == "gpt2-lm":
        config["tie_word_embeddings"] = more.get("tie_word_embeddings", False)
    rates = {"distilbert": ("dropout", "attention_dropout"), "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    for name in rates.get(kind, ("hidden_dropout_prob", "attention_probs_dropout_prob")):
        config[name] = dropout
    made = build(CLASSES[architecture], config)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.2)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.1)
    return made.to(dtype)


def batch(architecture="bert", seed=0, lengths=LENGTHS, dtype=torch.float32, slots=None):
    """Padding on the right, with 0."""
    draw = torch.Generator().manual_seed(seed)
    count, longest = len(lengths), max(lengths)
    slots = torch.tensor(list(slots) if slots is not None else list(range(count)))
    labels = torch.randint(0, LABELS, (count,), generator=draw)
    if architecture == "vit":
        return Batch({"pixel_values": torch.randn(count, 3, 8, 8, generator=draw).to(dtype)}, labels, None, slots)
    ids = torch.randint(1, VOCABULARY, (count, longest), generator=draw)
    ids[torch.arange(longest) >= torch.tensor(lengths)[:, None]] = 0
    if architecture == "gpt2-lm":
        labels = torch.where(ids == 0, -100, ids)
    return Batch({"input_ids": ids}, labels, torch.tensor(lengths), slots)
