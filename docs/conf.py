"""Sphinx configuration; `make docs` builds with warnings as errors."""

from typing import Any

import thinwire

project = "thinwire"
author = "the thinwire authors"
copyright = author
version = release = thinwire.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"thinwire {release}"
exclude_patterns = ["_build", "methods/when"]  # tables that the pages of the methods include

myst_heading_anchors = 3
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
autodoc_typehints = "signature"


def setup(app: Any) -> None:
    """Let a norm in a docstring, |A|, be one: reStructuredText would read a substitution."""
    app.connect("autodoc-process-docstring", _keep_bars)


def _keep_bars(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = [line.replace("|", "\\|") for line in lines]
