"""What goes wrong between ranks ends with a sentence on every rank, never with a hang."""

import math
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial

import cases
import pytest
import torch

import thinwire as tw
from spawned import free_port, run
from thinwire.engine.buckets import Buckets

pytestmark = pytest.mark.dist


def _disagree(rank, size):
    messages = []

    def attempt(net, method="ssgd", **options):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        try:
            tw.attach(net, optimizer, method, **options)
        except ValueError as error:
            messages.append(str(error))

    attempt(cases.model(width=24 if rank == 0 else 32))
    attempt(cases.model(dtype=torch.float32 if rank == 0 else torch.float64))
    attempt(cases.model(depth=2 + rank))
    attempt(cases.model(), "acp", rank=2 + rank)
    attempt(cases.model(), "acp" if rank else "ssgd")
    attempt(cases.model(), "acp", rank=2, seed=rank)
    attempt(cases.model(), detect_desync=bool(rank))
    attempt(cases.model(), "local", detect_desync=bool(rank))
    attempt(cases.model(), scaler=torch.amp.GradScaler("cpu", enabled=bool(rank)))
    dtype = torch.float16 if rank else torch.bfloat16
    for what in ("buffer", "frozen"):
        net = cases.model()
        if what == "buffer":
            net.register_buffer("mean", torch.ones(3, dtype=dtype))
        else:
            net[0].to(dtype).requires_grad_(False)
        attempt(net)
    layers = [torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)]
    attempt(torch.nn.ModuleDict(dict(zip("ba" if rank else "ab", layers))), "dear")
    for method in ("ssgd", "local"):
        net = cases.model()
        for lr, decay in ((0.1 + rank, 0.0), (torch.tensor(0.1), rank / 10)):
            optimizer = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=decay, foreach=False)
            messages.append(cases.said(lambda o=optimizer, m=net, how=method: tw.attach(m, o, how)))
    return messages


def test_ranks_that_differ_are_told_what_differs():
    words = ["0.bias", "float32", "parameters: ", "rank: 2 against 3", "method", "seed", *["detect_desync"] * 2]
    words += ["enabled scaler: False against True"]
    words += [
        "mean [3] torch.bfloat16 against mean [3] torch.float16",
        "0.weight [24, 24] torch.bfloat16 against 0.weight",
    ]
    words += ["parameters in order: [0] a.weight against b.weight"]
    words += [
        "AdamW, parameter group 0, lr: 0.1 against 1.1",
        "AdamW, parameter group 0, weight_decay: 0.0 against 0.1",
    ] * 2
    for messages in run(_disagree, 2):
        assert len(messages) == len(words)
        for message, word in zip(messages, words):
            assert word in message
            assert "rank 1 differs from rank 0" in message


def _destroyed(rank, size):
    os.environ["GLOO_DEVICE_TRANSPORT"] = "TCP_TLS"  # leaves all to Gloo: thinwire's own connections would go on
    net = cases.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    tw.attach(net, optimizer, "dear")
    torch.distributed.destroy_process_group()
    with pytest.raises(RuntimeError) as caught:
        net(torch.ones(2, 24)).sum().backward()
    return str(caught.value)


def test_a_group_that_was_destroyed_is_named():
    for said in run(_destroyed, 2):
        assert "destroy_process_group() was called" in said


def _closed_late(rank, size, before):
    def attached():
        net = cases.model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        return net, optimizer, tw.attach(net, optimizer, "ssgd", timeout=30)

    def step(net, optimizer, _):
        net(torch.full((2, 24), rank + 1.0)).sum().backward()
        optimizer.step()
        return [p.detach().clone() for p in net.parameters()]

    old, store = attached(), torch.distributed.distributed_c10d._get_default_store()
    torch.distributed.destroy_process_group()
    again = torch.distributed.PrefixStore("again", store)
    torch.distributed.init_process_group("gloo", store=again, rank=rank, world_size=size)
    handles = [] if before else [attached()]
    old[-1].close()
    handles += [attached() for _ in range(2)]  # one would have its groups from the second, if not from the old handle
    found = [step(*handle) for handle in handles]
    for *_, sync in handles:
        sync.close()
    return found


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("sockets", ["1", "2"])
def test_a_handle_that_is_closed_after_its_groups_were_destroyed_spoils_no_later_one(before, sockets, monkeypatch):
    monkeypatch.setenv("THINWIRE_SOCKETS", sockets)
    first, second = run(_closed_late, 2, before, fresh=True)
    assert all(torch.equal(x, y) for mine, theirs in zip(first, second) for x, y in zip(mine, theirs))


def _killed(rank, size, victim, step_of_death, how):
    net = cases.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    tw.attach(net, optimizer, "ssgd", fusion="none", timeout=8)  # a busy machine may keep a live rank for seconds
    told = torch.distributed.distributed_c10d._get_default_store().clone()
    try:
        for step in range(20):
            if step == step_of_death and rank == victim:
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                told.wait([f"told {r}" for r in range(size) if r != victim])  # lags
                os._exit(0)
            cases.down(cases.loss_of(net, rank, step), optimizer)
    except RuntimeError as error:
        told.set(f"told {rank}", "")
        if rank == 0 and how == "lag":  # who holds the store ends last
            told.wait(["told 1"])
        return str(error)
    return "finished"


@pytest.mark.parametrize("how", ["kill", "lag"])
def test_a_dead_or_late_rank_is_named(how):
    started = {2: 0 if how == "lag" else -signal.SIGKILL}
    results = run(_killed, 3, 2, 7, how, seconds=250, expect_exit=started)
    for rank in (0, 1):
        assert "step 7" in results[rank]
        assert "bucket" in results[rank]
        assert "Rank 2 did not report" in results[rank]


def _left_to_the_caller(rank, size):
    net = cases.model()
    optimizer, told = torch.optim.SGD(net.parameters(), lr=0.1), []
    sync = tw.attach(net, optimizer, "topk", density=0.1, start_compression_step=0, timeout=15, on_failure=told.append)
    for step in range(9):
        if (rank, step) == (1, 5):
            os.kill(os.getpid(), signal.SIGKILL)
        owed = {name: x.clone() for name, x in sync.services.state.residuals.items()}
        cases.loss_of(net, rank, step).backward()  # does not raise
        if told:
            break
        optimizer.step()
        optimizer.zero_grad()
    kept = all(torch.equal(x, owed[name]) for name, x in sync.services.state.residuals.items())
    sync.close()
    return step, len(told), str(told[0]), kept


def test_who_decides_himself_is_told_of_a_failure_which_leaves_no_trace():
    step, times, sentence, kept = run(_left_to_the_caller, 2, expect_exit={1: -signal.SIGKILL})[0]
    assert (step, times, kept) == (5, 1, True)
    assert "the ranks that continue are being chosen" in sentence.lower()


def _gone_before_an_answer(rank, size):
    net = cases.model()
    sync = tw.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), timeout=60)
    torch.distributed.barrier()
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(100):  # what the other still sends before it ends
            sync.services.session.comm.gather_tensor(torch.zeros(1))
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def test_who_does_not_answer_is_named_wherever_it_is_asked():
    said = run(_gone_before_an_answer, 2, expect_exit={1: -signal.SIGKILL})[0]
    assert said.startswith("rank 0: gathering failed: RuntimeError: ")
    assert said.endswith(SILENT.format(1))
    assert said.count(". ") == 1  # what happened, and who


def _absent(rank, size):
    told = torch.distributed.distributed_c10d._get_default_store().clone()
    others = [f"told {r}" for r in range(size - 1)]
    if rank == size - 1:
        told.wait(others)  # alive, but never in attach
        return ""
    net = cases.model()
    told.set(f"ready {rank}", "")
    told.wait([f"ready {r}" for r in range(size - 1)])
    with pytest.raises(RuntimeError) as error:
        tw.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), timeout=4)
    told.set(f"told {rank}", "")
    told.wait(others)
    return str(error.value)


def test_a_rank_that_does_not_come_to_attach_is_named():
    for rank, message in enumerate(run(_absent, 3, fresh=True)[:2]):
        assert message.startswith(f"rank {rank}: connecting failed: ")
        assert message.endswith(SILENT.format(2))
        assert "\n" not in message


def _refused_on_one(rank, size, how):
    store = torch.distributed.distributed_c10d._get_default_store().clone()
    net = cases.model()
    optimizer = torch.optim.SGD((net[0] if rank and how == "optimizer" else net).parameters(), lr=0.1)
    if rank and how == "buffer":
        net.register_buffer("table", torch.eye(3).to_sparse())
    if rank and how == "memory":
        Buckets.adopt = _no_memory
    with pytest.raises((RuntimeError, TypeError, ValueError)) as error:
        tw.attach(net, optimizer, "topk", density=0.1, timeout=100)
    store.set(f"{how} {rank}", "")
    store.wait([f"{how} {r}" for r in range(size)], timedelta(seconds=50))  # it lives on, and its sockets with it
    return str(error.value)


def _no_memory(*_):
    raise RuntimeError("out of memory")


@pytest.mark.parametrize(
    "how, why",
    [
        ("optimizer", "ValueError: the optimizer does not own"),
        ("buffer", "TypeError: the buffer table"),
        ("memory", "RuntimeError: out of memory"),
    ],
)
def test_a_rank_that_fails_in_attach_is_named_by_the_others_long_before_the_limit(how, why):
    first, _ = run(_refused_on_one, 2, how, fresh=True)
    assert f"Rank 1 has left attach with {why}" in first


class Interrupted(tw.SSGD):
    """What a signal handler does that is called in the middle of an exchange."""

    left, kind = 0, SystemExit

    def reduce(self, bucket, state):
        type(self).left -= 1
        if not self.left:
            raise self.kind(3)
        yield from super().reduce(bucket, state)


def _preempted(rank, size):
    net = cases.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    caught = []
    for Interrupted.kind in (SystemExit, KeyboardInterrupt):
        with tw.attach(net, optimizer, Interrupted(fusion="none"), timeout=20):
            Interrupted.left = 4  # now: a plan is traced by a method's own programs
            try:
                cases.walk(net, optimizer, rank, 0, 5)
            except BaseException as error:
                caught.append((type(error).__name__, error.args))
    return caught


def test_what_a_signal_handler_raises_in_an_exchange_reaches_the_script():
    for caught in run(_preempted, 2, fresh=True):
        assert caught == [("SystemExit", (3,)), ("KeyboardInterrupt", (3,))]


def test_bad_input_is_one_sentence():
    from torch import nn

    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for kwargs, word in [
        ({"method": "acp", "rnak": 2}, "rank"),
        ({"method": "ssgd", "fusion": "sometimes"}, "fusion"),
        ({"method": "ssgd", "merge": 4}, "unknown option of ssgd: 'merge'"),
        ({"method": "ssgd", "bucket_cap_mb": 25, "fusion": 4}, "bucket_cap_mb=25 and fusion=4 mean the same"),
        ({"method": "auto", "bucket_cap_mb": 25}, "leave out bucket_cap_mb=25"),
        ({"method": tw.SSGD(), "bucket_cap_mb": 25}, r"SSGD\(...\) carries its own options: pass fusion=25"),
        *(({"bucket_cap_mb": value}, f"bucket_cap_mb={value!r}") for value in (0, -1, True, "single", math.nan)),
        ({"method": "ssgd", "find_unused_parameters": "maybe"}, "find_unused_parameters"),
        ({"method": "ssgd", "keep_dense": "all"}, "keep_dense"),
        ({"method": "ssgd", "plan": "adaptive!"}, "plan"),
        ({"method": "dear", "on_failure": print}, "dear is decoupled: .* leave out on_failure"),
        ({"method": "local", "on_failure": print}, "local steps have no end of backward"),
        ({"method": "acp", "start_compression_step": -1}, "start_compression_step"),
        *(({"method": "ssgd", "timeout": value}, "timeout") for value in (-1, 0, "x", True, math.nan, math.inf)),
    ]:
        with pytest.raises(ValueError, match=word) as error:
            tw.attach(net, optimizer, **kwargs)
        assert "\n" not in str(error.value)
    for name, value in (("scaler", 5), ("topology", 5)):
        with pytest.raises(TypeError, match=f"{name}=5 must be a"):
            tw.attach(net, optimizer, **{name: value})
        with pytest.raises(TypeError, match=f"{name}=5 must be a"):
            tw.ddp_hook("ssgd", **{name: value})
    with pytest.raises(ValueError, match="timeout=-1 must be"):
        tw.ddp_hook("ssgd", timeout=-1)
    with pytest.raises(ValueError, match="does not own"):
        tw.attach(nn.Linear(4, 4), optimizer)
    with pytest.raises(ValueError, match="no trainable"):
        tw.attach(nn.Linear(4, 4).requires_grad_(False), optimizer)
    words = nn.Embedding(5, 4, sparse=True)
    with pytest.raises(TypeError, match="sparse=False"):
        tw.attach(words, torch.optim.SGD(words.parameters(), lr=0.1))


def test_world_size_one_compresses_nothing_and_says_so():
    net = cases.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    cases.loss_of(net, 0, 0).backward()
    expected = [p.grad.clone() for p in net.parameters()]
    optimizer.zero_grad()
    with tw.attach(net, optimizer, "acp", rank=2) as sync:
        cases.loss_of(net, 0, 0).backward()
        assert all(torch.equal(a, p.grad) for a, p in zip(expected, net.parameters()))
        assert "one rank" in sync.stats().note
        assert sync.stats().bytes_sent == 0


@pytest.mark.parametrize("method", ["ssgd", "local"])
def test_a_group_that_was_forgotten_under_a_launcher_is_asked_for(method, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    net = cases.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    assert "WORLD_SIZE is 2, but there is no process group" in cases.said(lambda: tw.attach(net, optimizer, method))
    with tw.attach(net, optimizer, method, topology=tw.Topology(1)) as sync:
        assert sync.stats().world_size == 1


SILENT = (
    "Rank {} did not report: dead, late or done already (all ranks need as many batches, or sync.join(), and the same "
    "calls)."
)
LOSSY = (("powersgd", {"rank": 1}), ("acp", {"rank": 1}), ("topk", {"density": 0.05}))


def _now_and_then(delays, gradient):
    if delays.random() < 0.2:
        time.sleep(delays.random() * 0.001)


def _delayed(rank, size, repetitions, steps):
    """Each repetition with another method, in turns."""
    import random

    for repetition in range(repetitions):
        delays = random.Random(100 * repetition + rank)
        name, options = LOSSY[repetition % len(LOSSY)]
        net = cases.model(width=12, depth=4)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        sync = tw.attach(net, optimizer, name, fusion="none", timeout=30, **options)
        for p in net.parameters():
            p.register_hook(partial(_now_and_then, delays))
        for step in range(steps):
            cases.down(cases.loss_of(net, rank, step, width=12), optimizer)
        weights = torch.cat([w.flatten() for w in cases.weights(net)])
        sync.close()
    return weights


def _same(results):
    return all(torch.equal(results[0], other) for other in results)


@pytest.mark.slow
def test_random_delays_never_hang():
    assert _same(run(_delayed, 4, len(LOSSY), 60, seconds=250))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_random_delays_never_hang_in_twenty_repetitions():
    assert _same(run(_delayed, 4, 20, 200, seconds=3500))


def _recovers(rank, size, who):
    """An exception in the middle of a backward, on all ranks or on one; all go on in the same processes."""
    net = cases.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    options = {"rank": 1, "start_compression_step": 0, "fusion": "none", "timeout": 15}
    sync, said, step, armed = tw.attach(net, optimizer, "acp", **options), "", 0, True
    while step < 6:
        if armed and step == 3 and rank in who:
            handle = net[2].weight.register_hook(_out_of_memory)
        try:
            cases.loss_of(net, rank, step).backward()
        except RuntimeError as error:
            said, armed = str(error), False
            if rank in who:
                handle.remove()
            optimizer.zero_grad()
            state = sync.state_dict()
            try:
                raise error
            except RuntimeError:
                sync.close()
            sync = tw.attach(net, optimizer, "acp", **options)
            sync.load_state_dict(state)
            continue
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    sync.close()
    return said, cases.weights(net)


def _out_of_memory(gradient):
    raise RuntimeError("out of memory, say")


def test_going_on_after_an_exception():
    undisturbed = run(_recovers, 2, ())
    for rank, (said, weights) in enumerate(run(_recovers, 2, (1,), fresh=True)):
        if rank:
            assert said == "out of memory, say"
        else:
            assert "Rank 1 has left at step 3 with RuntimeError: out of memory, say" in said
        for a, b in zip(weights, undisturbed[rank][1]):
            assert torch.equal(a, b)


def _fails_after_the_exchange(rank, size, what):
    net = torch.nn.Sequential(cases.model(), torch.nn.BatchNorm1d(5))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    sync = tw.attach(
        net, optimizer, "acp", start_compression_step=0, timeout=15, find_unused_parameters=True, detect_desync=True
    )
    comm, source = sync.services.session.comm, sync.services.source
    objects = {"check_order": comm, "gather": comm, "receive": source.buffers}
    cases.down(net(cases.batch(rank, 0)[0]).mean(), optimizer)

    def fails(*_):
        raise RuntimeError(f"{what} failed, say")

    setattr(objects[what], what, fails)
    with pytest.raises(RuntimeError, match=f"{what} failed, say"):
        net(cases.batch(rank, 1)[0]).mean().backward()
    delattr(objects[what], what)
    with pytest.raises(RuntimeError, match=f"unusable after an earlier failure: {what} failed, say"):
        net(cases.batch(rank, 1)[0]).mean().backward()
    sync.close()
    assert not sync.services.session.running


@pytest.mark.parametrize("what", ["check_order", "gather", "receive"])
def test_a_failure_after_the_last_bucket_ends_it_too(what):
    run(_fails_after_the_exchange, 2, what, fresh=True)


RAISES = """
import torch, torch.distributed as dist, thinwire as tw
dist.init_process_group("gloo")
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
tw.attach(net, optimizer, "ssgd", timeout=30)
for step in range(4):
    if step == 2 and dist.get_rank() == 1:
        raise KeyError("a batch that is not there")
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_a_rank_whose_own_code_failed_is_not_called_dead():
    started = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RAISES], stderr=subprocess.PIPE, text=True, env=started | {"RANK": str(r)}
        )
        for r in range(2)
    ]
    first, second = (process.communicate()[1] for process in ranks)
    assert "Rank 1 has ended with KeyError: 'a batch that is not there'" in first
    assert "KeyError" in second
    assert [process.returncode for process in ranks] == [1, 1]
