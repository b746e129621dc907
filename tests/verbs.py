"""The command line in this process. typer's own runner builds all verbs anew for every call, which takes 60 ms."""

import functools
from unittest.mock import patch

import typer.testing
from typer.main import get_command

from thinwire.tools.cli.main import app

_built = functools.cache(get_command)


class CliRunner(typer.testing.CliRunner):
    def invoke(self, app, *args, **options):
        with patch.object(typer.testing, "_get_command", _built):
            return super().invoke(app, *args, **options)


def call(*words, code=0, **options):
    """What a verb has printed, and that it ended like this."""
    result = CliRunner().invoke(app, list(map(str, words)), **options)
    assert result.exit_code == code, result.output
    return result
