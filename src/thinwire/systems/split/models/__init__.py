"""Views of transformers' architectures, one file each: which module is which part of a layer.

Not here: the cut itself (``surgery``), and tokenisers.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from thinwire.systems.split.models.base import Parts, View, dense_bias, dense_weight
from thinwire.systems.split.models.bert import BertView, RobertaView
from thinwire.systems.split.models.distilbert import DistilBertView
from thinwire.systems.split.models.gpt2 import GPT2View
from thinwire.systems.split.models.vit import ViTView

VIEWS: tuple[type[View], ...] = (BertView, RobertaView, DistilBertView, ViTView, GPT2View)
"""The kinds of models that can be cut."""

__all__ = ["Parts", "View", "build", "dense_bias", "dense_weight", "view_of"]


def view_of(model: nn.Module) -> View:
    """Return the view of a model.

    Raises:
        ValueError: there is none for its class.
    """
    name = type(model).__name__
    for view in VIEWS:
        if name in view.classes:
            return view(model.config)
    known = ", ".join(known for view in VIEWS for known in view.classes)
    raise ValueError(f"a {name} cannot be split: use one of {known}")


def build(class_name: str, config: dict[str, Any]) -> nn.Module:
    """Build a model with random weights from its configuration; only classes of ``VIEWS``, nothing is downloaded.

    Raises:
        ValueError: another class, a configuration that does not match, or transformers is not installed.
    """
    transformers = require("transformers")
    for view in VIEWS:
        if class_name in view.classes:
            model_class = getattr(transformers, class_name)
            try:
                model: nn.Module = model_class(model_class.config_class.from_dict(config))
            except (TypeError, AttributeError) as error:
                raise ValueError(f"this configuration does not make a {class_name}: {error}") from error
            return model
    raise ValueError(f"model class {class_name!r} is unknown here: " + ", ".join(c for v in VIEWS for c in v.classes))


def require(name: str) -> Any:
    """Import an optional package.

    Raises:
        ValueError: it is not installed.
    """
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"split needs {name}: pip install 'thinwire[split]'") from error
