"""Two ranks that stay alive from script to script, and a second pair in which scripts that restart go on."""

import contextlib
import faulthandler
import multiprocessing
import os
import shutil
import tempfile
import time
import traceback
from dataclasses import dataclass

from spawned import fork

SECONDS = 60.0  # within which a script must have ended


@dataclass
class Finding:
    """What went wrong with a script."""

    kind: str
    words: str

    def __str__(self):
        return f"{self.kind}: {self.words}"


def _rank(pipe, rank, store, mutate):
    """A rank's life."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
    )  # fmt: skip
    faulthandler.enable()
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if mutate is not None:
        from fuzz.mutations import apply

        apply(mutate)
    limit = timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)
    while True:
        try:
            case, place, folder = pipe.recv()
        except EOFError:
            os._exit(0)
        pipe.send(_one(case, rank, place, folder))


def _one(case, rank, place, folder):
    from fuzz.gradients import Gradients
    from fuzz.joint import Joint
    from fuzz.local_steps import LocalSteps
    from fuzz.paces import Paces
    from fuzz.player import LOCAL, Mismatch
    from fuzz.sites import Sites

    family = LocalSteps if case["method"] in LOCAL else Gradients
    player = {"joint": Joint, "paces": Paces, "sites": Sites}.get(case.get("family"), family)(case, rank, folder)
    player.place = "attach"
    try:
        if place is None:
            player.begin()
        else:
            player.resume(place)
        then = player.play(0 if place is None else place + 1)
        return "ok", then, player.marks
    except Mismatch as error:
        return "mismatch", player.place, f"{error}"
    except BaseException as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "/fuzz/" not in f.filename]
        at = f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else "the harness"
        said = str(error) if frames else "".join(traceback.format_exception(error))
        return "exception", player.place, f"{type(error).__name__} at {at}: {said}"


class Pair:
    """Two ranks."""

    def __init__(self, mutate=None):
        context = multiprocessing.get_context("spawn") if mutate is not None else fork
        self.pipes, self.processes, self.folder = [], [], tempfile.mkdtemp(prefix="thinwire-fuzz-")
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(theirs, rank, f"{self.folder}/store", mutate), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def play(self, *call, seconds=SECONDS):
        """Play a script on both ranks. Returns both answers; None for a rank that gave none."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(call)
        answers, end = [None, None], time.monotonic() + seconds
        grace = None
        while None in answers and time.monotonic() < (grace or end):
            multiprocessing.connection.wait([p for p, a in zip(self.pipes, answers) if a is None], 0.2)
            for rank, pipe in enumerate(self.pipes):
                if answers[rank] is None and pipe.poll(0):
                    try:
                        answers[rank] = pipe.recv()
                    except (OSError, EOFError):
                        self.processes[rank].join(5)
                        answers[rank] = "died", "", f"exit code {self.processes[rank].exitcode}"
                    if answers[rank][0] != "ok" and grace is None:
                        grace = min(end, time.monotonic() + 2)  # the other one may say more
        return answers

    def end(self):
        for process, pipe in zip(self.processes, self.pipes):
            pipe.close()
            process.kill()
            process.join()
        shutil.rmtree(self.folder, ignore_errors=True)


class Ranks:
    """Pairs as they are needed; a pair is started anew after a finding."""

    def __init__(self, mutate=None):
        self.mutate, self.pairs = mutate, [None, None]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pair in self.pairs:
            if pair is not None:
                pair.end()
        self.pairs = [None, None]

    def run(self, case):
        """Play a script. Returns a Finding, or None."""
        folder, place, turn = tempfile.mkdtemp(prefix="thinwire-fuzz-"), None, 0
        try:
            while True:
                if self.pairs[turn] is None:
                    self.pairs[turn] = Pair(self.mutate)
                answers = self.pairs[turn].play(case, place, folder)
                if (found := self._judge(answers)) is not None:
                    self.pairs[turn].end()
                    self.pairs[turn] = None
                    return found
                if answers[0][1] is None:
                    return None
                place, turn = answers[0][1], 1 - turn
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _judge(self, answers):
        bad = [(r, a) for r, a in enumerate(answers) if a is not None and a[0] != "ok"]
        if bad:
            order = {"died": 0, "mismatch": 1, "exception": 2}
            bad.sort(key=lambda row: (order[row[1][0]], "not report" in row[1][2]))
            rank, (kind, place, words) = bad[0]
            return Finding(kind, f"rank {rank} at event {place}: {words}")
        if None in answers:
            return Finding("hang", f"rank {answers.index(None)} gave no answer")
        for (place, what, mine), (_, _, theirs) in zip(answers[0][2], answers[1][2]):
            if mine != theirs:
                return Finding("ranks differ", f"in their {what} at event {place}")
        return None
