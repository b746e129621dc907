"""What a race says of made-up records and losses, without ranks."""

import dataclasses
import importlib
import json
import math
import re
import statistics

import pytest

from thinwire.core.methods.cast import Cast
from thinwire.core.words import duration, times
from thinwire.predict.choose.worth import MeasuredWorth, read_worth
from thinwire.predict.timeline.local_steps import Periodic
from thinwire.tools.bench import race, race_losses
from thinwire.tools.bench.race import RaceSpec, RunContext, run_race
from thinwire.tools.bench.race_answer import line_to_write, race_data, sentences
from thinwire.tools.bench.race_losses import own_digest, step_times
from thinwire.tools.bench.rows import Row, parse_rows
from thinwire.tools.bench.session import BenchError, Point, RowRecord, RunRecord
from thinwire.tools.cli.race import basis, race_table
from thinwire.tools.report.inputs import read_bench

COMPUTE = 0.1


@dataclasses.dataclass
class Launched:
    exit_code: int = 0
    emulated: bool = True
    note: str = "made up"


class World:
    """Sessions of ranks, made up: seconds of a step and steps needed for one of DDP's, by label.

    A loss falls as steps to the power of -0.15, and is least at a row's own factor on the learning rate.
    """

    def __init__(self, seconds, needs, broken=(), diverging=(), rates=None):
        self.seconds, self.needs, self.broken = {"compute": COMPUTE, **seconds}, {"ddp": 1.0, **needs}, broken
        self.diverging, self.rates, self.sessions, self.power = diverging, rates or {}, [], -0.15

    def session(self, spec, launch, on_progress):
        self.sessions.append(("losses" if spec.curves else "seconds", [row.label for row in spec.rows], spec.seed))
        rows = []
        for row in (Row("compute", "compute"), *spec.rows):
            on_progress({"row": row.label, "state": "building"})
            record = RowRecord(row.label, row.kind, error="it broke" if row.label in self.broken else "")
            if not record.error:
                (self._train if spec.curves else self._time)(spec, record)
            if spec.curves and row.label in self.diverging:
                record.error, record.curve = "it diverged", []
            rows.append(record)
        return RunRecord("a made-up model", 1000, 2, 4000, spec.workers, None, rows), Launched()

    def _time(self, spec, record):
        timed = spec.rounds * spec.steps
        record.step_seconds = [self.seconds[record.label]] * timed
        record.forward_seconds, record.host_seconds = [COMPUTE / 3] * timed, [COMPUTE] * timed
        record.losses, record.untimed_seconds = [4.0] * (timed + 3), 3 * self.seconds[record.label] + 0.5

    def _train(self, spec, record):
        assert spec.schedule
        if record.label != "compute":
            needs = self.needs[record.label]
            needs = needs[spec.seed % len(needs)] if isinstance(needs, tuple) else needs
            off = abs(math.log2(spec.rate_factor / self.rates.get(record.label, 1.0)))
            places = range(0, spec.steps + 1, spec.every)
            record.curve = [Point(step, 0.0, 9.0, 9.0) for step in places]
            record.curve[-1] = Point(spec.steps, 0.0, 9.0, (1 + 0.1 * off) * 5 * (spec.steps / needs) ** self.power)


@pytest.fixture
def raced(monkeypatch, tmp_path):
    def run(world, methods, folder=tmp_path, **options):
        monkeypatch.setattr(race, "run_session", world.session)
        monkeypatch.setattr(race_losses, "run_session", world.session)
        asked = RaceSpec("mlp:width=64:layers=1", parse_rows(methods), **{"minutes": 20.0, "link": "1mbit",
                         "link_bits": 10**6, **options})  # fmt: skip
        said = []
        course = RunContext(None, None, lambda text, steps: said.append(text), folder=folder)
        return asked, run_race(asked, course), said

    return run


FAST = {"ddp": 1.0, "ssgd": 0.9, "powersgd rank=4": 0.2, "acp rank=16": 0.25, "cast dtype=int8": 0.4}
NEEDS = {"powersgd rank=4": (1.2, 1.3, 1.1), "acp rank=16": 1.4, "cast dtype=int8": 1.0}
METHODS = "ssgd,powersgd:rank=4,acp:rank=16,cast:dtype=int8"


def test_who_is_first_what_it_costs_and_how_sure(raced, tmp_path):
    world = World(FAST, NEEDS)
    asked, found, _ = raced(world, METHODS)
    assert found.rows[0].label == "powersgd rank=4"
    assert found.budget.seeds == 3
    assert found.rows[0].steps == pytest.approx(1.2, rel=0.02)
    assert found.rows[0].sooner == pytest.approx(1.0 / (0.2 * 1.2), rel=0.05)
    first, second, third = sentences(found)
    assert first.startswith(f"powersgd rank=4 is first: it reaches a loss of {found.target:.3f} after ")
    assert "x faster than DDP (" in first
    assert second.startswith("it takes 1.20 times DDP's steps (1.10 to 1.30 over 3 seeds")
    assert second.endswith("a step takes 200 ms instead of 1.00 s")
    assert third.startswith("sure: it took ")
    assert "which do not overlap; next is acp rank=16, " in third
    assert line_to_write(asked.rows, "powersgd rank=4") == 'sync = tw.attach(model, optimizer, "powersgd", rank=4)'
    assert not any("ssgd" in label for kind, labels, _ in world.sessions if kind == "losses" for label in labels)

    data = race_data(found)
    (tmp_path / "race.json").write_text(json.dumps(data))
    rows = [MeasuredWorth(**{**row, "factors": tuple(row["factors"])}) for row in data["rows"]]
    assert {row.method for row in rows} == {"powersgd", "acp", "cast"}
    assert statistics.median(rows[0].factors) == pytest.approx(1.2, rel=0.02)
    assert read_worth(tmp_path / "race.json")
    bench = read_bench("race.json", json.loads(json.dumps(data)))
    assert bench.answer == tuple(data["race"]["sentences"])
    assert bench.curves.keys() == {row.label for row in asked.rows}

    sessions, again = len(world.sessions), raced(world, METHODS)[1]
    assert len(world.sessions) == sessions
    assert (again.trained, again.known, again.rows) == (0, found.trained, found.rows)
    assert again.measured.known_since
    raced(world, METHODS, link="2mbit")
    assert [kind for kind, _, _ in world.sessions[sessions:]] == ["seconds"]  # losses do not depend on the link


@pytest.mark.parametrize(
    ("alone", "needs", "said"),
    [
        (0.1, 7.0, "powersgd rank=4 is first: it {after}; 2 workers are worth 2.8 of one alone (DDP: 0.70)"),
        (0.1, 2.8, "one worker alone does as well: {are} 1.12 of it with powersgd rank=4 (DDP: 0.28), which {after}"),
        (0.05, 1.0, "one worker alone is sooner: {are} 0.21 of it with powersgd rank=4 (DDP: 0.053), which {after}"),
    ],
)
def test_what_the_workers_are_worth_beside_one_alone(raced, alone, needs, said):
    """One alone is trained at any rate and never wins itself; where the workers do not pay, that is the answer."""
    world = World({"ddp": 1.0, "powersgd rank=4": 0.2, "alone": alone}, {"powersgd rank=4": 1.25, "alone": needs})
    _, found, _ = raced(world, "powersgd:rank=4,alone", minutes=60.0, steps=150)
    rows = {row.label: row for row in found.rows}
    for label, row in rows.items():
        assert row.worth == pytest.approx(rows["alone"].seconds / row.seconds), label
    assert rows["alone"].worth == 1.0
    data = race_data(found)["race"]
    assert data["winner"] == "powersgd rank=4"
    after = f"reaches a loss of {found.target:.3f} after {duration(rows['powersgd rank=4'].seconds)}"
    assert data["sentences"][0] == said.format(after=after, are="2 workers are worth")
    assert data["next"].startswith("sync = tw.attach" if needs == 7.0 else "train on one machine")
    assert {row["label"]: row["worth"] for row in data["rows"]} == {row.label: row.worth for row in found.rows}
    shown = race_table(found).columns[-1]
    assert [shown.header, *shown.cells] == ["worth", *(times(row.worth) for row in found.rows)]
    assert any("worth: times as soon at it as one worker alone" in line for line in basis(found))


def test_ddp_that_is_enough_is_held_against_one_alone_too(raced):
    """Which is trained though its step is no shorter."""
    world = World({"ddp": 0.2, "powersgd rank=4": 0.19, "alone": 0.21}, {"powersgd rank=4": 1.25, "alone": 1.9})
    _, found, _ = raced(world, "powersgd:rank=4,alone", steps=150)
    worth = next(row for row in found.rows if row.label == "ddp").worth
    assert worth == pytest.approx(0.21 * 1.9 / 0.2, rel=0.02)
    assert sentences(found)[0].startswith("DDP is enough here: it reaches a loss of ")
    assert sentences(found)[0].endswith(f"; 2 workers are worth {worth:.2f} of one alone" if worth < 2 else "alone")
    assert race_data(found)["race"]["winner"] == "ddp"


def test_local_steps_are_trained_as_they_were_timed(raced):
    """What "auto" has found on the link; ranks beside it would find another period."""
    chosen = {"sync_every": 4, "fragment_sync_delay": 1, "codec": "int2"}
    world, plans = World({"ddp": 1.0, "local": 0.2, "ssgd": 0.9}, {"local": 1.2}), []

    def session(spec, launch, on_progress, told=world.session):
        record, launched = told(spec, launch, on_progress)
        plans.extend((spec.curves, row.pinned) for row in spec.rows if row.label == "local")
        for row in record.rows:
            row.plan = json.dumps(chosen) if row.label == "local" and not spec.curves else ""
        return record, launched

    world.session = session
    _, found, _ = raced(world, "local,ssgd", minutes=60.0)
    assert {repr(options) for curves, options in plans if not curves} == {"{}"}
    assert {repr(options) for curves, options in plans if curves} == {repr(chosen)}
    assert "local: on this link sync_every=4, fragment_sync_delay=1, codec=int2" in basis(found)
    data = race_data(found)
    assert data["race"]["next"] == 'sync = tw.attach(model, optimizer, "local")'
    (row,) = data["rows"]
    assert {key: row[key] for key in ("method", "options", "every", "delay")} == {
        "method": "cast", "options": {"dtype": "int2"}, "every": 4, "delay": 1,
    }  # fmt: skip


def test_what_everybody_has_and_local_as_such_race_unless_methods_are_named():
    labels = [row.label for row in parse_rows(race.DEFAULT_METHODS)]
    assert {"alone", "accumulate every=4", "ssgd", "local"} <= set(labels)


def test_losses_are_those_of_what_the_link_lets_a_method_send(raced):
    world, plans = World({"ddp": 1.0, "lags": 0.3, "ssgd": 0.9}, {"lags": 1.5}), []

    def session(spec, launch, on_progress, told=world.session):
        record, launched = told(spec, launch, on_progress)
        plans.extend((spec.curves, row.label, row.plan) for row in spec.rows)
        for row in record.rows:
            row.plan = "the counts of 1 Mb/s" if row.label == "lags" else ""
        return record, launched

    world.session = session
    raced(world, "lags,ssgd")
    assert {plan for curves, label, plan in plans if not curves} == {""}
    assert {(label, plan) for curves, label, plan in plans if curves} == {("lags", "the counts of 1 Mb/s"), ("ddp", "")}


def test_ddp_wins_where_no_step_is_shorter(raced):
    world = World({**FAST, "powersgd rank=4": 1.1, "acp rank=16": 1.0}, NEEDS)
    asked, found, said = raced(world, "powersgd:rank=4,acp:rank=16")
    assert sentences(found)[0].startswith("DDP is enough here: it reaches a loss of ")
    assert "no other method reaches it" in sentences(found)[0]
    assert "acp rank=16: its step is not shorter than DDP's: not trained" in said
    assert line_to_write(asked.rows, "ddp").startswith("keep DDP")
    assert {row.note for row in found.rows[1:]} == {"its step is not shorter than DDP's: not trained"}


LOCAL = "local sync_every=8 codec=int8"


@pytest.mark.parametrize(
    ("powersgd", "local", "first", "why"),
    [
        ((1.2, 1.22, 1.1), 1.15, "powersgd rank=4", "as fast but less simple"),
        # Sooner by the median alone: otherwise a later method would be first, and it would not be said why.
        (1.2, (1.0, 1.1, 1.4), "powersgd rank=4", "as fast but less simple"),
        # Later on one seed, or never there, is not as soon: by the planner's rule, as in ``thinwire plan --worth``.
        ((1.1, 1.2, 1.35), 1.15, LOCAL, "whose range overlaps with that"),
        ((1.1, 1.2, 30.0), 1.15, LOCAL, "whose range overlaps with that"),
    ],
)
def test_of_two_that_are_as_soon_the_simpler_one_is_first(raced, powersgd, local, first, why):
    world = World({"ddp": 1.0, "powersgd rank=4": 0.2, LOCAL: 0.2}, {"powersgd rank=4": powersgd, LOCAL: local})
    _, found, _ = raced(world, "powersgd:rank=4,local:sync_every=8:codec=int8", seeds=3)
    soonest, second = found.rows[:2]
    assert soonest.label == LOCAL
    assert second.seconds < 1.1 * soonest.seconds
    said, _, third = sentences(found)
    assert said.startswith(f"{first} is first")
    assert f"; next is {(second if first == LOCAL else soonest).label}, " in third
    assert why in third


def test_what_is_hardly_sooner_is_a_tie(raced):
    world = World({"ddp": 1.0, "ssgd": 0.95, "powersgd rank=4": 0.9}, {"powersgd rank=4": 1.05})
    _, found, _ = raced(world, "ssgd,powersgd:rank=4")
    assert found.rows[0].label != "ddp"
    assert sentences(found)[0].startswith("DDP is enough here")


def test_seeds_that_disagree_are_told(raced):
    world = World({"ddp": 1.0, "powersgd rank=4": 0.5}, {"powersgd rank=4": (1.0, 1.2, 2.2)})
    _, found, _ = raced(world, "powersgd:rank=4")
    assert sentences(found)[2].startswith("not sure: it took ")
    assert "which overlap" in sentences(found)[2]
    _, found, _ = raced(world, "powersgd:rank=4", seeds=1, minutes=3.0)
    assert "not sure yet: one seed may be luck" in sentences(found)[2]
    assert "; short runs: over thousands of steps the order may be another one" in sentences(found)[2]


def test_what_fails_or_does_not_get_there_is_told(raced):
    world = World(FAST, NEEDS, broken=("cast dtype=int8",))
    _, found, _ = raced(world, METHODS)
    notes = {row.label: row.note for row in found.rows}
    assert notes["cast dtype=int8"] == "failed: it broke"
    assert found.rows[0].label == "powersgd rank=4"
    _, found, _ = raced(World(FAST, NEEDS, diverging=("acp rank=16",)), METHODS, link="5mbit", workers=4)
    assert {row.label: row.note for row in found.rows}["acp rank=16"] == "failed: it diverged"
    assert {row["method"] for row in race_data(found)["rows"]} == {"cast", "powersgd"}
    with pytest.raises(BenchError, match="DDP does not train this model: it broke"):
        raced(World(FAST, NEEDS, broken=("ddp",)), METHODS, link="3mbit")
    with pytest.raises(BenchError, match="no method trains this model, only DDP does: it broke"):
        raced(World(FAST, NEEDS, broken=tuple(FAST)[1:]), METHODS, link="7mbit")
    flat = World(FAST, NEEDS)
    flat.power = 0.0
    with pytest.raises(BenchError, match="DDP's loss does not fall in "):
        raced(flat, METHODS, workers=3)


def test_a_race_without_time_to_train_answers_with_the_steps_that_it_timed(raced):
    slow = {label: 30 * seconds for label, seconds in FAST.items()}
    world = World(slow, NEEDS)
    _, found, _ = raced(world, METHODS, minutes=0.2)
    assert [kind for kind, _, _ in world.sessions] == ["seconds"]
    assert {row.label: row.step_seconds for row in found.rows} == pytest.approx(slow)
    assert [row.seconds for row in found.rows] == [None] * len(slow)
    said = sentences(found)
    assert said[0] == "powersgd rank=4 has the shortest step: 6.00 s, DDP's takes 30.0 s"
    assert f"--minutes {found.needed} or more are needed to train" in said[2]
    data = json.loads(json.dumps(race_data(found), allow_nan=False))
    assert data["race"]["next"] == f"the same command with --minutes {found.needed}"
    assert data["rows"] == []
    assert read_bench("race.json", data).answer == said
    table = race_table(found)
    assert [column.header for column in table.columns] == ["method", "step", "x compute"]
    assert table.row_count == len(slow)
    _, trained, _ = raced(world, METHODS, minutes=float(found.needed))
    assert trained.needed == 0
    assert trained.rows[0].label == "powersgd rank=4"


LONG = "local sync_every=32 codec=int2"
SLOW = {"link": "100kbit", "link_bits": 10**5}  # however busy this machine is


def test_longer_periods_race_where_the_network_takes_most_of_the_time(raced):
    """On a link of 100 kb/s this model computes for far less than an exchange takes, on one of 1 Tb/s for longer."""
    world = World({**FAST, LONG: 0.12}, {**NEEDS, LONG: 1.25})
    longer = ((25.0, parse_rows("local:sync_every=32:codec=int2")[0]),)
    asked, found, _ = raced(world, METHODS, longer=longer, minutes=40.0, **SLOW)
    assert found.rows[0].label == LONG
    assert line_to_write(found.asked.rows, LONG).endswith("\"local\", sync_every=32, codec='int2')")
    assert "local sync_every=32 codec=int2" in {row["label"] for row in race_data(found)["race"]["rows"]}
    assert LONG not in {row.label for row in asked.rows}
    _, again, _ = raced(world, METHODS, longer=longer, minutes=40.0, **SLOW)  # it is known which rows were timed
    assert (again.trained, again.rows) == (0, found.rows)

    _, found, _ = raced(world, METHODS, longer=longer, minutes=40.0, link="1tbit", link_bits=10**12)
    assert LONG not in {row.label for row in found.rows}


def test_a_period_that_is_too_long_for_the_runs_is_not_trained(raced):
    world = World({**FAST, LONG: 0.12}, {**NEEDS, LONG: 1.25})
    longer = ((25.0, parse_rows("local:sync_every=32:codec=int2")[0]),)
    _, found, _ = raced(world, METHODS, longer=longer, minutes=2.0, **SLOW)
    note = {row.label: row.note for row in found.rows}[LONG]
    (steps,) = re.fullmatch(r"not trained: runs of (\d+) steps have less than five of its periods", note).groups()
    assert int(steps) < 5 * 32
    assert not any(LONG in labels for kind, labels, _ in world.sessions if kind == "losses")


def test_a_pace_is_the_mean_of_whole_turns_and_what_comes_first_is_start_up():
    compute = RowRecord("compute", "compute", step_seconds=[0.2] * 4, host_seconds=[0.1] * 4)
    row = RowRecord("a", "acp", step_seconds=[1.0, 3.0, 1.0, 4.0], host_seconds=[0.15] * 4, losses=[1.0] * 7,
                    untimed_seconds=9.0)  # fmt: skip
    pace = step_times(row, 2, compute)
    assert (pace.seconds, pace.least, pace.most) == (2.25, 2.0, 2.5)
    assert pace.start_seconds == pytest.approx(9.0 - 3 * 2.25)
    assert pace.apart_seconds == pytest.approx(0.3)  # two ranks share a core
    assert step_times(dataclasses.replace(row, error="it broke"), 2, compute).error == "it broke"


@pytest.mark.parametrize(
    ("model", "files", "changed"),
    [
        (
            "racer_text:build",
            {"racer_text.py": "import racer_helper\ndef build(): pass\n", "racer_helper.py": "width = 3\n"},
            ("racer_helper.py", "racer_text.py"),
        ),
        # In a package, from beside it and from beside the module.
        (
            "racer_scripts.run:build",
            {
                "racer_nets/__init__.py": "",
                "racer_nets/wide.py": "width = 3\n",
                "racer_scripts/__init__.py": "",
                "racer_scripts/sizes.py": "size = 3\n",
                "racer_scripts/run.py": "from racer_nets import wide\nfrom .sizes import size\ndef build(): pass\n",
            },
            ("racer_nets/wide.py", "racer_scripts/sizes.py"),
        ),
    ],
)
def test_ones_own_files_are_part_of_what_losses_follow_from(model, files, changed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for place, text in files.items():
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text(text)
    digests = [own_digest(model)]
    module, _, build = model.partition(":")
    getattr(importlib.import_module(module), build)()
    assert own_digest(model) == digests[0]
    for place in changed:
        (tmp_path / place).write_text(f"{files[place]}more = 4\n")
        digests.append(own_digest(model))
    assert len(set(digests)) == 1 + len(changed)


def test_damaged_results_are_measured_again(raced, tmp_path):
    """A machine may stop before its disk has what was written."""
    world = World(FAST, NEEDS)
    _, found, _ = raced(world, METHODS)
    for number, file in enumerate(sorted(tmp_path.glob("*.json"))):
        file.write_text(("", file.read_text()[:40], "[]", "{}")[number % 4])
    again = raced(world, METHODS)[1]
    assert (again.trained, again.known, again.rows) == (found.trained, 0, found.rows)
    assert raced(world, METHODS)[1].trained == 0


def test_a_race_goes_on_where_nothing_can_be_kept(raced, tmp_path, caplog):
    (tmp_path / "a_file").write_text("")
    world = World(FAST, NEEDS)
    _, found, _ = raced(world, METHODS, folder=tmp_path / "a_file" / "race")
    assert found.rows[0].label == "powersgd rank=4"
    assert f"results cannot be kept in {tmp_path / 'a_file' / 'race'} (Not a directory)" in caplog.text


def test_whole_runs_are_compared_by_their_final_losses_each_at_its_best_rate(raced, tmp_path):
    local = "local sync_every=4 codec=int2"
    seconds = {"ddp": 1.0, "ssgd": 0.9, "alone": 0.1, "accumulate every=4": 0.4, local: 0.12}
    needs = {"alone": 20.0, "accumulate every=4": 1.5, local: 1.1}
    world = World(seconds, needs, rates={local: 2.0, "accumulate every=4": math.sqrt(2)})
    methods = "ssgd,alone,accumulate:every=4,local:sync_every=4:codec=int2"
    _, found, said = raced(world, methods, steps=1000, minutes=60.0)
    rows = {row.label: row for row in found.rows}
    assert found.rows[0].label == local
    for label, need in needs.items():
        assert rows[label].steps == pytest.approx(need, rel=0.01), label
    assert rows[local].rate == pytest.approx(2.0)
    assert rows[local].sooner == pytest.approx(1.0 / (0.12 * 1.1), rel=0.02)
    assert rows["ssgd"].steps == 1.0
    assert 0.9 < found.way(local) < 1
    assert (found.way("alone"), found.way("ddp"), found.way("ssgd")) == (0.0, 1.0, None)
    assert found.target == pytest.approx(5 * 1000**-0.15)
    trained = [(labels, seed) for kind, labels, seed in world.sessions if kind == "losses"]
    assert {seed for _, seed in trained} == {0}
    assert sum("ddp" in labels for labels, _ in trained) == 5 + 3  # rates, and shares of the run
    assert not any("ssgd" in labels for labels, _ in trained)
    assert any(re.match(r"runs of 4 methods, 1000 steps each: about \d+ minutes", text) for text in said)
    assert "short runs" not in sentences(found)[2]
    assert any(line.endswith("alone, 0, to DDP, 1; its steps see half the data") for line in basis(found))
    of_four = dataclasses.replace(found, asked=dataclasses.replace(found.asked, workers=4))
    assert any(line.endswith("0, to DDP, 1; its steps see 1/4 of the data") for line in basis(of_four))

    data = race_data(found)
    assert data["race"]["finals"][local]["way"] == found.way(local)
    (tmp_path / "race.json").write_text(json.dumps(data))
    worth = read_worth(tmp_path / "race.json")(Periodic(Cast("int8"), 4, 0), 1000, 2)
    assert worth.middle == pytest.approx(1.1, rel=0.01)
    assert worth.source.endswith("whole runs of 1,000 steps")

    again = World(seconds, needs)
    raced(again, methods, steps=1000, minutes=60.0)
    assert not again.sessions  # all is known
