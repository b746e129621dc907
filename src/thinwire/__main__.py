"""``python -m thinwire``: the command line, where the command itself is not on the path."""

from thinwire.tools.cli.main import run

if __name__ == "__main__":
    run()
