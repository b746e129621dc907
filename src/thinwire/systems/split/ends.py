"""The two ends without sockets. The edge sends requests; the cloud carries each out exactly once, and replies.

Each end has its half, its optimizer, the state of its codecs, and its own checkpoints.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.core.durable import CheckpointDirectory, read_file, write_file
from thinwire.systems.split.errors import SessionError, SplitError
from thinwire.systems.split.frames import ByteLedger, Fields, Message
from thinwire.systems.split.plan import Recipe
from thinwire.systems.split.programs import Program, Receive, Send, StepContext, cloud_program, edge_program, opening
from thinwire.systems.split.surgery import Back, Front, by_role, check_holder
from thinwire.systems.split.tasks import Batch

_PROTOCOL = 3
_HELLO = {
    "protocol": int, "plan": str, "recipe": str, "pair": str, "session": str, "edge": str, "steps": list, "total": int,
}  # fmt: skip
_REMEDY = {
    "protocol": "install the same version of thinwire on both",
    "plan": "start both from the files of one thinwire split plan --out",
    "recipe": "start both with the same training options",
    "pair": "the two files are not from the same surgery; copy both from one thinwire split plan --out",
}
_MOST_STEPS = 10**9

Call = Callable[[Message], Message]
"""Carries a request to the cloud and returns its reply: a link, or the cloud itself in the same process."""


class Checkpoints:
    """Checkpoints of one end. Two are kept: the other end may have died before writing its newest."""

    def __init__(self, directory: Path | None, pair: str) -> None:
        self._kept = None if directory is None else CheckpointDirectory(directory, "step", 2, holds="state.pt")
        self._pair = pair

    def steps(self) -> list[int]:
        return [] if self._kept is None else list(self._kept.found())

    def save(self, step: int, half: Front | Back, optimizer: torch.optim.Optimizer, **content: Any) -> None:
        if self._kept is not None:
            content |= {"half": half.state_dict(), "optimizer": optimizer.state_dict(), "pair": self._pair}
            with self._kept.write(step) as partial:
                write_file(partial / "state.pt", content)

    def read(self, step: int) -> dict[str, Any]:
        assert self._kept is not None
        try:
            content = read_file(self._kept.found().get(step, self._kept.path(step)) / "state.pt")
        except (OSError, ValueError) as error:
            raise SessionError(f"the checkpoint cannot be read: {error}") from error
        if content.get("pair") != self._pair:
            raise SessionError(
                f"{self._kept.folder} holds checkpoints of other halves: give this training another directory, or "
                "remove that one"
            )
        return content

    def load(self, step: int, half: Front | Back, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        content = self.read(step)
        half.load_state_dict(content["half"])
        optimizer.load_state_dict(content["optimizer"])
        return content

    def drop_after(self, step: int) -> None:
        if self._kept is not None:
            self._kept.drop_after(step)


@dataclass
class _Edge:
    context: StepContext
    steps: int = 0


@dataclass
class CloudEnd:
    """The cloud's half, its optimizer, and what it needs to answer a repeated request without carrying it out again.

    Several edges may train such a half, one after the other: each has its own step count and codec state.

    Attributes:
        half: the back, or with ``front_on="cloud"`` the front; trained in place.
        pair, recipe: must be the edge's; the pair is the id of the files that the halves came from.
        checkpoint_dir: None: none are written.
        edge: the edge that has the session; "" between sessions.
        trained: called with (edge, steps) after each training step.
    """

    half: Front | Back
    pair: str
    recipe: Recipe
    checkpoint_dir: Path | None = None
    trained: Callable[[str, int], None] | None = None
    edge: str = ""
    _edges: dict[str, _Edge] = field(default_factory=dict)
    _session: tuple[str, str] = ("", "")  # its id, and the edge's name
    _total: int = 1
    _sequence: int = 0
    _reply: Message | None = None
    _program: Program | None = None
    _waits_for: str = ""

    def __post_init__(self) -> None:
        check_holder(self.half, "cloud")
        self._optimizer = self.recipe.optimizer(self.half)
        self._opening = opening(self.half)
        self._saved = Checkpoints(self.checkpoint_dir, self.pair)
        if found := self._saved.steps():  # a restarted cloud continues from its newest checkpoint
            self._load(found[-1])

    @property
    def training(self) -> bool:
        """Whether a step has begun but not ended."""
        return self._program is not None

    def steps_of(self, edge: str) -> int:
        """Return how many steps this end has trained with an edge."""
        return self._edges[edge].steps if edge in self._edges else 0

    def hello(self, fields: Fields, edge: str | None = None) -> Fields:
        """Open a session, or resume it after the connection was lost.

        Args:
            fields: of the edge's hello.
            edge: its name from its certificate; None: the name that it gives itself.

        Returns:
            ``resume``, the step to continue from; ``known``, whether the session continues unchanged.

        Raises:
            SessionError: the ends do not match, or have no step in common.
        """
        if len(fields) != len(_HELLO) or not all(isinstance(fields.get(name), kind) for name, kind in _HELLO.items()):
            raise SessionError("the hello of the other end is malformed: the ends run different versions")
        plan, recipe = self.half.plan.hash, self.recipe.hash
        for name, here in (("protocol", _PROTOCOL), ("plan", plan), ("recipe", recipe), ("pair", self.pair)):
            if fields[name] != here:
                raise SessionError(f"the {name} of edge and cloud differ ({fields[name]} and {here}): {_REMEDY[name]}")
        session = fields["session"], edge or fields["edge"]
        if session == self._session:
            self.edge = session[1]
            return {"resume": self.steps_of(self.edge), "known": True}
        resume = self._agree(session[1], [step for step in fields["steps"] if isinstance(step, int)])
        self._session, self.edge = session, session[1]
        self._sequence, self._reply = 0, None
        self._total = max(1, min(fields["total"], _MOST_STEPS))
        return {"resume": resume, "known": False}

    def _agree(self, name: str, theirs: list[int]) -> int:
        if not self.training and self.steps_of(name) in theirs:
            self._edges.setdefault(name, self._new_edge())
            return self.steps_of(name)
        others = {other: edge.steps for other, edge in self._edges.items() if other != name}
        mine = self._saved.steps()
        for total in reversed(mine):
            counts = {other: int(kept["steps"]) for other, kept in self._saved.read(total)["edges"].items()}
            step = counts.pop(name, 0)
            if step in theirs and counts == others:
                self._load(total)
                self._saved.drop_after(total)
                self._edges.setdefault(name, self._new_edge())
                return step
        here = f"checkpoints after {', '.join(map(str, mine))} steps" if mine else "no checkpoint"
        raise SessionError(
            f"no step in common: edge {name!r} has step {', '.join(map(str, theirs)) or 'none'}, the cloud is "
            f"{'inside' if self.training else 'after'} step {self.steps_of(name)} with it and has {here}; restart both "
            "ends: with --checkpoint-dir on both they continue from the newest step that both saved; without it, from "
            "the start"
        )

    def handle(self, request: Message) -> Message:
        """Carry out a request, or repeat the reply if it came before.

        Raises:
            SessionError: the request is not valid now.
        """
        if not self.edge:
            raise SessionError(f"a request {request.kind!r} before hello")
        if request.sequence != self._sequence or self._reply is None:
            if request.sequence != self._sequence + 1:
                raise SessionError(f"expected request {self._sequence + 1}, got {request.sequence}")
            try:
                reply = self._carry_out(request)
            except SplitError:
                raise
            except (ValueError, RuntimeError, IndexError, MemoryError) as error:  # what our edges never send
                raise SessionError(f"step {request.step}: {error}") from error
            self._sequence, self._reply = request.sequence, reply
        if request.kind == "bye":  # the next edge may come; the reply is kept in case it is requested again
            self.edge = ""
        return self._reply

    def _carry_out(self, request: Message) -> Message:
        edge = self._edges[self.edge]
        if request.kind in ("checkpoint", "bye"):
            if self.training or request.step != edge.steps:
                raise SessionError(f"{request.kind} at step {request.step}, while the cloud is at {edge.steps}")
            self._save()
            return Message("done", edge.steps, request.sequence, fields={"steps": edge.steps})
        if request.evaluation and not self.training:
            self.half.eval()
            return self._run(cloud_program(self.half, edge.context, None), request)
        if request.kind == self._opening:
            if self.training or request.step != edge.steps:
                raise SessionError(f"step {request.step} begins, expected step {edge.steps}")
            self.recipe.set_rate(self._optimizer, request.step, self._total)
            self._optimizer.zero_grad()
            self.half.train()
            reply = self._run(cloud_program(self.half, edge.context, request.step), request)
        elif self._program is not None and request.kind == self._waits_for and request.step == edge.steps:
            reply = self._resume(self._program, request)
        else:
            raise SessionError(f"a request {request.kind!r} that nothing waits for, at step {request.step}")
        if not self.training:
            edge.steps += 1
            if self.trained is not None:
                self.trained(self.edge, edge.steps)
        return reply

    def _run(self, program: Program, request: Message) -> Message:
        wanted = next(program)
        assert isinstance(wanted, Receive)
        if request.kind != wanted.kind:
            raise SessionError(f"expected a request {wanted.kind!r}, got {request.kind!r}")
        return self._resume(program, request)

    def _resume(self, program: Program, request: Message) -> Message:
        """Pass a request to a program and return its answer; afterwards it waits for the next, or has ended."""
        self._program = None  # a program that raises has ended
        said = program.send(request)
        assert isinstance(said, Send)
        wanted = next(program, None)
        if wanted is not None:
            assert isinstance(wanted, Receive)
            self._program, self._waits_for = program, wanted.kind
        return Message(said.parts[0][0], request.step, request.sequence, request.evaluation, said.parts)

    def _new_edge(self) -> _Edge:
        return _Edge(StepContext.of(self.half, self.recipe, self._optimizer))

    def _save(self) -> None:
        edges = {name: {"steps": edge.steps, **edge.context.state()} for name, edge in self._edges.items()}
        total = sum(edge.steps for edge in self._edges.values())
        try:
            self._saved.save(total, self.half, self._optimizer, edges=edges)
        except (OSError, ValueError) as error:
            raise SessionError(f"the cloud cannot write its checkpoint: {error}") from error

    def _load(self, total: int) -> None:
        content = self._saved.load(total, self.half, self._optimizer)
        self._program, self._edges = None, {}
        for name, kept in content["edges"].items():
            self._edges[name] = edge = self._new_edge()
            edge.context.load_state(kept)
            edge.steps = int(kept["steps"])


@dataclass
class EdgeEnd:
    """The edge's half, its optimizer, and the step count.

    Attributes:
        half: the front, or with ``front_on="cloud"`` the back; trained in place.
        pair, recipe: must be the cloud's; the pair is the id of the files that the halves came from.
        total: steps of the whole training, for the learning rate.
        name: by which the cloud tells edges apart if there are no certificates.
        checkpoint_dir: None: none are written.
        steps: trained so far.
    """

    half: Front | Back
    pair: str
    recipe: Recipe
    total: int
    name: str = "edge"
    checkpoint_dir: Path | None = None
    steps: int = 0
    session: str = field(default_factory=lambda: secrets.token_hex(16))
    _call: Call | None = None
    _sequence: int = 0
    _over: bool = False

    def __post_init__(self) -> None:
        check_holder(self.half, "edge")
        self._optimizer = self.recipe.optimizer(self.half)
        self._context = StepContext.of(self.half, self.recipe, self._optimizer)
        self._saved = Checkpoints(self.checkpoint_dir, self.pair)

    def hello(self) -> Fields:
        """Return the fields of hello, the first message of every connection."""
        return {
            "protocol": _PROTOCOL, "plan": self.half.plan.hash, "recipe": self.recipe.hash, "pair": self.pair,
            "session": self.session, "edge": self.name, "total": self.total,
            "steps": [self.steps] if self.steps else self._saved.steps() or [0],
        }  # fmt: skip

    def open(self, call: Call, ready: Fields) -> None:
        """Begin, with the cloud's answer to hello.

        Raises:
            SessionError: the answer is malformed.
        """
        self._call, self._over = call, False
        resume = ready.get("resume")
        if not isinstance(resume, int) or resume not in self.hello()["steps"]:
            raise SessionError(f"the cloud wants to continue from step {resume!r}, which this edge does not have")
        if resume != self.steps:
            content = self._saved.load(resume, self.half, self._optimizer)
            self._context.load_state(content)
            self.steps = int(content["steps"])
        self._saved.drop_after(resume)

    def step(self, batch: Batch) -> Tensor:
        """Train on one batch, on both ends. Return the loss.

        Raises:
            SplitError: the other end is lost or refused. The parameters here are those before the step; restart this
                end from its checkpoint.
        """
        self.half.train()
        self._optimizer.zero_grad()
        self.recipe.set_rate(self._optimizer, self.steps, self.total)
        loss: Tensor = self._run(batch, self.steps)
        self.steps += 1
        return loss

    def evaluate(self, batch: Batch) -> Tensor:
        """Return the logits of one batch."""
        self.half.eval()
        logits: Tensor = self._run(batch, None)
        return logits

    def checkpoint(self) -> None:
        """Save both ends under the same step, the cloud first."""
        self._request(Message("checkpoint", self.steps, fields={}))
        try:
            self._saved.save(self.steps, self.half, self._optimizer, steps=self.steps, **self._context.state())
        except (OSError, ValueError) as error:
            raise SessionError(f"the edge cannot write its checkpoint: {error}") from error

    def bye(self) -> None:
        """End the session: the cloud saves and accepts the next edge."""
        self._request(Message("bye", self.steps, fields={}))

    def _run(self, batch: Batch, step: int | None) -> Any:
        program = edge_program(self.half, batch.to(self._context.device), self._context, step)
        said = next(program)
        try:
            while True:
                assert isinstance(said, Send)
                request = Message(said.parts[0][0], self.steps, evaluation=step is None, parts=said.parts)
                wanted = next(program)
                assert isinstance(wanted, Receive)
                reply = self._request(request)
                if reply.kind != wanted.kind:
                    raise SessionError(f"expected {wanted.kind!r} from the cloud, got {reply.kind!r}")
                try:
                    said = program.send(reply)
                except ValueError as error:
                    self._over = True
                    raise SessionError(f"step {self.steps}: {error}") from error
        except StopIteration as end:
            return end.value

    def _request(self, message: Message) -> Message:
        if self._call is None:
            raise SessionError("this edge is not connected: call open first")
        if self._over:
            raise SessionError("this session is over: start this end again, from its checkpoint")
        self._sequence += 1
        request = replace(message, sequence=self._sequence)
        self._over = True  # unless the request succeeds
        reply = self._call(request)
        if reply.kind == "error":
            raise SessionError(f"the cloud refused: {printable((reply.fields or {}).get('sentence'))}")
        if (reply.sequence, reply.step) != (request.sequence, request.step):
            raise SessionError(f"the cloud answered request {reply.sequence} instead of {request.sequence}")
        self._over = message.kind == "bye"
        return reply


class LocalPair(EdgeEnd):
    """An edge with its cloud in the same process. Codecs, sessions and checkpoints work as on two machines.

    Attributes:
        front, back: the halves, whichever end has them.
        cloud: the cloud's end.
        ledger: what would have been sent, with frame headers but without TLS.
    """

    def __init__(
        self, front: Front, back: Back, recipe: Recipe, total: int, checkpoint_dir: Path | None = None,
        pair: str = "local",
    ) -> None:  # fmt: skip
        folders = (None, None) if checkpoint_dir is None else (checkpoint_dir / "edge", checkpoint_dir / "cloud")
        self.front, self.back = front, back
        held = by_role(front, back)
        super().__init__(held["edge"], pair, recipe, total, checkpoint_dir=folders[0])
        self.cloud = CloudEnd(held["cloud"], pair, recipe, folders[1])
        self.ledger = ByteLedger()
        self.open(counted(self.cloud.handle, self.ledger), self.cloud.hello(self.hello()))


def counted(call: Call, ledger: ByteLedger) -> Call:
    def count(request: Message) -> Message:
        ledger.count(request, ledger.sent)
        reply = call(request)
        ledger.count(reply, ledger.received)
        return reply

    return count


def printable(text: object, most: int = 500) -> str:
    return "".join(c if c.isprintable() else "?" for c in str(text))[:most]
