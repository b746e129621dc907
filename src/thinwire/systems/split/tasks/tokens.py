"""Tokenisers of transformers: a small one trained on the task's own text, or one that the user has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from thinwire.systems.split.models import require

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def trained_tokenizer(lines: Iterable[str], vocabulary: int = 2000) -> Any:
    """Train a byte-level BPE tokeniser on these lines; the same lines give the same tokens on every machine.

    It is byte-level because WordPiece training numbers its pieces in hash-table order, which differs from run to run.

    Args:
        lines: of text.
        vocabulary: number of token ids, at least 261: the special ones, the bytes and the merged pieces.
    """
    require("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(lines, trainer)
    ids = {token: made.token_to_id(token) for token in SPECIAL}
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])],
    )
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]")


def local_tokenizer(directory: Path) -> Any:
    """Load the tokeniser of a pre-trained model on disk; nothing is downloaded, no code from the directory is run.

    Raises:
        ValueError: the directory holds none.
    """
    transformers = require("transformers")
    try:
        return transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{directory} does not hold a transformers tokeniser: {error}") from error


def encode(
    tokenizer: Any, first: Sequence[str], second: Sequence[str] | None, length: int
) -> tuple[list[list[int]], list[list[int]] | None, int]:
    """Return ids, token types (None for single sentences), and how many samples were cut to ``length`` tokens."""
    texts = (list(first),) if second is None else (list(first), list(second))
    whole = tokenizer(*texts, add_special_tokens=True, return_token_type_ids=second is not None)
    long = sum(len(ids) > length for ids in whole["input_ids"])
    if long:
        whole = tokenizer(*texts, truncation=True, max_length=length, return_token_type_ids=second is not None)
    return whole["input_ids"], whole.get("token_type_ids"), long
