"""The answer of ``thinwire plan``: the ranking, knees, buckets and map, as tables and sentences, in JSON and files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from thinwire.adapters.ddp_buckets import bucket_arguments
from thinwire.core.methods.registry import label_of
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.records import plain
from thinwire.core.words import counted, in_milliseconds, megabytes, milliseconds, times, with_steps
from thinwire.predict.choose import Entry, ExplainedBucket, Map, Ranking, explain, grid, knee, map_of
from thinwire.predict.choose.rank import PAYS
from thinwire.predict.timeline import write_trace
from thinwire.predict.timeline.local_steps import Periodic, is_plain
from thinwire.predict.timeline.simulate import plan_of
from thinwire.tools.bench.words import WITHOUT_A_METHOD, arguments, attach_line, split_options
from thinwire.tools.cli.console import Output, plain_table, progress
from thinwire.tools.cli.plan_inputs import Question
from thinwire.tools.cli.plan_speeds import at_own_pace, choose_for, rank_speeds
from thinwire.tools.lab import format_rate

FASTER = tuple(first * 10.0**zeros for zeros in range(6, 11) for first in (1, 2.5, 5))
"""Rates of wires that are looked at where the present one is too slow, in bits per second."""
_OWN = ("pace", "sync_every", "fragment_sync_delay")  # of rows at their own pace, which the table need not repeat
_SHOWN = 12  # sizes of DDP's buckets in one line


def answer_of(
    question: Question, output: Output, *, lossy: bool, explain: bool, map: bool, trace: Path | None, out: Path | None
) -> dict[str, Any]:
    """Rank, print results as they come, write the files. Return what JSON shows."""
    answer: dict[str, Any] = {"question": question.to_data()}
    whole, speeds = question, rank_speeds(question, lossy=lossy) if question.speeds else None
    question, ranking = speeds.used if speeds else (question, choose_for(question, lossy=lossy))
    knees = {} if speeds else _knees(question, ranking)
    answer |= {"ranking": ranking.to_data(), "knee": knees}
    answer["answer"] = first_answer(question, ranking, lossy=lossy, of=whole)
    output.say(answer["answer"])
    if speeds:
        answer["speeds"] = speeds.to_data()
        output.say(speeds.sentence)
    sections = speeds.sections if speeds else {"exact": ranking.exact, "lossy": ranking.lossy}
    output.say(ranking_table(whole, ranking.answer, sections), *sentences(question, ranking, knees))
    if (ddp := ddp_answer(question, ranking)) is not None:
        answer["ddp"] = ddp
        output.say(ddp_sentence(ddp))
    if explain:
        groups = _explain(question, ranking)
        output.say(*(groups_table(label, found) for label, found in groups.items()))
        answer["explain"] = {label: [{**asdict(g), "density": g.density} for g in gs] for label, gs in groups.items()}
    if map:
        machines = [count * question.ranks_per_node for count in grid.WORKERS]
        with progress("map") as bar:
            answer["map"] = found = _map(question, lossy, grid.BITS_PER_SECOND, machines, on_cell=bar)
        output.say(map_table(question, found))
    _write(question, ranking, answer, trace, out)
    for path in filter(None, (trace, out)):
        output.wrote(path)
    return answer


def _knees(question: Question, ranking: Ranking) -> dict[str, int | None]:
    method_of = dict(question.candidates)
    rest = {"ranks_per_node": question.ranks_per_node, "worth": question.worth, **question.where}
    labels = dict.fromkeys(e.label for e in (ranking.best_exact, ranking.best) if e.label in method_of)
    return {label: knee(method_of[label], question.profile, question.prices, **rest) for label in labels}


def _explain(question: Question, ranking: Ranking) -> dict[str, tuple[ExplainedBucket, ...]]:
    wanted = question.named or (ranking.best.label, ranking.best_exact.label)
    method_of, priced = dict(question.candidates), {entry.label for entry in ranking.entries}
    return {
        label: explain(question.resolved(method_of[label]), *question.setting, backend=question.device.backend)
        for label in dict.fromkeys(wanted)
        if label in priced and not is_plain(method_of[label])
    }


def _map(question: Question, lossy: bool, rates: Sequence[float], workers: Sequence[int], **options: Any) -> Map:
    return map_of(
        question.candidates, question.profile, rates, workers, costs=question.assumed,
        ranks_per_node=question.ranks_per_node, **question.where, lossy=lossy, worth=question.worth, **options,
    )  # fmt: skip


def _write(question: Question, ranking: Ranking, answer: dict[str, Any], trace: Path | None, out: Path | None) -> None:
    if trace is None and out is None:
        return
    timeline = question.simulated(dict(question.candidates)[ranking.best.label])
    if trace is not None:
        write_trace(trace, timeline.events, label=f"predicted, {ranking.best.label}")
    if out is not None:
        chosen = {"method": ranking.best.method, "options": ranking.best.options}
        out.write_text(json.dumps(plain({**plain(timeline.plan), **chosen, **answer})) + "\n", encoding="utf-8")


def ranking_table(question: Question, best: Entry, sections: Mapping[str, Sequence[Entry]]) -> Table:
    profile, workers = question.profile, question.topology.world_size
    title = f"{profile.name}, {profile.elements / 1e6:.1f} M parameters, {counted(workers, 'worker')}"
    if question.ranks_per_node > 1:
        title += f", {question.ranks_per_node} per machine"
    columns = ("method", "step\nms", "band\nms", "exposed\nms", "MB\n/step", "bound by", "steps", "worth")
    speeds = f"speeds {question.told_speeds}; " if question.speeds else ""
    title = f"{title}, {question.describe_network()}\n{speeds}worth: times as soon at a loss as one worker alone"
    unknown = any(entry.steps is None for entries in sections.values() for entry in entries)
    table = plain_table(
        title, columns, left=("bound by",), close=True,
        caption="?: how many steps it needs is not known, so it is not recommended" if unknown else "",
    )  # fmt: skip
    for name, entries in sections.items():
        if entries:
            table.add_section()
            table.add_row(f"[dim]{name}[/dim]")
        for entry in entries:
            table.add_row(*_cells(entry), style="bold" if entry == best else None)
    return table


def _cells(entry: Entry) -> list[str]:
    name, options = split_options(entry.label)
    own = label_of(name, {key: told for key, told in options.items() if key not in _OWN})
    label = own if at_own_pace(entry) else entry.label
    return [
        label if entry.every == 1 else f"{label} /{entry.every}",
        in_milliseconds(entry.step_seconds),
        f"{in_milliseconds(entry.low_seconds)}-{in_milliseconds(entry.high_seconds)}",
        in_milliseconds(entry.exposed_seconds),
        megabytes(entry.bytes_sent),
        entry.bound_by.removeprefix("network "),
        "?" if entry.steps is None else f"{entry.steps:.2f}",
        "?" if entry.worth is None else times(entry.worth),
    ]


def first_answer(question: Question, ranking: Ranking, *, lossy: bool, of: Question) -> str:
    """One line: what to use, and what workers are worth then, beside DDP; or what is missing. ``of``: all workers."""
    if ranking.workers == 1:
        return "one worker: nothing is sent, so no method can help"
    best, ddp = ranking.answer, max(entry.worth or 0.0 for entry in ranking.exact if entry.method == SSGD.name)
    kinds = {"network": question.network_provenance, question.device.name: question.profile.provenance}
    assumed = " and ".join(kind for kind, how in kinds.items() if how == "assumed")
    ground = f"predicted for an assumed {assumed}" if assumed else "predicted from what was measured"
    machines, few = counted(ranking.workers, "worker"), ranking.workers < of.topology.world_size
    if question.speeds:
        machines = f"the {ranking.workers} fastest" if few else f"{machines} of speeds {question.told_speeds}"
    if _kind(best) == "alone":
        methods = [entry for entry in ranking.entries if _kind(entry) != "alone"]
        most = max(methods, key=lambda entry: entry.worth or 0.0)
        said = f"{machines} are worth {times(most.worth or 0.0)} of one here with {_named(most)}"
        wire = "" if question.speeds else _faster(question, lossy)
        return f"use one worker alone{wire}: {said} (DDP: {times(ddp)}), {ground}"
    beside = "" if best.exact else f" (DDP: {times(ddp)})"
    race = "" if question.worth or best.exact else "; race it"
    on, machines = (f" on {machines} alone", "they") if few else ("", machines)
    soon = f"{machines} reach the loss {times(best.worth or 1.0)} times as soon as one alone"
    return f"use {_named(best)}{on}: {soon}{beside}, {ground}{race}"


def _kind(entry: Entry) -> str:
    return split_options(entry.label)[0]


def _named(entry: Entry) -> str:
    said = WITHOUT_A_METHOD.get(_kind(entry))
    return said[0] if said else entry.label.replace(":", " ")


def _faster(question: Question, lossy: bool) -> str:
    """Name the slowest faster wire on which the workers pay, and what they are worth there."""
    for bits in FASTER:
        if question.network_provenance == "assumed" and bits <= question.bits_per_second:
            continue
        cell = _map(question, lossy, [bits], [question.topology.world_size]).cells[0][0]
        if cell.worth >= PAYS:
            wire = f"from {format_rate(int(bits))} on"
            return f", or a faster wire ({wire} {_short(cell.winner)} is worth {times(cell.worth)})"
    return ""


def sentences(question: Question, ranking: Ranking, knees: Mapping[str, int | None]) -> list[str]:
    best, profile = ranking.answer, question.profile
    said = [ranking.sentence]
    equal = [
        f"if weights must be equal after every step: {e.label}, {with_steps(e.step_seconds, e.steps)}"
        for e in ranking.lossy
        if e.every == 1 and e.steps is not None and not e.dense and _kind(e) not in WITHOUT_A_METHOD
    ]
    if best.every > 1:
        said += equal[:1]  # the soonest
    if not best.exact:
        exact = ranking.best_exact
        said.append(f"exact: {exact.label}, {milliseconds(exact.step_seconds)}")
        race = "; on your model: thinwire race" if question.worth is None else ""
        said.append(f"steps to a loss, relative to exact averaging: {best.steps_source}{race}")
    said += [
        f"predicted: {label} is at least 80 % efficient up to 4096 workers"
        if bend is None
        else f"predicted: {label} falls below 80 % efficiency at {bend} workers"
        for label, bend in knees.items()
    ]
    kinds = {curve.provenance for curve in question.setting[2].compute.values()}
    work = "measured" if kinds == {"measured here"} else f"assumed for {question.device.name}"
    said.append(
        f"measured here: {best.measured_share:.0%} of the predicted step; model {profile.provenance} "
        f"({profile.source}), network {question.network_provenance}, methods' own work {work}"
    )
    if best.measured_share < 0.5:
        said.append("to measure: thinwire probe on the machines, thinwire profile of the model")
    said += [f"left out: {label}: {reason}" for label, reason in ranking.left_out]
    plain = WITHOUT_A_METHOD.get(_kind(best))
    loop = "; and take the loop's steps from sync.steps(total)" if at_own_pace(best) else ""
    said.append(f"next: {plain[1] if plain else attach_line(*split_options(best.label))}{loop}")
    return said


def groups_table(label: str, groups: Sequence[ExplainedBucket]) -> Table:
    phases = len({group.phase for group in groups}) > 1
    sparse = any(group.kept is not None for group in groups)
    names = (["phase"] if phases else []) + ["bucket", "tensors", "from"]
    names += ["elements", "ready\nms", "MB\n/step", "send\nms"] + (["kept", "density"] if sparse else [])
    table = plain_table(f"{label}: {len(groups)} buckets", names, left=("from",), close=True)
    for group in groups:
        cells = [str(group.phase)] if phases else []
        name, most = group.names[0], 16 if sparse else 22
        name = name if len(name) <= most else "\N{HORIZONTAL ELLIPSIS}" + name[1 - most :]
        cells += [str(group.bucket), str(len(group.names)), name]
        cells += [
            f"{group.elements:,}",
            in_milliseconds(group.ready_seconds),
            megabytes(group.sent_bytes),
            in_milliseconds(group.exchange_seconds),
        ]
        if sparse:
            cells += [f"{group.kept:,}", f"{group.density:.3g}"] if group.kept else ["all", "1"]
        table.add_row(*cells)
    return table


def map_table(question: Question, found: Map) -> Table:
    title = f"{question.profile.name}: what to use, and what the workers are worth beside one; {question.device.name}"
    table = plain_table(title, ["link", *(f"{workers}\nworkers" for workers in found.workers)], close=True)
    for bits, row in zip(found.bits_per_second, found.cells):
        table.add_row(format_rate(int(bits)), *(f"{_short(cell.winner)}\n{times(cell.worth)}" for cell in row))
    return table


def _short(label: str) -> str:
    name, options = split_options(label)
    return " ".join([name, *map(str, options.values())])


def ddp_answer(question: Question, ranking: Ranking) -> dict[str, Any] | None:
    """Return ``{"label": ..., "arguments": ...}`` of the recommendation, or ``"why_not"`` instead; None: one rank."""
    label = ranking.answer.label
    method, profile = dict(question.candidates).get(label), question.profile  # no method: one worker alone
    if method is None or is_plain(method) or ranking.workers == 1:
        return None
    if isinstance(method, Periodic):
        return {
            "label": label,
            "why_not": "it exchanges weights, whereas DDP averages gradients: attach to the bare model",
        }
    if method.decoupled:
        return {"label": label, "why_not": "it leaves part of the exchange for the next forward pass"}
    plan = plan_of(method, profile, question.device.backend, question.topology, question.setting[2])
    size = {tensor.name: math.prod(tensor.shape) * profile.dtype_bytes for tensor in profile.tensors}
    try:
        return {"label": label, "arguments": bucket_arguments(plan, size)}
    except ValueError as error:
        return {"label": label, "why_not": str(error)}


def ddp_sentence(answer: dict[str, Any]) -> str:
    """Return one line to paste, or why there is none; a long list is cut, but complete in the JSON."""
    name, options = split_options(answer["label"])
    if "why_not" in answer:
        return f"with DDP: not {name}: {answer['why_not']}"
    ((argument, caps),) = answer["arguments"].items()
    shown = [f"{cap:.6g}" for cap in (caps if isinstance(caps, list) else [caps])]
    rest = f", ... {len(shown) - _SHOWN} more in --json" if len(shown) > _SHOWN else ""
    value = ", ".join(shown[:_SHOWN]) + rest
    value = f"[{value}]" if isinstance(caps, list) else value
    return f"or with DDP: {argument}={value}, and model.register_comm_hook(*tw.ddp_hook({arguments(name, options)}))"
