"""The cloud's end without sockets: requests in, replies out; every request is carried out exactly once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinwire.systems.split import store
from thinwire.systems.split.codecs import Chain
from thinwire.systems.split.errors import SessionError, SplitError
from thinwire.systems.split.frames import Fields, Message
from thinwire.systems.split.halves import Back, Front, check_holder
from thinwire.systems.split.inputs import opening
from thinwire.systems.split.programs import Program, Receive, Send, StepContext, cloud_evaluate, cloud_step
from thinwire.systems.split.recipe import Recipe
from thinwire.systems.split.swapped import cloud_front_evaluate, cloud_front_step

PROTOCOL = 2
HELLO = {
    "protocol": int,
    "plan": str,
    "recipe": str,
    "pair": str,
    "session": str,
    "edge": str,
    "steps": list,
    "total": int,
}
_MOST_STEPS = 10**9


@dataclass
class _Edge:
    """What the cloud keeps for one edge: the number of steps trained with it, and the codecs' state."""

    up: Chain
    down: Chain
    steps: int = 0


@dataclass
class CloudEnd:
    """The cloud's half, its optimizer, and what it needs to answer a repeated request without carrying it out again.

    Several edges may train such a half, one after the other: each has its own step count and codec state.

    Attributes:
        half: the back, or with ``front_on="cloud"`` the front; trained in place.
        pair: id of the files that the halves came from; both ends must have the same.
        recipe: must be the edge's.
        checkpoint_dir: for checkpoints; None: none are written.
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
    _session: str = ""
    _name: str = ""
    _total: int = 1
    _sequence: int = 0
    _reply: Message | None = None
    _program: Program | None = None
    _waits_for: str = ""

    def __post_init__(self) -> None:
        check_holder(self.half, "cloud")
        self._optimizer = self.recipe.optimizer(self.half)
        first = next(self.half.parameters())
        self._dtype, self._device = first.dtype, first.device
        self._opening = "z" if isinstance(self.half, Back) else opening(self.half.view)
        found = store.steps(self.checkpoint_dir)
        if found:  # a restarted cloud continues from its newest checkpoint
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
            Fields of the answer: ``resume``, the step to continue from; ``known``, whether the session continues
            unchanged.

        Raises:
            SessionError: the ends do not match, or have no step in common.
        """
        for name, kind in HELLO.items():
            if not isinstance(fields.get(name), kind) or len(fields) != len(HELLO):
                raise SessionError("the hello of the other end is malformed: the ends run different versions")
        plan = self.half.plan
        mine = {"protocol": PROTOCOL, "plan": plan.hash, "recipe": self.recipe.hash, "pair": self.pair}
        for name, here in mine.items():
            if fields[name] != here:
                raise SessionError(f"the {name} of edge and cloud differ ({fields[name]} and {here}): {_REMEDY[name]}")
        name = edge or fields["edge"]
        if fields["session"] == self._session and name == self._name:
            self.edge = name
            return {"resume": self.steps_of(name), "known": True}
        steps = [step for step in fields["steps"] if isinstance(step, int)]
        resume = self._agree(name, steps)
        self._session, self.edge, self._name = fields["session"], name, name
        self._sequence, self._reply = 0, None
        self._total = max(1, min(fields["total"], _MOST_STEPS))
        return {"resume": resume, "known": False}

    def _agree(self, name: str, theirs: list[int]) -> int:
        """Return the newest step that both ends have, and bring the cloud to it."""
        if not self.training and self.steps_of(name) in theirs:
            if name not in self._edges:
                self._edges[name] = self._new_edge()
            return self.steps_of(name)
        others = {other: edge.steps for other, edge in self._edges.items() if other != name}
        mine = store.steps(self.checkpoint_dir)
        for total in reversed(mine):
            assert self.checkpoint_dir is not None
            counts = {
                other: int(kept["steps"]) for other, kept in store.load(self.checkpoint_dir, total)["edges"].items()
            }
            step = counts.pop(name, 0)
            if step in theirs and counts == others:
                self._load(total)
                store.drop_after(self.checkpoint_dir, total)
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
        if request.sequence == self._sequence and self._reply is not None:
            self._end(request)
            return self._reply
        if request.sequence != self._sequence + 1:
            raise SessionError(f"expected request {self._sequence + 1}, got {request.sequence}")
        try:
            reply = self._carry_out(request)
        except SplitError:
            raise
        except (
            ValueError,
            RuntimeError,
            IndexError,
            MemoryError,
        ) as error:  # numbers or shapes that our edges never send
            raise SessionError(f"step {request.step}: {error}") from error
        self._sequence, self._reply = request.sequence, reply
        self._end(request)
        return reply

    def _end(self, request: Message) -> None:
        """After bye the next edge may come; the reply is kept in case it is requested again."""
        if request.kind == "bye":
            self.edge = ""

    def _carry_out(self, request: Message) -> Message:
        edge = self._edges[self.edge]
        if request.kind in ("checkpoint", "bye"):
            if self.training or request.step != edge.steps:
                raise SessionError(f"{request.kind} at step {request.step}, while the cloud is at {edge.steps}")
            self._save()
            return Message("done", edge.steps, request.sequence, fields={"steps": edge.steps})
        if request.evaluation and not self.training:
            self.half.eval()
            return self._run(self._evaluation(self._context(edge)), request)[0]
        if request.kind == self._opening:
            if self.training or request.step != edge.steps:
                raise SessionError(f"step {request.step} begins, expected step {edge.steps}")
            self.recipe.set_rate(self._optimizer, request.step, self._total)
            self._optimizer.zero_grad()
            self.half.train()
            reply, ended = self._run(self._training(self._context(edge), request.step), request)
        elif self._program is not None and request.kind == self._waits_for and request.step == edge.steps:
            reply, ended = self._resume(self._program, request)
        else:
            raise SessionError(f"a request {request.kind!r} that nothing waits for, at step {request.step}")
        if ended:
            edge.steps += 1
            if self.trained is not None:
                self.trained(self.edge, edge.steps)
        return reply

    def _training(self, context: StepContext, step: int) -> Program:
        if isinstance(self.half, Back):
            return cloud_step(self.half, context, step, self._dtype, self._device)
        return cloud_front_step(self.half, context, step, self._device)

    def _evaluation(self, context: StepContext) -> Program:
        if isinstance(self.half, Back):
            return cloud_evaluate(self.half, context, self._dtype, self._device)
        return cloud_front_evaluate(self.half, context, self._device)

    def _run(self, program: Program, request: Message) -> tuple[Message, bool]:
        wanted = next(program)
        assert isinstance(wanted, Receive)
        if request.kind != wanted.kind:
            raise SessionError(f"expected a request {wanted.kind!r}, got {request.kind!r}")
        return self._resume(program, request)

    def _resume(self, program: Program, request: Message) -> tuple[Message, bool]:
        """Pass a request to a program; return its answer, and whether the program has ended."""
        self._program = None  # a program that raises has ended
        said = program.send(request)
        assert isinstance(said, Send)
        reply = Message(said.parts[0][0], request.step, request.sequence, request.evaluation, said.parts)
        try:
            wanted = next(program)
        except StopIteration:
            return reply, True
        assert isinstance(wanted, Receive)
        self._program, self._waits_for = program, wanted.kind
        return reply, False

    def _context(self, edge: _Edge) -> StepContext:
        return StepContext(self.half.plan, self.recipe, edge.up, edge.down, self._optimizer)

    def _new_edge(self) -> _Edge:
        return _Edge(self.half.plan.chain("up"), self.half.plan.chain("down"))

    def _save(self) -> None:
        if self.checkpoint_dir is None:
            return
        edges = {
            name: {"steps": e.steps, "up": e.up.state(), "down": e.down.state()} for name, e in self._edges.items()
        }
        content: dict[str, Any] = {"half": self.half.state_dict(), "optimizer": self._optimizer.state_dict()}
        content |= {"edges": edges, "pair": self.pair}
        try:
            store.save(self.checkpoint_dir, sum(edge.steps for edge in self._edges.values()), content)
        except (OSError, ValueError) as error:
            raise SessionError(f"the cloud cannot write its checkpoint: {error}") from error

    def _load(self, total: int) -> None:
        assert self.checkpoint_dir is not None
        content: dict[str, Any] = store.load(self.checkpoint_dir, total)
        store.check_pair(content, self.pair, self.checkpoint_dir)
        self.half.load_state_dict(content["half"])
        self._optimizer.load_state_dict(content["optimizer"])
        self._program, self._edges = None, {}
        for name, kept in content["edges"].items():
            edge = self._new_edge()
            edge.up.load_state(kept["up"])
            edge.down.load_state(kept["down"])
            edge.steps = int(kept["steps"])
            self._edges[name] = edge


_REMEDY = {
    "protocol": "install the same version of thinwire on both",
    "plan": "start both from the files of one thinwire split plan --out",
    "recipe": "start both with the same training options",
    "pair": "the two files are not from the same surgery; copy both from one thinwire split plan --out",
}
