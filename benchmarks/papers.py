"""Does what papers report follow from their constants and our formulas? ``python benchmarks/papers.py omgs kfac``

Prints each published result beside what follows; without names, all of them. Nothing is measured here and nothing that
the library decides depends on these numbers: they lie in ``published/``.
"""

from __future__ import annotations

import argparse

from rich import box
from rich.console import Console
from rich.table import Table

from published import REPRODUCIBLE, reproduce, why_off


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=REPRODUCIBLE, metavar="name", help=", ".join(REPRODUCIBLE))
    console = Console()
    names = parser.parse_args().names
    if unknown := [name for name in names if name not in REPRODUCIBLE]:
        parser.error(f"{unknown[0]!r} cannot be reproduced; there are {', '.join(REPRODUCIBLE)}")
    for name in names:
        table = Table(title=name, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
        for column in ("what", "published", "predicted", "off"):
            table.add_column(column, justify="left" if column == "what" else "right", no_wrap=True)
        for label, published, predicted in reproduce(name):
            off = f"{predicted / published - 1:+.1%}" if published else "-"
            table.add_row(label, f"{published:.4g}", f"{predicted:.4g}", off)
        console.print(table)
        if why := why_off(name):
            console.print(why, highlight=False)


if __name__ == "__main__":
    main()
