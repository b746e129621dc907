"""The server: counts iteration numbers, decides when to pull, and bounds how old a gradient may be. A state machine."""

from __future__ import annotations

from collections import Counter

from thinwire.systems.parameter_server import clocks, trigger
from thinwire.systems.parameter_server.contenders import Contenders
from thinwire.systems.parameter_server.effects import Apply, Contribution, Drop, Effect, Forget, Log, Refuse, Send
from thinwire.systems.parameter_server.messages import (
    OTHER_PROTOCOL,
    PROTOCOL,
    TAKEN,
    Bye,
    Fence,
    Grad,
    Hello,
    IterationNumber,
    Message,
    Nack,
    Pull,
    Refused,
    Stop,
    Weights,
    Welcome,
)
from thinwire.systems.parameter_server.settings import Settings
from thinwire.systems.parameter_server.staleness import UNBOUNDED
from thinwire.systems.parameter_server.table import Member
from thinwire.systems.parameter_server.weigh import weigh


class Server:
    """The scheduler: counts iteration numbers and decides when to pull and update.

    An update of version v is applied only if everything left unapplied has a base of v + 1 - S or newer, so no gradient
    is ever applied more than S versions late.

    It has no thread, clock or socket, see :class:`Leader`. After an ``Apply`` the driver changes the weights and calls
    ``applied``; messages that arrive in between wait.

    Args:
        settings: see :class:`Settings`.
        version: to start from (that of a checkpoint).
        first_member: the first member number; higher than all numbers of earlier runs of this server.
        positions: node -> next step of its workers' data (those of a checkpoint).

    Attributes:
        members: the table, by member number.
        counters: updates, applied, empty, late, stale (dropped because of their age), not_finite (dropped by their
            nodes), lost, in, pulls, joined, left, refused.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        version: int = 0,
        first_member: int = 1,
        positions: dict[int, int] | None = None,
    ) -> None:
        self.settings, self.version = settings, version
        self.members: dict[int, Member] = {}
        self.positions = dict(positions or {})
        self.counters: Counter[str] = Counter()
        self.pending: dict[int, int] = {}
        self.waiting: list[int] = []
        self.came: set[int] = set()
        self.pulled: set[int] = set()
        self.arrived: list[Contribution] = []
        self._fresh: set[int] = set()  # updated with every message, so an IN costs the same for any number of nodes
        self._blocking: set[int] = set()
        self._workers = 0
        self.updating = self.applying = self.finished = False
        self._started = version > 0
        self.next_member, self._next_pull = first_member, 1
        self._contenders = Contenders()
        self._inbox: list[Message] = []
        self._grace = trigger.Grace(settings.grace_seconds)
        self._out: list[Effect] = []
        self._now = 0.0

    # --- inputs ---------------------------------------------------------------------------------------------------

    def on(self, message: Message, now: float) -> list[Effect]:
        """Handle a message from a leader."""
        self._now = now
        member = self.members.get(getattr(message, "member", 0))
        if member is not None:
            member.heard = max(member.heard, now)
        if self.applying:
            self._inbox.append(message)
        else:
            self._handle(message)
        return self._flush()

    def applied(self, now: float) -> list[Effect]:
        """Note that the update which ``Apply`` asked for has been made."""
        self._now = now
        self.version += 1
        self.updating = self.applying = False
        self.counters["updates"] += 1
        rows = [row for part in self.arrived for row in part.rows]
        self.counters["applied"] += len(rows)
        self.counters["empty"] += not rows
        self.arrived, self.came = [], set()
        self._grant_after_update()
        self._fire()
        while self._inbox and not self.applying:
            self._handle(self._inbox.pop(0))
        return self._flush()

    def tick(self, now: float) -> list[Effect]:
        """Drop silent members, and tell the others that the server lives. Called several times per lease."""
        self._now = now
        lease = self.settings.lease_seconds
        for member in list(self.members.values()):
            if now - member.heard > lease and not self.applying:
                self._drop(member.number, f"silent for {lease:g} s")
            elif now - member.told >= lease / 3:
                self._send(Fence(member.number, self.version))
        if self._grace.ends(now) and not self.applying:
            self._fire()
        return self._flush()

    def gone(self, member: int, now: float) -> list[Effect]:
        """Note that the connection to a member has broken."""
        return self.on(Bye(member), now)

    def expect(self, member: int, seconds: float, now: float) -> None:
        """Note that a long message from a member is on its way: it counts as heard for that many seconds from now."""
        if member in self.members:
            self.members[member].heard = max(self.members[member].heard, now + seconds)

    def finish(self, now: float) -> list[Effect]:
        """End the training: send STOP to all. An update that still waits for sums is not made."""
        self._now, self.finished, self.updating = now, True, False
        for member in self.members.values():
            self._send(Stop(member.number, self.version))
        return self._flush()

    # --- messages -------------------------------------------------------------------------------------------------

    def _handle(self, message: Message) -> None:
        if isinstance(message, Hello):
            self._hello(message)
            return
        if isinstance(message, Bye):
            self._drop(message.member, "left")
            return
        if isinstance(message, Refused):  # only leaders receive this
            return
        member = self.members.get(message.member)
        if member is None:
            if isinstance(message, Grad):
                self._unused(message, "late")
            self._out.append(Send(Nack(message.member), message.member))
            return
        if isinstance(message, IterationNumber):
            self.counters["in"] += 1
            self._note(member, message)
            refused = self._contenders.answered(member.node, message.probe)
            if refused is not None:
                self._refuse(refused, TAKEN)
            self._go_on(member)
            self._permits()
        elif isinstance(message, Grad) and any(row.base > self.version for row in message.rows):
            self._unused(message, "late")
            self._drop(member.number, "sends gradients at weights that do not exist yet")
        elif isinstance(message, Grad):
            self._grad(member, message)

    def _hello(self, message: Hello) -> None:
        if message.protocol != PROTOCOL:
            self._refuse(message, OTHER_PROTOCOL)
            return
        for old in [m for m in self.members.values() if m.node == message.node]:
            if old.instance != message.instance:
                before = self._contenders.wait(message)
                self._ask(old)
                if before is not None:
                    self._refuse(before, TAKEN)
                return
            self._drop(old.number, "came again", admit=False)
        number, self.next_member = self.next_member, self.next_member + 1
        offset = clocks.slowest(self.members.values()) * message.workers
        member = Member(
            number, message.node, message.workers, self._now, offset, alive=message.workers, instance=message.instance
        )
        self.members[number] = member
        self._workers += member.workers
        self.counters["joined"] += 1
        self._out.append(Log("joined", {"node": message.node, "member": number}))
        self._send(Welcome(number, self.version, self.positions.get(message.node, 0)))
        if self.finished:
            self._send(Stop(number, self.version))
        elif not self._started:
            self._started = len(self.members) >= self.settings.start_nodes
            for other in list(self.members.values()) if self._started else []:
                self._grant(other)
        elif self.updating:  # at S = 0 the current version is already too old
            self.waiting.append(number)
        else:
            self._grant(member)
        self._ask(member)

    def _ask(self, member: Member) -> None:
        """If another process wants this member's number, ask the member for a sign of life."""
        probe = self._contenders.question(member.node)
        if probe:
            self._send(Fence(member.number, self.version, probe))

    def _refuse(self, hello: Hello, reason: int) -> None:
        self.counters["refused"] += 1
        self._out.append(Refuse(hello.node, hello.instance, reason))

    def _note(self, member: Member, message: IterationNumber | Grad) -> None:
        before = member.dropped
        member.note(message)
        self.counters["not_finite"] += member.dropped - before
        self._refresh(member)

    def _refresh(self, member: Member) -> None:
        (self._fresh.add if member.fresh else self._fresh.discard)(member.number)

    def _grad(self, member: Member, message: Grad) -> None:
        pushed = message.pull == 0
        wanted = message.in_total > member.ack if pushed else self.pending.get(member.number) == message.pull
        if not wanted:  # its pull was given up, or the same sum came twice
            self._unused(message, "late")
            self._note(member, message)
            return
        self._note(member, message)
        member.ack = max(member.ack, message.in_total)
        self._refresh(member)
        self.came.add(member.number)
        for row in message.rows:
            self.positions[member.node] = max(self.positions.get(member.node, 0), row.step + 1)
        self._accept(member, message)
        if not pushed:
            del self.pending[member.number]
            self._advance()
            return
        self.waiting.append(member.number)
        self._go_on()
        at_once = self.settings.max_staleness != 0 and not self.settings.grace_seconds
        if at_once and member.number in self.waiting and not self.updating:
            self.waiting.remove(member.number)
            self._grant(member)
        self._permits()

    def _accept(self, member: Member, message: Grad) -> None:
        """Add a sum to the current update, unless it is too old."""
        part = weigh(self.settings, self.version, member, message) if message.rows else None
        if part is not None:
            self.arrived.append(part)
        elif message.rows:
            self._unused(message, "stale")

    def _unused(self, message: Grad, reason: str) -> None:
        self.counters[reason] += len(message.rows)
        if message.tensor is not None:
            self._out.append(Drop(message.tensor))

    # --- an update ------------------------------------------------------------------------------------------------

    @property
    def need(self) -> int:
        """The oldest base that may stay unapplied in the current update."""
        return -UNBOUNDED if self.settings.enforce == "drop" else self.version + 1 - self.settings.bound

    def _count(self) -> int:
        if self.settings.transfer == "push":
            return trigger.arrived(self.settings, self.came, self.arrived)
        if self.settings.counts_nodes:
            return len(self._fresh)
        return sum(self.members[number].seen - self.members[number].ack for number in self._fresh)

    def _needed(self) -> int:
        return self.settings.needed(len(self.members) if self.settings.counts_nodes else self._workers)

    def _go_on(self, changed: Member | None = None) -> None:
        if self.updating:
            self._advance(changed)
        else:
            self._fire()

    def _fire(self) -> None:
        """Begin an update if there is enough work."""
        enough = self._count() >= self._needed()
        enough = enough or trigger.all_stand(self.settings, self.came, self.members.values())
        if self.updating or self.finished or not enough or self._grace.holds(self._now, self.came, self.members):
            return
        self.updating = True
        self._grace.close()
        need = self.need
        if self.settings.transfer == "pull":
            chosen = trigger.chosen(self.settings, [self.members[n] for n in self._fresh], self._needed())
            for member in list(self.members.values()):
                if member.number in chosen or member.buf_low < need:
                    self._pull(member)
        for member in self.members.values():
            if member.low < need and member.number not in self.pending:
                self._send(Fence(member.number, self.version + 1))
        self._advance()

    def _pull(self, member: Member) -> None:
        self.pending[member.number] = self._next_pull
        self.pulled.add(member.number)
        self.counters["pulls"] += 1
        self._send(Pull(member.number, self._next_pull, self.version + 1))
        self._next_pull += 1

    def _advance(self, changed: Member | None = None) -> None:
        """Apply the update once nothing too old is left out.

        ``changed``: the only member that has changed since the last call.
        """
        if not self.updating or self.applying or self.pending:
            return
        need = self.need
        if changed is not None and self._blocking:
            pullable = self.settings.transfer == "pull" and changed.buf_low < need
            if changed.low >= need:
                self._blocking.discard(changed.number)
            if self._blocking and not pullable:
                return
        if self.settings.transfer == "pull":
            for member in self.members.values():
                if member.buf_low < need:  # finished after the pull, on an old base: take it into this update
                    self._pull(member)
            if self.pending:
                return
        self._blocking = {member.number for member in self.members.values() if member.low < need}
        if self._blocking:
            return  # wait until those nodes send INs, or their leases end
        self.applying = True
        self._out.append(Apply(self.version, tuple(self.arrived)))

    def _grant_after_update(self) -> None:
        if self.settings.transfer == "push":
            chosen = [number for number in self.waiting if number in self.members]
        else:
            need = self.need
            chosen = [
                m.number
                for m in self.members.values()
                if m.number in self.pulled or m.number in self.waiting or m.sent < need or m.low == UNBOUNDED
            ]
            chosen = [number for number in chosen if self.members[number].sent != self.version]
        self.waiting, self.pulled = [], set()
        for number in dict.fromkeys(chosen):
            self._grant(self.members[number])

    # --- weights and permits --------------------------------------------------------------------------------------

    def _grant(self, member: Member) -> None:
        if self.finished:
            return
        same = member.sent == self.version
        number = member.grant(self.version)
        member.allowed = clocks.allowed(self.settings, member, self.members.values())
        steps = clocks.steps(self.settings, member, self.members.values())
        self._send(Weights(member.number, self.version, number, member.allowed, steps, same, ack=member.ack))

    def _permits(self) -> None:
        """With SSP: send weights to members that were stopped and may continue now."""
        if self.settings.clock_limit is None or self.applying:
            return
        for member in self.members.values():
            stands = member.low == UNBOUNDED and not member.grants
            if not (stands and self._started):
                continue
            if clocks.allowed(self.settings, member, self.members.values()) > member.allowed:
                self._grant(member)

    # --- members --------------------------------------------------------------------------------------------------

    def _drop(self, number: int, reason: str, admit: bool = True) -> None:
        member = self.members.pop(number, None)
        if member is None:
            return
        self.pending.pop(number, None)
        self.came.discard(number)
        self._fresh.discard(number)
        self._blocking.discard(number)
        self._workers -= member.workers
        self.pulled.discard(number)
        self.waiting = [other for other in self.waiting if other != number]
        self.counters["left"] += 1
        self.counters["lost"] += max(0, member.seen - member.ack)
        self._out.append(Forget(number, reason))
        self._out.append(Log("left", {"node": member.node, "member": number, "reason": reason}))
        self._go_on()
        self._permits()
        waiting = self._contenders.leave(member.node) if admit else None
        if waiting is not None:
            self._hello(waiting)

    def _send(self, message: Message) -> None:
        number = message.member  # type: ignore[union-attr]
        if number in self.members:
            self.members[number].told = self._now
        self._out.append(Send(message, number))

    def _flush(self) -> list[Effect]:
        out, self._out = self._out, []
        return out
