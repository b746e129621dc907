"""Replicas under torchft in processes of their own, which write down each step that counts; and who kills them."""

import hashlib
import json
import os
import random
import signal
import time
from datetime import timedelta

from spawned import fork

TIMEOUT = 4.0  # of an exchange, seconds
HEARTBEAT_MS = 1000
_BATCH = 16


def digest(tensors):
    found = hashlib.blake2b(digest_size=8)
    for x in tensors:
        found.update(x.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def _model():
    import torch

    torch.manual_seed(0)
    first, second, last = torch.nn.Linear(12, 48), torch.nn.Linear(48, 48), torch.nn.Linear(48, 4)
    norm = torch.nn.BatchNorm1d(48)  # buffers, which are to be equal too
    return torch.nn.Sequential(first, torch.nn.Tanh(), second, norm, torch.nn.Tanh(), last)


def _drawn(count, seed):
    """Data with noise in what is to be learnt, which no model predicts: the loss has a floor."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    x, noise = torch.randn(count, 12, generator=draw), torch.randn(count, 4, generator=draw)
    teacher = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    return x, torch.tanh(x @ teacher) + 0.3 * noise


def _data(replica, step):
    return _drawn(_BATCH, 1000 * step + replica)


def loss_of(model):
    import torch

    x, y = _drawn(2048, 7)
    model.eval()
    with torch.no_grad():
        return float((model(x) - y).square().mean())


def untrained_loss():
    return loss_of(_model())


def projected(tensors):
    """One number that is linear in the tensors, by name."""
    import torch

    total = torch.zeros((), dtype=torch.float64)
    for name, x in sorted(tensors.items()):
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")
        w = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        total += (w * x.double()).sum()
    return float(total)


def ended(folder, step):
    try:
        with open(f"{folder}/end") as file:
            return step >= int(file.read())
    except FileNotFoundError:
        return False


def serve_lighthouse(pipe, least):
    os.environ.setdefault("RUST_LOG", "error")
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=least, join_timeout_ms=3000, quorum_tick_ms=20,
        heartbeat_timeout_ms=HEARTBEAT_MS,
    )  # fmt: skip
    pipe.send(server.address())
    pipe.recv()
    server.shutdown()


def _train_steps(model, inner, manager, batches, doubt, note, attached):
    """The exchange of gradients; an event for each step."""
    from torchft import Optimizer

    optimizer, own = Optimizer(manager, inner), {}
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: own.__setitem__(name, p.grad.clone()))
    with attached(optimizer) as sync:
        for x, y in batches:
            optimizer.zero_grad()
            step, before = manager.current_step(), sync.residuals()
            (model(x) - y).square().mean().backward()
            applied = {name: p.grad.clone() for name, p in model.named_parameters()}
            doubt()
            optimizer.step()
            after, stats = sync.residuals(), sync.stats()
            note(
                event="lost" if manager.current_step() == step else "step", step=step + 1, size=stats.world_size,
                rank=stats.rank, quorum=sync.quorum.number, weights=digest(model.state_dict().values()),
                before=digest(before.values()), after=digest(after.values()), gradient=projected(own),
                owed=projected(before), applied=projected(applied), owes=projected(after),
                lost_norm=stats.lost_residual_norm,
            )  # fmt: skip


def _train_rounds(model, inner, manager, batches, doubt, note, attached):
    """Local steps; an event for each round. The "gradient" is the negative weights: the outer ones cancel out."""
    start, ask, rounds = manager.start_quorum, manager.should_commit, []

    def weights():
        return {name: -p.detach() for name, p in model.named_parameters()}

    def started():
        start()
        before = sync.residuals()
        step, gradient = manager.current_step() + 1, projected(weights())
        rounds.append(
            {"step": step, "before": digest(before.values()), "owed": projected(before), "gradient": gradient}
        )

    def asked():
        doubt()
        if counts := ask():
            return counts
        note(event="lost", size=0, quorum=sync.quorum.number, **rounds.pop(), after=digest(sync.residuals().values()))
        return counts

    manager.start_quorum, manager.should_commit = started, asked

    def made(*_):
        if rounds:
            after, stats = sync.residuals(), sync.stats()
            note(
                event="step", **rounds.pop(), size=stats.world_size, rank=stats.rank, quorum=sync.quorum.number,
                weights=digest(model.state_dict().values()), after=digest(after.values()),
                applied=projected(weights()), owes=projected(after),
            )  # fmt: skip

    with attached(inner) as sync:
        model.register_forward_pre_hook(made)  # the first forward makes a round, before it changes buffers
        for x, y in batches:
            inner.zero_grad()
            (model(x) - y).square().mean().backward()
            inner.step()
            made()


def replica(number, lighthouse, folder, method, options, pause, doubts):
    """One replica's life, until the file ``end`` names the last step. What happens is a line of its own file.

    ``doubts``: steps after whose exchange the first replica believes that something was wrong.
    """
    os.environ.setdefault("RUST_LOG", "error")
    import logging

    import torch
    import torch.distributed as dist
    from torchft import Manager, ProcessGroupGloo

    from thinwire.adapters.torchft import attach

    torch.set_num_threads(1)
    path = f"{folder}/replica{number}.jsonl"
    log = open(path, "a", buffering=1)  # noqa: SIM115

    def note(**event):
        log.write(json.dumps({"pid": os.getpid(), "at": time.time(), **event}) + "\n")

    logging.basicConfig(filename=path + ".log", level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=TIMEOUT)), load_state_dict=None, state_dict=None,
        min_replica_size=1, use_async_quorum=False, timeout=timedelta(seconds=TIMEOUT),
        quorum_timeout=timedelta(seconds=60), rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port,
        lighthouse_addr=lighthouse, replica_id=f"replica{number}", hostname="127.0.0.1",
    )  # fmt: skip
    model = _model()
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train = _train_rounds if method in ("local", "diloco") else _train_steps

    def batches():
        step = 0
        while not ended(folder, manager.current_step()):
            inner.param_groups[0]["lr"] = 0.05 / (1 + manager.current_step() / 300)  # less noise in the last loss
            in_round = 0 if train is _train_steps else step % options["sync_every"]
            yield _data(number, 10 * manager.current_step() + in_round)
            step += 1
            time.sleep(random.random() * pause)

    def doubt():
        if number == 0 and manager.current_step() in doubts:
            manager.report_error(RuntimeError("doubt"))

    train(model, inner, manager, batches(), doubt, note, lambda o: attach(model, o, method, manager=manager, **options))
    note(event="end", loss=loss_of(model), weights=digest(model.state_dict().values()))
    manager.shutdown(wait=False)
    log.close()
    os._exit(0)  # torchft's threads take their time


class UnderLighthouse:
    """A lighthouse and processes that find each other by it, until the file ``end`` names their last step."""

    def __init__(self, folder, least=1):
        self.folder, self.running = folder, {}
        self._pipe, theirs = fork.Pipe()
        self._lighthouse = fork.Process(target=serve_lighthouse, args=(theirs, least), daemon=True)
        self._lighthouse.start()
        self.address = self._pipe.recv()

    def end_at(self, step):
        new = self.folder / "end.new"
        new.write_text(str(step))
        new.rename(self.folder / "end")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in [*self.running.values(), self._lighthouse]:
            if process.is_alive():
                process.kill()
            process.join()


class Cluster(UnderLighthouse):
    """Replicas of which some are killed."""

    def __init__(self, folder, size, method, options, *, pause=0.02, least=1, doubts=()):
        super().__init__(folder, least)
        self.size = size
        self._call = (str(folder), method, options, pause, doubts)
        self._read = {}
        for number in range(size):
            self.start(number)

    def path(self, number):
        return str(self.folder / f"replica{number}.jsonl")

    def start(self, number):
        args = (number, self.address, *self._call)
        self.running[number] = fork.Process(target=replica, args=args, daemon=True)
        self.running[number].start()

    def events(self, number):
        try:
            with open(self.path(number)) as file:
                return [json.loads(line) for line in file if line.endswith("\n")]
        except FileNotFoundError:
            return []

    def step_of(self, number):
        pid = self.running[number].pid
        mine = [e["step"] for e in self.events(number) if e["pid"] == pid and e["event"] == "step"]
        return mine[-1] if mine else 0

    def wait(self, done, seconds=60.0):
        deadline = time.monotonic() + seconds
        while not done():
            for number, process in self.running.items():
                assert (process.exitcode or 0) <= 0, f"replica {number} has failed: see its lines on stderr"
            assert time.monotonic() < deadline, f"hang: {[(n, self.step_of(n)) for n in self.running]}"
            time.sleep(0.02)

    def signal(self, number, what):
        os.kill(self.running[number].pid, what)

    def kill(self, number):
        self.signal(number, signal.SIGKILL)
        self.running[number].join()

    def finish(self, step, seconds=90.0):
        """Let all end at this step, and wait for them. Returns the events of each."""
        self.end_at(step)
        deadline = time.monotonic() + seconds
        for number, process in self.running.items():
            process.join(max(0.0, deadline - time.monotonic()))
            assert process.exitcode == 0, f"replica {number}: exit {process.exitcode} at step {self.step_of(number)}"
        return {number: self.events(number) for number in self.running}


def check(events, *, conserves=True):
    """What must hold of the events of all replicas. Returns how many commits were compared, conserved and lost.

    ``lost`` is the most that one process has lost between two steps of its own.
    """
    attempts, most_lost, conserved = {}, 0, 0
    for number, mine in events.items():
        lost = {}
        for e in (e for e in mine if e["event"] in ("lost", "step")):
            assert e["event"] == "step" or e["after"] == e["before"], f"{number}: a failed step has left a trace: {e}"
            attempts.setdefault(e["step"], {}).setdefault(e["quorum"], {})[number] = e
            lost[e["pid"]] = lost.get(e["pid"], 0) + 1 if e["event"] == "lost" else 0
            most_lost = max(most_lost, lost[e["pid"]])
    # A step may have been made in two quorums, by one that did not hear of the others' giving it up: the later counts.
    counted = {}
    for step, by_quorum in attempts.items():
        if kept := [q for q, rows in by_quorum.items() if any(e["event"] == "step" for e in rows.values())]:
            counted[step] = max(kept)
    owes = {}  # by step and replica, what it brings to the next
    for number, mine in events.items():
        last = {}
        for e in (e for e in mine if e["event"] in ("lost", "step")):
            if (before := last.get(e["pid"])) is not None:
                counts = counted.get(before["step"]) == before["quorum"]
                heard = before["event"] == "step"
                if counts and not heard and e["step"] > before["step"]:
                    owes[before["step"], number] = e["owed"]  # its part counted, and it has heard it afterwards
                elif counts or not heard:
                    assert before["after"] == e["before"], f"{number}: changed between {before} and {e}"
                else:
                    assert e["owed"] == 0, f"{number}: made for a step that does not count: {before} and {e}"
            last[e["pid"]] = e
            if e["event"] == "step":
                owes[e["step"], number] = e["owes"]
    for step, quorum in counted.items():
        rows = attempts[step][quorum]
        some = [e for e in rows.values() if e["event"] == "step"]
        assert len({e["weights"] for e in some}) == 1, f"step {step}: weights differ: {rows}"
        size = some[0]["size"]
        if size < 2 or len(rows) < size or any((step, number) not in owes for number in rows):
            continue  # one of them was killed before it had written
        brought = sum(e["gradient"] + e["owed"] for e in rows.values()) / size
        left = some[0]["applied"] + sum(owes[step, number] for number in rows) / size
        scale = max(*(abs(e["gradient"]) + abs(e["owed"]) for e in rows.values()), 1.0)
        assert not conserves or abs(brought - left) <= 1e-4 * scale, f"step {step}: {brought} against {left}: {rows}"
        conserved += 1
    return len(counted), conserved, most_lost
