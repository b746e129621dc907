"""``thinwire reproduce``: what papers claim, and what of it holds here."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.systems.papers import NAMES
from thinwire.tools.cli.console import Output, exit_code, plain_table, progress, sentence, watched_load
from thinwire.tools.cli.options import JsonOption
from thinwire.tools.cli.verb import argument, option

if TYPE_CHECKING:
    from thinwire.systems.papers.paper import Reproduced


class ReproduceVerb(JsonOption):
    """Show what holds of eleven papers: simulated at their scale, measured here in the small, and the verdict.

    Example: thinwire reproduce acp dear
    """

    names: list[str] | None = argument(None, f"{', '.join(NAMES)}; without names all.")
    full: bool = option(False, "Longer runs and more seeds.")
    simulated: bool = option(False, "Only what is simulated at a paper's scale: seconds, and no verdict.")
    out: Path = option(Path("claims.json"), "File for the results; those of other papers stay in it.", writes="file")

    def run(self, output: Output) -> Any:
        from thinwire.core.durable import write_whole
        from thinwire.core.records import plain
        from thinwire.systems.papers.paper import paper, reproduce
        from thinwire.systems.papers.workbench import Workbench

        asked = list(dict.fromkeys(self.names or NAMES))
        needs = [(name, *need) for name in asked for need in paper(name).needs.items()]  # refuses unknown names first
        lacking = [(name, extra) for name, extra, some in needs if not all(map(find_spec, some))]
        if lacking and not self.simulated:
            names, extras = (", ".join(dict.fromkeys(some)) for some in zip(*lacking))
            raise ValueError(f"to measure {names}: pip install 'thinwire[{extras}]'; --simulated needs none")
        kept, failed = _read(self.out), dict[str, str]()
        with watched_load(2):  # that of other work: before the first paper
            for place, name in enumerate(asked):
                with progress(name, len(asked)) as bar:
                    bar(completed=place)

                    def tell(text: str, bar: Any = bar, name: str = name) -> None:
                        bar(description=f"{name}: {text}")

                    try:
                        result = reproduce(name, None if self.simulated else Workbench(self.full, tell))
                    except Exception as error:
                        if exit_code(error) is None:
                            raise
                        failed[name] = sentence(error)
                        bar.log(f"{name} failed: {failed[name]}", "red")
                        continue
                kept[name] = plain(result)
                if not self.simulated:
                    write_whole(self.out, json.dumps(kept, indent=1) + "\n", synced=False, shared=True)
                _show(result, output)
        if not self.simulated and len(failed) < len(asked):
            output.wrote(self.out)
        output.failure = "; ".join(f"{name}: {why}" for name, why in failed.items())
        return {name: kept[name] for name in asked if name not in failed}


def _read(out: Path) -> dict[str, Any]:
    if not out.exists():
        return {}
    try:
        kept = json.loads(out.read_text(encoding="utf-8") or "{}")
    except ValueError:
        kept = None
    if not isinstance(kept, dict):
        raise ValueError(f"--out {out} holds something else than results of thinwire reproduce: give another file")
    return kept


def _show(result: Reproduced, output: Output) -> None:
    from thinwire.systems.papers.paper import paper

    told = paper(result.name)
    output.say(f"{told.system}: {told.title}, {told.authors}", style="bold")
    output.say(f"claim: {told.claim} ({told.setting}). {told.link}")
    order = list(told.main)  # those of docs/papers.md first, as it names them
    shown = sorted(result.shown, key=lambda one: order.index(one.key) if one.key in order else len(order))
    rows = (
        (told.main.get(one.key, one.what), one.published or "-", f"{one.value:.4g} {one.unit}".rstrip(), one.how)
        for one in shown
    )
    output.say(plain_table("", ("what", "paper", "here", ""), rows, left=("",)))
    output.say(result.verdict, style={"holds": "green", "holds where": "yellow"}.get(result.word, "red"))
    output.say("")
