"""Transformer models as the surgery sees them: embeddings, layers, one layer taken apart, and what follows the layers.

One :class:`View` per architecture of transformers says which module is which part. Below them: models by name and a few
numbers, with random weights, or pre-trained ones from a directory on disk. Not here: the cut itself (``surgery``).
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Parts:
    """A transformer layer in pieces: ``y = after(a + drop(second(activation(first(before(a))))))``, a = attend(x).

    Attributes:
        attend: ``(hidden, mask) -> a``: the attention with its own residual connection and norm.
        first: dense, h to f.
        second: dense, f to h.
        dropout: after the second dense layer.
        before: the norm before the feed-forward block (ViT, GPT-2); None if there is none.
        after: the norm after the block's residual connection (BERT and similar models); None if there is none.
    """

    attend: nn.Module
    first: nn.Module
    activation: nn.Module
    second: nn.Module
    dropout: nn.Module
    before: nn.Module | None = None
    after: nn.Module | None = None


class View(ABC):
    """One architecture of transformers. Its only state is the configuration; modules are passed in.

    Attributes:
        model_type: as in the configuration.
        classes: of transformers that can be cut, by name.
        inputs: names of its embedding inputs; every batch has the first.
        uses_lengths: whether padding is masked.
        embeddings_at, layers_at: paths in a model to the embeddings and the list of layers.
        parts_at: paths in a layer, by the names of :class:`Parts`, for the parts that it has.
    """

    model_type: ClassVar[str]
    classes: ClassVar[tuple[str, ...]]
    inputs: ClassVar[tuple[str, ...]] = ("input_ids",)
    uses_lengths: ClassVar[bool] = True
    embeddings_at: ClassVar[str]
    layers_at: ClassVar[str]
    parts_at: ClassVar[Mapping[str, str]]

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    def hidden(self) -> int:
        """Width h of the residual stream."""
        return int(self.config.hidden_size)

    @property
    def intermediate(self) -> int:
        """Width f inside the feed-forward block."""
        return int(self.config.intermediate_size)

    @property
    def pixels(self) -> int:
        """Numbers per picture; 0 if the inputs are tokens."""
        return 0

    def embeddings(self, model: nn.Module) -> nn.Module:
        """Return a module ``(**inputs) -> [B, L, h]``."""
        return model.get_submodule(self.embeddings_at)

    def layers(self, model: nn.Module) -> nn.ModuleList:
        """Return the layers, in order."""
        found = model.get_submodule(self.layers_at)
        assert isinstance(found, nn.ModuleList)
        return found

    def parts(self, layer: nn.Module) -> Parts:
        """Return one layer in pieces."""
        found = {name: layer.get_submodule(path) for name, path in self.parts_at.items()}
        return Parts(attend=self.attend(layer), **found)

    @abstractmethod
    def attend(self, layer: nn.Module) -> nn.Module:
        """See :class:`Parts`."""

    @abstractmethod
    def head(self, model: nn.Module) -> nn.Module:
        """Return a module ``(hidden, lengths) -> logits``: everything after the last layer."""

    def mask(self, hidden: Tensor, lengths: Tensor | None) -> Tensor | None:
        """Return the attention mask for the layers."""
        from transformers.masking_utils import create_bidirectional_mask

        made: Any = create_bidirectional_mask(
            config=self.config, inputs_embeds=hidden, attention_mask=_valid_tokens(hidden, lengths)
        )
        return made  # type: ignore[no-any-return]

    def run(self, layer: nn.Module, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """Run one whole layer."""
        out: Tensor = layer(hidden, attention_mask=mask)
        return out


class _Attend(nn.Module):
    """``after(drop(attention(before(x))) + x)``, with the parts that there are; BERT's attention adds x by itself."""

    def __init__(
        self, attention: nn.Module, before: nn.Module | None = None, after: nn.Module | None = None,
        dropout: float = 0.0, adds: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.attention, self.before, self.after = attention, before, after
        self.dropout, self.adds = nn.Dropout(dropout), adds

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        x = hidden if self.before is None else self.before(hidden)
        out: Tensor = self.dropout(self.attention(x, attention_mask=mask)[0])
        out = out + hidden if self.adds else out
        return out if self.after is None else self.after(out)


class _Head(nn.Module):
    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.steps = nn.Sequential(*modules)

    def forward(self, hidden: Tensor, lengths: Tensor | None) -> Tensor:
        logits: Tensor = self.steps(hidden)
        return logits


class _FirstToken(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden[:, 0]


class BertView(View):
    model_type = "bert"
    classes = ("BertForSequenceClassification",)
    inputs = ("input_ids", "token_type_ids")
    embeddings_at = "bert.embeddings"
    layers_at = "bert.encoder.layer"
    parts_at: ClassVar = {
        "first": "intermediate.dense", "activation": "intermediate.intermediate_act_fn", "second": "output.dense",
        "dropout": "output.dropout", "after": "output.LayerNorm",
    }  # fmt: skip

    def attend(self, layer: nn.Module) -> nn.Module:
        return _Attend(layer.get_submodule("attention"), adds=False)

    def head(self, model: nn.Module) -> nn.Module:
        return _Head(*map(model.get_submodule, ("bert.pooler", "dropout", "classifier")))


class RobertaView(BertView):
    model_type = "roberta"
    classes = ("RobertaForSequenceClassification",)
    embeddings_at = "roberta.embeddings"
    layers_at = "roberta.encoder.layer"

    def head(self, model: nn.Module) -> nn.Module:
        return _Head(model.get_submodule("classifier"))


class DistilBertView(View):
    """DistilBERT with a classifier on the first token: BERT's layer, without token types and pooler."""

    model_type = "distilbert"
    classes = ("DistilBertForSequenceClassification",)
    embeddings_at = "distilbert.embeddings"
    layers_at = "distilbert.transformer.layer"
    parts_at: ClassVar = {
        "first": "ffn.lin1", "activation": "ffn.activation", "second": "ffn.lin2", "dropout": "ffn.dropout",
        "after": "output_layer_norm",
    }  # fmt: skip

    @property
    def intermediate(self) -> int:
        return int(self.config.hidden_dim)

    def attend(self, layer: nn.Module) -> nn.Module:
        return _Attend(layer.get_submodule("attention"), after=layer.get_submodule("sa_layer_norm"))

    def head(self, model: nn.Module) -> nn.Module:
        dense, dropout, classifier = map(model.get_submodule, ("pre_classifier", "dropout", "classifier"))
        return _Head(_FirstToken(), dense, nn.ReLU(), dropout, classifier)


class ViTView(View):
    """ViT with a classifier on the class token: norms before the blocks; tokens are patches, and none is padding."""

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
        size = self.config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        return int(self.config.num_channels * height * width)

    def attend(self, layer: nn.Module) -> nn.Module:
        attention, norm, dropout = map(layer.get_submodule, ("attention", "layernorm_before", "dropout"))
        return _Attend(attention, before=norm, dropout=dropout.p)  # type: ignore[arg-type]

    def head(self, model: nn.Module) -> nn.Module:
        return _Head(model.get_submodule("vit.layernorm"), _FirstToken(), model.get_submodule("classifier"))

    def mask(self, hidden: Tensor, lengths: Tensor | None) -> Tensor | None:
        return None


class _GPT2Embed(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.wte = model.get_submodule("transformer.wte")
        self.wpe = model.get_submodule("transformer.wpe")
        self.dropout = model.get_submodule("transformer.drop")

    def forward(self, input_ids: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        out: Tensor = self.dropout(self.wte(input_ids) + self.wpe(places))
        return out


class _GPT2Head(nn.Module):
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
    """GPT-2, a classifier or a language model with an untied output layer; its dense layers are stored transposed."""

    model_type = "gpt2"
    classes = ("GPT2ForSequenceClassification", "GPT2LMHeadModel")
    layers_at = "transformer.h"
    parts_at: ClassVar = {
        "before": "ln_2", "first": "mlp.c_fc", "activation": "mlp.act", "second": "mlp.c_proj",
        "dropout": "mlp.dropout",
    }  # fmt: skip

    @property
    def intermediate(self) -> int:
        return int(self.config.n_inner or 4 * self.hidden)

    def embeddings(self, model: nn.Module) -> nn.Module:
        return _GPT2Embed(model)

    def attend(self, layer: nn.Module) -> nn.Module:
        return _Attend(layer.get_submodule("attn"), before=layer.get_submodule("ln_1"))

    def head(self, model: nn.Module) -> nn.Module:
        return _GPT2Head(model)

    def mask(self, hidden: Tensor, lengths: Tensor | None) -> Tensor | None:
        from transformers.masking_utils import create_causal_mask

        valid = _valid_tokens(hidden, lengths)
        made: Any = create_causal_mask(self.config, hidden, valid, None)  # no cache; its keyword was renamed in 5.24
        return made  # type: ignore[no-any-return]


VIEWS: tuple[type[View], ...] = (BertView, RobertaView, DistilBertView, ViTView, GPT2View)
_KNOWN = {name: view for view in VIEWS for name in view.classes}


def view_of(model: nn.Module) -> View:
    """Return the view of a model.

    Raises:
        ValueError: there is none for its class.
    """
    name = type(model).__name__
    if name not in _KNOWN:
        raise ValueError(f"a {name} cannot be split: use one of {', '.join(_KNOWN)}")
    return _KNOWN[name](model.config)


def build(class_name: str, config: dict[str, Any]) -> nn.Module:
    """Build a model with random weights from its configuration; only classes of ``VIEWS``, nothing is downloaded.

    Raises:
        ValueError: another class, a configuration that does not match, or transformers is not installed.
    """
    transformers = require("transformers")
    if class_name not in _KNOWN:
        raise ValueError(f"model class {class_name!r} is unknown here: {', '.join(_KNOWN)}")
    model_class = getattr(transformers, class_name)
    try:
        model: nn.Module = model_class(model_class.config_class.from_dict(config))
    except (TypeError, AttributeError) as error:
        raise ValueError(f"this configuration does not make a {class_name}: {error}") from error
    return model


def require(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"split needs {name}: pip install 'thinwire[split]'") from error


def _valid_tokens(hidden: Tensor, lengths: Tensor | None) -> Tensor | None:
    """Return 1 at real tokens and 0 at padding, ``[B, L]``; None if nothing is padded."""
    length = hidden.shape[1]
    if lengths is None or bool((lengths == length).all()):
        return None
    return (torch.arange(length, device=hidden.device) < lengths.to(hidden.device)[:, None]).long()


def inputs_of(inputs: Mapping[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: inputs[name] for name in names if name in inputs}


def dense_weight(dense: nn.Module) -> Tensor:
    """Return the weight ``[out, in]`` of a Linear, or of transformers' Conv1D, which stores it transposed."""
    weight: Tensor = dense.weight  # type: ignore[assignment]
    return weight if isinstance(dense, nn.Linear) else weight.T


def dense_bias(dense: nn.Module) -> Tensor:
    """Return the bias ``[out]``; zeros if there is none."""
    bias: Tensor | None = dense.bias  # type: ignore[assignment]
    weight = dense_weight(dense)
    return bias if bias is not None else weight.new_zeros(len(weight))


_SIZES = {"small": (4, 256, 4, 1024), "base": (12, 768, 12, 3072), "large": (24, 1024, 16, 4096)}
_BY_TYPE = {view.model_type: view for view in VIEWS}
_NAMES = {  # the configuration's names for layers, width, heads, inner width, positions
    "bert": ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "max_position_embeddings"),
    "distilbert": ("n_layers", "dim", "n_heads", "hidden_dim", "max_position_embeddings"),
    "gpt2": ("n_layer", "n_embd", "n_head", "n_inner", "n_positions"),
}
_DROPOUTS = {
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "distilbert": ("dropout", "attention_dropout"),
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
}


def sizes_of(
    name: str, layers: int | None = None, hidden: int | None = None, heads: int | None = None,
    intermediate: int | None = None,
) -> tuple[str, tuple[int, int, int, int]]:  # fmt: skip
    kind, dash, size = name.partition("-")
    size = size if dash else "small"
    if kind not in _BY_TYPE or size not in _SIZES:
        raise ValueError(
            f"model {name!r} is unknown; use one of {', '.join(_BY_TYPE)}, with -small, -base or -large, or a "
            "directory that holds a pre-trained one"
        )
    of_size = _SIZES[size]
    inner = intermediate or (4 * hidden if hidden else of_size[3])
    numbers = (layers or of_size[0], hidden or of_size[1], heads or of_size[2], inner)
    if min(numbers) < 1 or numbers[1] % numbers[2]:
        raise ValueError(f"hidden={numbers[1]} must be a multiple of heads={numbers[2]}, and all sizes above 0")
    return kind, numbers


def preset(
    name: str, *, classes: int, vocabulary: int, length: int = 512, pad: int = 0, seed: int = 0, dropout: float = 0.1,
    **sizes: int | None,
) -> nn.Module:  # fmt: skip
    """Build ``"bert"``, ``"bert-base"``, ``"distilbert-small"``, ...: an architecture and a size, with random weights.

    Args:
        name: bert, roberta, distilbert, vit or gpt2; -small (4 layers, width 256; the default), -base or -large.
        classes, vocabulary: numbers of outputs and of token ids.
        length: of the longest sequence.
        pad: id of the padding token.
        seed: for the weights.
        dropout: of hidden states and attention.
        sizes: ``layers``, ``hidden`` (h), ``heads`` and ``intermediate`` (f; 4 h if only ``hidden`` is given), instead
            of the size's numbers.

    Raises:
        ValueError: the name is unknown, or the numbers do not match.
    """
    kind, numbers = sizes_of(name, **sizes)
    config: dict[str, Any] = dict(zip(_NAMES.get(kind, _NAMES["bert"]), (*numbers, length + 2)))
    config |= {"num_labels": classes, "pad_token_id": pad}
    config |= dict.fromkeys(_DROPOUTS.get(kind, _DROPOUTS["bert"]), dropout)
    if kind != "vit":
        config |= {"vocab_size": vocabulary, "bos_token_id": None, "eos_token_id": None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(_BY_TYPE[kind].classes[0], config)


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Let transformers tell neither a progress bar nor that the head is new."""
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


def pretrained(directory: str | Path, classes: int, seed: int = 0) -> nn.Module:
    """Load a pre-trained encoder from a directory, with a new head, for which the seed is.

    Nothing is downloaded; no code from the directory is run; weights are read only from safetensors.
    """
    transformers = require("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{directory} does not hold a transformers model: {error}") from error
    if config.model_type not in _BY_TYPE:
        known = ", ".join(_BY_TYPE)
        raise ValueError(f"{directory} holds a {config.model_type}, which cannot be split: use one of {known}")
    class_name = _BY_TYPE[config.model_type].classes[0]
    try:
        with torch.random.fork_rng(devices=[]), _quiet(transformers.utils.logging):
            torch.manual_seed(seed)
            model: nn.Module = getattr(transformers, class_name).from_pretrained(
                directory,
                num_labels=classes,
                local_files_only=True,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # a head for other classes is initialised anew
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"{directory} cannot be loaded as {class_name}: {error}") from error
    return model
