"""Sphinx configuration; `make docs` builds with warnings as errors."""

import re
from typing import Any

import thinwire

project = "thinwire"
author = "the thinwire authors"
copyright = author
version = release = thinwire.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
autosummary_generate = False  # its tables link to what api.md shows
html_theme = "furo"
pygments_dark_style = "monokai"  # the theme's own underlines names of modules
html_title = f"thinwire {release}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_logo = "_static/logo.svg"
highlight_language = "text"  # of blocks that do not say
exclude_patterns = ["_build"]

myst_heading_anchors = 3
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
autodoc_typehints = "signature"


CONTENTS = re.compile(
    r"^\*\*([\w ]+):\*\* (\[.*?)(?:\n\n|\Z)", re.MULTILINE | re.DOTALL
)
"""A caption and its links, at the end of the pages that list others."""


def setup(app: Any) -> None:
    """Make the contents beside each page; let a norm in a docstring, |A|, be one: it would be a substitution."""
    app.connect("autodoc-process-docstring", _keep_bars)
    app.connect("source-read", _contents)


def _contents(app: Any, name: str, source: list[str]) -> None:
    """Of the links that a forge shows, too; those that leave the pages lead nowhere on a site, and stay words."""
    source[0] = re.sub(
        r"\[([^\]]+)\]\(\S*/benchmarks/(\S+)\)", r"\1 (`benchmarks/\2`)", source[0]
    )
    for caption, links in CONTENTS.findall(source[0]) if "index" in name else ():
        pages = "\n".join(re.findall(r"\]\((.+?)\.md\)", links))
        head = f":caption: {caption}\n:hidden:"
        source[0] += f"\n```{{toctree}}\n{head}\n\n{pages}\n```\n"


def _keep_bars(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    lines[:] = [line.replace("|", "\\|") for line in lines]
