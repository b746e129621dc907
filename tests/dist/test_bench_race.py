"""Rows race to a loss on real ranks; a row of one's own beside torch's and thinwire's."""

import contextlib
import dataclasses
import io
import os
import time

import pytest
import torch
import torch.distributed as dist

from spawned import run
from thinwire.core.events import event_in
from thinwire.core.program import Plan
from thinwire.core.records import made
from thinwire.tools.bench import worker
from thinwire.tools.bench.models.registry import build_model
from thinwire.tools.bench.models.workload import Workload
from thinwire.tools.bench.row_on_rank import UNUSED, RowOnRank, share_of_rate
from thinwire.tools.bench.rows import Row, parse_rows
from thinwire.tools.bench.session import BenchSpec, RowRecord, seconds_to
from thinwire.tools.bench.trainer import Trainer

pytestmark = pytest.mark.dist
MODEL = "teacher:batch=64:ranks=2:lr=0.02"


class Averaging:
    """The gradients averaged by hand, then the step."""

    def __init__(self, optimizer, group):
        self.optimizer, self.group = optimizer, group

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def step(self):
        for parameters in self.optimizer.param_groups:
            for p in parameters["params"]:
                dist.all_reduce(p.grad, group=self.group)
                p.grad /= dist.get_world_size(self.group)
        self.optimizer.step()


def by_hand(workload, group):
    return Trainer(workload.model, Averaging(workload.optimizer(workload.model), group))


class Meeting(Averaging):
    """Steps alone; the weights averaged after every fourth."""

    steps = 0

    def step(self):
        self.optimizer.step()
        self.steps += 1
        for parameters in self.optimizer.param_groups if self.steps % 4 == 0 else ():
            for p in parameters["params"]:
                dist.all_reduce(p.data, group=self.group)
                p.data /= dist.get_world_size(self.group)


def every_4(workload, group):
    return Trainer(workload.model, Meeting(workload.optimizer(workload.model), group), period=4)


def broken(workload, group):
    raise RuntimeError("no such library here")


def _race(rank, size, target):
    own = (Row("by hand", "test_bench_race:by_hand"), Row("broken", "test_bench_race:broken"))
    now_and_then = Row("every 4", "test_bench_race:every_4")
    rows = (*parse_rows("ddp,ssgd,local:sync_every=2"), now_and_then, *own)
    record = worker.run(BenchSpec(MODEL, rows, size, target=target, every=3, steps=60, rounds=2, operation_seconds=20))
    return {row.label: row for row in record.rows}


def _late(rank, size, curves):
    rows = parse_rows("local:sync_every=4:fragment_sync_delay=2,local:sync_every=4")
    told = {"curves": True} if curves else {"target": 0.0}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        record = worker.run(
            BenchSpec(MODEL, rows, size, every=4, steps=16, rounds=1, warmup=0, operation_seconds=20, **told)
        )
    events = [event_in(line)[0] for line in out.getvalue().splitlines()]
    trained = [made(RowRecord, event["trained"]) for event in events if "trained" in event]
    trains = [row for row in record.rows if row.kind != "compute"]
    # Said as each row ends, by the rank that is listened to, as an interrupted race goes on from there.
    assert [(row.label, row.curve) for row in trained] == [
        (row.label, row.curve) for row in trains if curves and rank == 0
    ]
    return [[p.step for p in row.curve] for row in trains]


@pytest.mark.parametrize("curves", [False, True])
def test_no_exchange_travels_while_a_row_waits_for_its_turn(curves):
    """It would be free of charge: a turn ends when what was sent is merged."""
    for late, waited in run(_late, 2, curves):
        assert late[:4] == [0, 6, 10, 14]
        assert waited[:4] == [0, 4, 8, 12]


def _timed(rank, size):
    rows = parse_rows("local:sync_every=4:fragment_sync_delay=2,local:sync_every=4")
    record = worker.run(BenchSpec(MODEL, rows, size, steps=4, rounds=2, warmup=1, operation_seconds=20))
    return [(len(row.losses), len(row.step_seconds)) for row in record.rows if row.kind != "compute"]


def test_nor_while_others_are_timed():
    """In both turns a period that is not timed, and one that is; after the first, steps until its round is merged."""
    for late, waited in run(_timed, 2):
        assert late == (4 + 4 + 2 + 4 + 4, 2 * 4)
        assert waited == (2 * (4 + 4), 2 * 4)


def _counted(rank, size):
    spec = BenchSpec("digits", parse_rows("lags:fusion=none,topk:density=0.1"), size, steps=1, rounds=1, warmup=0)
    _, lags, topk = worker.run(spec).rows
    plan = Plan.from_json(lags.plan)
    fewest = [[dataclasses.replace(b, kept=0 if b.dense else 3) for b in phase] for phase in plan.phases]
    fewest = Plan(tuple(map(tuple, fewest)))
    pinned = RowOnRank(Row("lags", "lags", plan=fewest.to_json()), spec, None)
    pinned.step(rank)
    pinned.close()
    counts = [[bucket.kept for bucket in of.phases[0] if not bucket.dense] for of in (plan, pinned.sync.plan)]
    return counts, topk.plan


def test_a_row_whose_plan_says_how_much_is_sent_tells_it_and_trains_with_it():
    for (counts, pinned), without in run(_counted, 2):
        assert len(counts) > 1
        assert all(counts)
        assert pinned == [3] * len(counts)
        assert without == ""


def fails_on_one_rank(how="nan", at=3):
    model = torch.nn.Linear(4, 1)

    def loss(model, step, rank):
        if step == at and rank == 1 and how == "raise":
            raise OSError("a damaged sample")
        made = model(torch.full((2, 4), float(rank))).square().mean()
        return made * float("nan") if step == at and rank == 1 else made

    return model, loss


def _failing(rank, size, how, curves):
    model = f"test_bench_race:fails_on_one_rank:how={how}"
    rows = parse_rows("ddp,ssgd")
    record = worker.run(
        BenchSpec(model, rows, size, steps=8, rounds=1, warmup=0, every=8, operation_seconds=60, curves=curves)
    )
    return [row.error for row in record.rows]


@pytest.mark.parametrize(
    ("how", "curves", "says"),
    [
        ("nan", True, "ArithmeticError: the loss is nan at step "),
        ("nan", False, "rank 1: ArithmeticError: the loss is nan at step 4"),
        ("raise", False, "rank 1: OSError: a damaged sample"),
    ],
)
def test_what_fails_on_one_rank_is_told_at_once(how, curves, says):
    """Nobody waits for that rank in an exchange, until it is given up."""
    for rows in run(_failing, 2, how, curves, seconds=50.0):
        assert all(says in error for error in rows), rows


def uses_a_part(find=False):
    """One of two layers is used in each step, on all ranks the same."""
    model = torch.nn.ModuleList([torch.nn.Linear(4, 1) for _ in range(2)])
    model.forward = lambda x, which: model[which](x)

    def loss(model, step, rank):
        return model(torch.full((2, 4), 1.0 + rank), step % 2).square().mean()

    return Workload(
        "parts", model, loss, lambda m: torch.optim.SGD(m.parameters(), lr=0.01), "", None, find_unused_parameters=find
    )


def drawn_anew():
    model = torch.nn.Linear(4, 1)
    torch.nn.init.constant_(model.bias, int.from_bytes(os.urandom(2), "big"))
    return model, lambda model, step, rank: model(torch.ones(2, 4)).square().mean()


def breaks_in_ddp():
    """Rank 1 fails where DDP exchanges, for which rank 0 then waits."""

    def loss(model, step, rank):
        if rank == 1 and step == 2 and isinstance(model, torch.nn.parallel.DistributedDataParallel):
            raise ValueError("no more examples")
        return model(torch.ones(2, 4)).square().mean()

    return torch.nn.Linear(4, 1), loss


def _records(rank, size, model, rows, seconds=60):
    spec = BenchSpec(model, parse_rows(rows), size, steps=4, rounds=1, warmup=0, operation_seconds=seconds)
    return [(row.error, row.losses) for row in worker.run(spec).rows]


def test_a_model_that_is_used_in_parts_trains_where_ddp_knows_of_it():
    for (_, _), (error, _), (fine, _) in run(_records, 2, "test_bench_race:uses_a_part", "ddp,ssgd"):
        assert error == f"rank 0: RuntimeError: {UNUSED}"
        assert fine == ""
    for (_, _), (error, ddp), (_, ssgd) in run(_records, 2, "test_bench_race:uses_a_part:find=true", "ddp,ssgd"):
        assert error == ""
        assert len(ddp) == 4
        assert ssgd[:4] == ddp


CALLS = []


def slow_on_rank_1():
    def loss(model, step, rank):
        CALLS.append(step)
        time.sleep(0.03 * rank)
        return model(torch.full((2, 4), 1.0 + rank)).square().mean()

    return torch.nn.Linear(4, 1), loss


def _at_own_pace(rank, size):
    CALLS.clear()
    rows = parse_rows("local:sync_every=8:codec=int8:pace=own")
    spec = BenchSpec("test_bench_race:slow_on_rank_1", rows, size, steps=12, rounds=2, warmup=8, speeds=(1.0, 0.5))
    (_, row), contender = worker.run(spec).rows, RowOnRank(Row("alone", "alone"), spec, None)
    return row.error, len(row.losses), len(row.step_seconds), len(CALLS), contender.fastest


def test_at_its_own_pace_a_slow_rank_makes_fewer_steps_of_a_row_and_is_timed_over_whole_periods():
    (*fast, made, fastest), (*slow, fewer, _) = run(_at_own_pace, 2)
    assert fast == slow == ["", 8 + 16 + 8 + 16, 32]
    assert fewer < made
    assert fastest  # alone needs nobody else


@pytest.mark.slow
def test_the_rank_that_failed_first_is_named():
    for (alone, _), (error, _) in run(_records, 2, "test_bench_race:breaks_in_ddp", "ddp", 10):
        assert alone == ""
        assert error == "rank 1: ValueError: no more examples"


def test_rows_that_would_start_from_different_weights_are_refused():
    """Each row builds the model: what is drawn from a source without a seed would decide the race."""
    for (alone, _), *rows in run(_records, 2, "test_bench_race:drawn_anew", "ddp,ssgd"):
        assert alone == ""
        assert all("the model's initial weights differ from those of the row before" in error for error, _ in rows)


def test_rows_stop_at_the_loss_and_equal_training_takes_equal_steps():
    fresh = build_model(MODEL)
    target = fresh.evaluate(fresh.model, 0, 0).item() * 0.55
    for rows in run(_race, 2, target):
        assert rows["broken"].error == "rank 0: RuntimeError: no such library here"
        assert not rows["broken"].curve
        assert len(rows["compute"].losses) == 6
        ddp, by_hand, ssgd = rows["ddp"], rows["by hand"], rows["ssgd"]
        assert 3 < len(ddp.losses) < 60
        assert ddp.curve[-1].validation <= target < ddp.curve[-2].validation
        assert [p.step for p in ddp.curve] == list(range(0, len(ddp.losses) + 1, 3))
        assert ddp.curve[-1].seconds == pytest.approx(sum(ddp.step_seconds) + ddp.untimed_seconds)
        assert ddp.curve[-2].seconds <= seconds_to(ddp.curve, target) <= ddp.curve[-1].seconds
        assert by_hand.losses == pytest.approx(ddp.losses)
        assert [p.validation for p in by_hand.curve] == pytest.approx([p.validation for p in ddp.curve])
        both = min(len(ssgd.losses), len(ddp.losses))
        assert ssgd.losses[:both] == pytest.approx(ddp.losses[:both])
        assert ssgd.curve[1].step == 4  # its first step decides the buckets: it is not timed by itself, but counts
        assert ssgd.untimed_seconds > 0 == ddp.untimed_seconds
        assert ssgd.curve[-1].seconds == pytest.approx(sum(ssgd.step_seconds) + ssgd.untimed_seconds)
        local = next(row for label, row in rows.items() if label.startswith("local"))
        assert local.curve[-1].validation <= target
        assert [p.step for p in local.curve] == list(range(0, len(local.losses) + 1, 4))  # whole periods
        assert local.step_seconds[::2] == local.step_seconds[1::2]  # a step counts as its period's mean
        assert local.curve[-1].seconds == pytest.approx(sum(local.step_seconds) + local.untimed_seconds)
        meeting = rows["every 4"]
        assert [p.step for p in meeting.curve] == list(range(0, len(meeting.losses) + 1, 4))
        for place in range(0, len(meeting.step_seconds), 4):
            assert len(set(meeting.step_seconds[place : place + 4])) == 1


def line():
    """A model of one weight, whose gradient is the batch's number: rank plus step."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)

    def loss(model, step, rank):
        return model(torch.full((1, 1), float(rank + step))).sum()

    return Workload("line", model, loss, lambda m: torch.optim.SGD(m.parameters(), lr=1.0), "")


def _rows_of_everybody(rank, size):
    found = {}
    for schedule in (False, True):
        spec = BenchSpec("test_bench_race:line", (), size, steps=8, warmup=0, schedule=schedule)
        for row in parse_rows("ddp,accumulate:every=4,alone"):
            contender = RowOnRank(row, spec, None)
            weights = []
            for _ in range(8):
                contender.step(rank)
                weights.append(contender.workload.model.weight.item())
            found[schedule, row.kind] = weights
            assert contender.period == (4 if row.kind == "accumulate" else 1)
            contender.close()
    return found


def test_rows_that_everybody_has_do_what_they_say():
    for rank, found in enumerate(run(_rows_of_everybody, 2)):
        sums = [sum(0.5 + step for step in range(n)) for n in range(1, 9)]
        assert found[False, "ddp"] == [-x for x in sums]
        assert found[False, "accumulate"] == [0, 0, 0, *[-sums[3] / 4] * 4, -sums[7] / 4]
        assert found[False, "alone"] == [-float(sum(rank + step for step in range(n))) for n in range(1, 9)]
        rates = [share_of_rate(step, 8) for step in range(8)]
        scheduled = [-sum(rates[step] * (0.5 + step) for step in range(n)) for n in range(1, 9)]
        assert found[True, "ddp"] == pytest.approx(scheduled)
