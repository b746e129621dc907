"""The edge's end without sockets: it sends the requests, and keeps its own checkpoints."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from thinwire.systems.split import store
from thinwire.systems.split.batch import Batch
from thinwire.systems.split.errors import SessionError
from thinwire.systems.split.frames import Fields, Message
from thinwire.systems.split.halves import Back, Front, check_holder
from thinwire.systems.split.programs import Program, Receive, Send, StepContext, edge_evaluate, edge_step
from thinwire.systems.split.recipe import Recipe
from thinwire.systems.split.session import PROTOCOL
from thinwire.systems.split.swapped import edge_back_evaluate, edge_back_step

Call = Callable[[Message], Message]
"""Carries a request to the cloud and returns its reply: a link, or the cloud itself in the same process."""


@dataclass
class EdgeEnd:
    """The edge's half, its optimizer, and the step count.

    Attributes:
        half: the front, or with ``front_on="cloud"`` the back; trained in place.
        pair: id of the files that the halves came from.
        recipe: must be the cloud's.
        total: steps of the whole training, for the learning rate.
        name: by which the cloud tells edges apart if there are no certificates.
        checkpoint_dir: for checkpoints; None: none are written.
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
        plan = self.half.plan
        self._context = StepContext(plan, self.recipe, plan.chain("up"), plan.chain("down"), self._optimizer)
        self._device = next(self.half.parameters()).device

    def hello(self) -> Fields:
        """Return the fields of hello, the first message of every connection."""
        return {
            "protocol": PROTOCOL,
            "plan": self.half.plan.hash,
            "recipe": self.recipe.hash,
            "pair": self.pair,
            "session": self.session,
            "edge": self.name,
            "steps": [self.steps] if self.steps else store.steps(self.checkpoint_dir) or [0],
            "total": self.total,
        }

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
            self._load(resume)
        store.drop_after(self.checkpoint_dir, resume)

    def step(self, batch: Batch) -> Tensor:
        """Train on one batch, on both ends. Return the loss.

        Raises:
            SplitError: the other end is lost or refused. The parameters here are those before the step; restart this
                end from its checkpoint.
        """
        self.half.train()
        self._optimizer.zero_grad()
        self.recipe.set_rate(self._optimizer, self.steps, self.total)
        batch = batch.to(self._device)
        if isinstance(self.half, Front):
            program = edge_step(self.half, batch, self._context, self.steps)
        else:
            program = edge_back_step(self.half, batch, self._context, self.steps)
        loss: Tensor = self._run(program, False)
        self.steps += 1
        return loss

    def evaluate(self, batch: Batch) -> Tensor:
        """Return the logits of one batch."""
        self.half.eval()
        batch = batch.to(self._device)
        if isinstance(self.half, Front):
            program = edge_evaluate(self.half, batch, self._context)
        else:
            program = edge_back_evaluate(self.half, batch, self._context)
        logits: Tensor = self._run(program, True)
        return logits

    def checkpoint(self) -> None:
        """Save both ends under the same step, the cloud first."""
        self._request(Message("checkpoint", self.steps, fields={}))
        if self.checkpoint_dir is not None:
            content = {"half": self.half.state_dict(), "optimizer": self._optimizer.state_dict(), "steps": self.steps}
            content |= {"pair": self.pair}
            codecs = {"up": self._context.up.state(), "down": self._context.down.state()}
            try:
                store.save(self.checkpoint_dir, self.steps, content | codecs)
            except (OSError, ValueError) as error:
                raise SessionError(f"the edge cannot write its checkpoint: {error}") from error

    def bye(self) -> None:
        """End the session: the cloud saves and accepts the next edge."""
        self._request(Message("bye", self.steps, fields={}))

    @property
    def caches(self) -> Any:
        """The value codec of the activation, for tests of its state."""
        return (self._context.up if self._context.plan.carries("up") == "activation" else self._context.down).values

    def _run(self, program: Program, evaluation: bool) -> Any:
        said = next(program)
        try:
            while True:
                assert isinstance(said, Send)
                request = Message(said.parts[0][0], self.steps, evaluation=evaluation, parts=said.parts)
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
        request = Message(message.kind, message.step, self._sequence, message.evaluation, message.parts, message.fields)
        self._over = True  # unless the request succeeds
        reply = self._call(request)
        if reply.kind == "error":
            raise SessionError(f"the cloud refused: {printable((reply.fields or {}).get('sentence'))}")
        if (reply.sequence, reply.step) != (request.sequence, request.step):
            raise SessionError(f"the cloud answered request {reply.sequence} instead of {request.sequence}")
        self._over = message.kind == "bye"
        return reply

    def _load(self, step: int) -> None:
        assert self.checkpoint_dir is not None
        content = store.load(self.checkpoint_dir, step)
        store.check_pair(content, self.pair, self.checkpoint_dir)
        self.half.load_state_dict(content["half"])
        self._optimizer.load_state_dict(content["optimizer"])
        self._context.up.load_state(content["up"])
        self._context.down.load_state(content["down"])
        self.steps = int(content["steps"])


def printable(text: object, most: int = 500) -> str:
    """Return text from the other end, made safe for a terminal."""
    return "".join(c if c.isprintable() else "?" for c in str(text))[:most]
