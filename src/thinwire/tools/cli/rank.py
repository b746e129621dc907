"""One of the processes that a verb starts: it gets the verb's options as JSON, and ends as a command does."""

from __future__ import annotations

import importlib
import sys

from thinwire.tools.cli.console import known_errors

if __name__ == "__main__":
    with known_errors():
        module, name, options, *words = sys.argv[1:]
        getattr(importlib.import_module(module), name).from_json(options).on_rank(*words)
