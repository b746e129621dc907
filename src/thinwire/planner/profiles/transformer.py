"""BERT and GPT-2, with parameters as transformers registers them."""

from __future__ import annotations

from thinwire.planner.profiles.layers import Layer, linear, norm


def _table(name: str, rows: int, hidden: int, positions: int) -> Layer:
    return Layer(name, float(hidden * positions), (("weight", (rows, hidden)),), "Embedding")


def _attention(name: str, hidden: int, positions: int) -> Layer:
    """Return scores and weighted sum: no parameters, two products of positions x positions x hidden."""
    return Layer(name, 4.0 * positions**2 * hidden)


def bert(hidden: int, depth: int, positions: int, *, vocabulary: int = 30522, heads: bool = False) -> list[Layer]:
    """Return the layers of a BERT encoder with pooler; ``heads=True`` adds both pre-training heads, decoder tied."""
    layers = [
        _table("embeddings.word_embeddings", vocabulary, hidden, positions),
        _table("embeddings.position_embeddings", 512, hidden, positions),
        _table("embeddings.token_type_embeddings", 2, hidden, positions),
        norm("embeddings.LayerNorm", hidden, positions),
    ]
    for i in range(depth):
        name = f"encoder.layer.{i}"
        for part in ("query", "key", "value"):
            layers.append(linear(f"{name}.attention.self.{part}", hidden, hidden, positions))
        layers.append(_attention(f"{name}.attention.self", hidden, positions))
        layers.append(linear(f"{name}.attention.output.dense", hidden, hidden, positions))
        layers.append(norm(f"{name}.attention.output.LayerNorm", hidden, positions))
        layers.append(linear(f"{name}.intermediate.dense", hidden, 4 * hidden, positions))
        layers.append(linear(f"{name}.output.dense", 4 * hidden, hidden, positions))
        layers.append(norm(f"{name}.output.LayerNorm", hidden, positions))
    layers.append(linear("pooler.dense", hidden, hidden))
    if heads:
        layers.append(linear("cls.predictions.transform.dense", hidden, hidden, positions))
        layers.append(norm("cls.predictions.transform.LayerNorm", hidden, positions))
        decoder = 2.0 * hidden * vocabulary * positions  # its matrix is the embedding
        layers.append(Layer("cls.predictions", decoder, (("bias", (vocabulary,)),)))
        layers.append(linear("cls.seq_relationship", hidden, 2))
    return layers


def gpt2(hidden: int, depth: int, positions: int, *, vocabulary: int = 50257) -> list[Layer]:
    """Return the layers of GPT-2; the output head is tied to the embedding and only costs time."""
    layers = [
        _table("transformer.wte", vocabulary, hidden, positions),
        _table("transformer.wpe", 1024, hidden, positions),
    ]
    for i in range(depth):
        name = f"transformer.h.{i}"
        layers.append(norm(f"{name}.ln_1", hidden, positions))
        layers.append(_product(f"{name}.attn.c_attn", hidden, 3 * hidden, positions))
        layers.append(_attention(f"{name}.attn", hidden, positions))
        layers.append(_product(f"{name}.attn.c_proj", hidden, hidden, positions))
        layers.append(norm(f"{name}.ln_2", hidden, positions))
        layers.append(_product(f"{name}.mlp.c_fc", hidden, 4 * hidden, positions))
        layers.append(_product(f"{name}.mlp.c_proj", 4 * hidden, hidden, positions))
    layers.append(norm("transformer.ln_f", hidden, positions))
    return [*layers, Layer("lm_head", 2.0 * hidden * vocabulary * positions)]


def _product(name: str, inputs: int, outputs: int, positions: int) -> Layer:
    """Return a fully connected layer that stores its matrix as inputs x outputs."""
    parameters = (("weight", (inputs, outputs)), ("bias", (outputs,)))
    return Layer(name, 2.0 * inputs * outputs * positions, parameters)
