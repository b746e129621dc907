"""Sphinx configuration; `make docs` builds with warnings as errors."""

import sys
from pathlib import Path
from typing import Any

import thinwire

sys.path.insert(0, str(Path(__file__).parent))  # differences.py, recorded.py
import differences
import recorded

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
# What the pages describe is ours: these need not be installed.
autodoc_mock_imports = ["accelerate", "lightning", "transformers"]


def setup(app: Any) -> None:
    """Add our own directives; let a norm in a docstring, |A|, be one: reStructuredText would read a substitution."""
    app.connect("autodoc-process-docstring", _keep_bars)
    differences.setup(app)
    recorded.setup(app)


def _keep_bars(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    lines[:] = [line.replace("|", "\\|") for line in lines]
