"""The server: counts iteration numbers, decides when to pull, and bounds how old a gradient may be. A state machine."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from dataclasses import dataclass, field

from thinwire.systems.parameter_server import messages as msg
from thinwire.systems.parameter_server.effects import Apply, Contribution, Drop, Effect, Forget, Refuse, Send
from thinwire.systems.parameter_server.settings import UNBOUNDED, Settings, alpha

_LEAST_GRACE = 0.2  # seconds
_SLOWER = 8  # times as slow as another that makes progress: so much is waited for


@dataclass
class Member:
    """A row of the server's table. ``seen``: newest iteration number; ``ack``: that of the newest sum that arrived.

    ``low``, ``buf_low``: lower bounds on the bases of what it computes and has buffered. ``grants``: (number, version)
    of weights not yet reported as received; ``granted``: of all; ``sent``: the newest. ``allowed``: the last permitted
    start (SSP); ``offset``: of its clock. ``heard``, ``told``: seconds. ``dropped``: submissions that were not finite.
    ``moved``: when it last made progress, or was given something to do; ``took``: the longest time in between, of late.
    """

    number: int
    node: int
    workers: int
    heard: float
    offset: int = 0
    seen: int = 0
    ack: int = 0
    seq: int = 0
    low: int = UNBOUNDED
    buf_low: int = UNBOUNDED
    sent: int = -1
    granted: int = 0
    grants: deque[tuple[int, int]] = field(default_factory=deque)
    allowed: int = UNBOUNDED
    told: float = 0.0
    moved: float = 0.0
    took: float = 0.0
    alive: int = 0
    step_us: int = 0
    loss_sum: float = 0.0
    samples: int = 0
    dropped: int = 0
    instance: int = 0

    @property
    def fresh(self) -> bool:
        return self.seen > self.ack

    @property
    def clock(self) -> int:
        """Its submissions that have arrived, counted from the common origin of SSP."""
        return self.ack + self.offset

    def note(self, message: msg.IterationNumber | msg.Grad) -> None:
        """Copy what a message reports, unless a newer one came first; weights in flight count as work on them."""
        if message.seq < self.seq:
            return
        self.seq = message.seq
        self.seen = message.in_total
        self.buf_low = message.buf_low if isinstance(message, msg.IterationNumber) else UNBOUNDED
        while self.grants and self.grants[0][0] <= message.grant:
            self.grants.popleft()
        self.low = min(message.low, self.in_flight())
        if isinstance(message, msg.IterationNumber):
            self.alive, self.step_us, self.dropped = message.alive, message.step_us, message.dropped
            self.loss_sum, self.samples = message.loss_sum, message.samples

    def in_flight(self) -> int:
        """Return the oldest version among weights that may not have arrived yet."""
        return self.grants[0][1] if self.grants else UNBOUNDED

    def grant(self, version: int) -> int:
        self.granted += 1
        self.sent = version
        self.grants.append((self.granted, version))
        self.low = min(self.low, version)
        return self.granted


class Grace:
    """For how long an update waits for more members once there are enough: the rule of ``Settings.grace``."""

    def __init__(self, setting: float | str | None) -> None:
        self._setting = setting
        self._enough_at: float | None = None  # when there was enough for the update, and the grace began
        self._enough_before = self._made_at = 0.0  # for the last update; when that was made
        self._lags, self._rounds = deque[float](maxlen=64), deque[float](maxlen=8)  # seconds

    @property
    def usual(self) -> float | None:
        """Seconds of a round of late; None: not known."""
        return statistics.median(self._rounds) if self._rounds else None

    @property
    def seconds(self) -> float:
        if self._setting != "auto":
            return float(self._setting or 0)
        lags, most = sorted(self._lags), self.usual or _LEAST_GRACE
        return max(_LEAST_GRACE, min(lags[int(0.9 * len(lags))], most)) if lags else _LEAST_GRACE

    def is_over(self, now: float) -> bool:
        """Begin it, if it has not begun for this update; return whether it has passed."""
        if self._enough_at is None:
            self._enough_at = now
        return now >= self._enough_at + self.seconds

    def came(self, now: float, *, late: bool) -> None:
        """Note that a member came; ``late``: after the update of its round."""
        if (began := self._enough_before if late else self._enough_at) is not None:
            self._lags.append(now - began)

    def made(self, now: float) -> None:
        """Note that the update was made."""
        if self._enough_at is not None:
            self._rounds.append(now - self._made_at)
            self._enough_before, self._enough_at, self._made_at = self._enough_at, None, now


class Server:
    """The scheduler: counts iteration numbers and decides when to pull and update.

    An update of version v is applied only if everything left unapplied has a base of v + 1 - S or newer, so no gradient
    is ever applied more than S versions late.

    Nobody waits longer than a lease, or eight times the longest submission of late, for a member that shows signs of
    life and makes no progress: until it does, updates are made without it, and what is then too old is dropped.

    It has no thread, clock or socket, see :class:`Leader`. After an ``Apply`` the driver changes the weights and calls
    ``applied``; messages that arrive in between wait.

    Args:
        settings: see :class:`Settings`.
        version: to start from (that of a checkpoint).
        first_member: the first member number; higher than all numbers of earlier runs of this server.
        positions: node -> next step of its workers' data (those of a checkpoint).

    Attributes:
        members: the table, by member number.
        late: the numbers of those that nobody waits for.
        counters: updates, applied, empty, late, stale (dropped because of their age), not_finite (dropped by their
            nodes), lost, in, pulls, joined, left, refused.
    """

    def __init__(
        self, settings: Settings, *, version: int = 0, first_member: int = 1, positions: dict[int, int] | None = None
    ) -> None:
        self.settings, self.version = settings, version
        self.members: dict[int, Member] = {}
        self.late: set[int] = set()
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
        # node -> who wants its number, and the question asked for it
        self._claims: dict[int, tuple[msg.Hello, int]] = {}
        self._asked = 0
        self._inbox: list[msg.Message] = []
        self._since = 0.0  # work waits for an update
        self._grace = Grace(settings.grace)
        self._out: list[Effect] = []
        self._now = 0.0

    def on(self, message: msg.Message, now: float) -> list[Effect]:
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
        self.arrived, self.came, self._since = [], set(), now
        self._grace.made(now)
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
                self._drop(member.number)
            elif now - member.told >= lease / 3:
                self._send(msg.Fence(member.number, self.version))
        if self._started and not self.applying:
            self._leave_behind()
        return self._flush()

    def gone(self, member: int, now: float) -> list[Effect]:
        """Note that the connection to a member has broken."""
        return self.on(msg.Bye(member), now)

    def expect(self, member: int, seconds: float, now: float) -> None:
        """Note that a long message from a member is on its way: it counts as heard for that many seconds from now."""
        if member in self.members:
            self.members[member].heard = max(self.members[member].heard, now + seconds)

    def finish(self, now: float) -> list[Effect]:
        """End the training: send STOP to all. An update that still waits for sums is not made."""
        self._now, self.finished, self.updating = now, True, False
        for member in self.members.values():
            self._send(msg.Stop(member.number, self.version))
        return self._flush()

    def _handle(self, message: msg.Message) -> None:
        if isinstance(message, msg.Hello):
            self._hello(message)
            return
        if isinstance(message, msg.Bye):
            self._drop(message.member)
            return
        if isinstance(message, msg.Refused):  # only leaders receive this
            return
        member = self.members.get(message.member)
        if member is None:
            if isinstance(message, msg.Grad):
                self._unused(message, "late")
            self._out.append(Send(msg.Nack(message.member), message.member))
            return
        if isinstance(message, msg.IterationNumber):
            self.counters["in"] += 1
            self._note(member, message)
            claim = self._claims.get(member.node)
            if claim is not None and message.probe >= claim[1]:  # an IN from before the question proves nothing
                del self._claims[member.node]
                self._refuse(claim[0], msg.TAKEN)
            self._go_on(member)
            self._permits()
        elif isinstance(message, msg.Grad) and any(row.base > self.version for row in message.rows):
            self._unused(message, "late")
            self._drop(member.number)
        elif isinstance(message, msg.Grad):
            self._grad(member, message)

    def _hello(self, message: msg.Hello) -> None:
        if message.protocol != msg.PROTOCOL:
            self._refuse(message, msg.OTHER_PROTOCOL)
            return
        for old in [m for m in self.members.values() if m.node == message.node]:
            if old.instance != message.instance:
                self._claim(old, message)
                return
            self._drop(old.number, admit=False)  # it came again
        number, self.next_member = self.next_member, self.next_member + 1
        offset = self._slowest() * message.workers
        member = Member(number, message.node, message.workers, self._now, offset, moved=self._now)
        member.alive, member.instance = message.workers, message.instance
        self.members[number] = member
        self._workers += member.workers
        self.counters["joined"] += 1
        self._send(msg.Welcome(number, self.version, self.positions.get(message.node, 0)))
        if self.finished:
            self._send(msg.Stop(number, self.version))
        elif not self._started:
            self._started = len(self.members) >= self.settings.start_nodes
            for other in list(self.members.values()) if self._started else []:
                self._grant(other)
        elif self.updating:  # at S = 0 the current version is already too old
            self.waiting.append(number)
        else:
            self._grant(member)
        self._ask(member)

    def _claim(self, member: Member, newcomer: msg.Hello) -> None:
        """Let another process with a member's number wait: until that answers (then refuse it) or its lease ends."""
        self._asked += 1
        before, _ = self._claims.get(member.node, (newcomer, 0))
        self._claims[member.node] = newcomer, self._asked
        self._ask(member)
        if before.instance != newcomer.instance:
            self._refuse(before, msg.TAKEN)

    def _ask(self, member: Member) -> None:
        if member.node in self._claims:
            self._send(msg.Fence(member.number, self.version, self._claims[member.node][1]))

    def _refuse(self, hello: msg.Hello, reason: int) -> None:
        self.counters["refused"] += 1
        self._out.append(Refuse(hello.node, hello.instance, reason))

    def _note(self, member: Member, message: msg.IterationNumber | msg.Grad) -> None:
        before, low, seen = member.dropped, member.low, member.seen
        member.note(message)
        self.counters["not_finite"] += member.dropped - before
        if member.low != low or (member.seen > seen and member.low >= self.need):
            member.took, member.moved = max(member.took / 2, self._now - member.moved), self._now
            if member.number in self.late:
                member.offset = max(member.offset, self._slowest() * member.workers - member.ack)
                self.late.discard(member.number)
        self._refresh(member)

    def _refresh(self, member: Member) -> None:
        (self._fresh.add if member.fresh else self._fresh.discard)(member.number)

    def _grad(self, member: Member, message: msg.Grad) -> None:
        pushed = message.pull == 0
        wanted = message.in_total > member.ack if pushed else self.pending.get(member.number) == message.pull
        if not wanted:  # its pull was given up, or the same sum came twice
            self._unused(message, "late")
            self._note(member, message)
            return
        self._grace.came(self._now, late=member.number in self.late)
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
        if not self.settings.holds and member.number in self.waiting and not self.updating:
            self.waiting.remove(member.number)
            self._grant(member)
        self._permits()

    def _accept(self, member: Member, message: msg.Grad) -> None:
        """Add a sum, unless it is too old. A pushed one gets its factor here: v cannot change before the update."""
        if not message.rows:
            return
        tau = self.version - min(row.base for row in message.rows)
        if tau > self.settings.bound:
            self._unused(message, "stale")
            return
        scale = alpha(self.settings.alpha, tau) if message.pull == 0 else 1.0
        self.arrived.append(Contribution(member.node, member.number, message.rows, scale, message.tensor))

    def _unused(self, message: msg.Grad, reason: str) -> None:
        self.counters[reason] += len(message.rows)
        if message.tensor is not None:
            self._out.append(Drop(message.tensor))

    @property
    def need(self) -> int:
        """The oldest base that may stay unapplied in the current update."""
        return -UNBOUNDED if self.settings.enforce == "drop" else self.version + 1 - self.settings.bound

    def _count(self) -> int:
        if self.settings.transfer == "push":
            return len(self.came) if self.settings.counts_nodes else sum(len(part.rows) for part in self.arrived)
        if self.settings.counts_nodes:
            return len(self._fresh)
        return sum(self.members[number].seen - self.members[number].ack for number in self._fresh)

    def _needed(self) -> int:
        workers = self._workers - sum(self.members[number].workers for number in self.late)
        return self.settings.needed(len(self.members) - len(self.late) if self.settings.counts_nodes else workers)

    def _leave_behind(self) -> None:
        """Stop waiting for whoever makes no progress while others wait; one that answers no pull is dropped."""
        table, now = self.members, self._now
        if not self._fresh and not self.came:
            self._since = now
        stands = {m.number for m in table.values() if m.low == UNBOUNDED and m.alive}
        waits = stands | self._fresh | self.came
        since = min([self._since, *(table[number].moved for number in stands)])
        patience = max(self.settings.lease_seconds, _SLOWER * max((m.took for m in table.values()), default=0.0))
        if self.settings.grace is not None and stands and (usual := self._grace.usual) is not None:
            grace = self._grace.seconds  # for who takes half as long again as a round
            late = [m for m in table.values() if max(m.moved + 1.5 * usual, since) + grace < now]
        else:
            late = [m for m in table.values() if max(m.moved, since) + patience < now >= m.heard]
        for number in [m.number for m in late]:
            if number in self.pending:
                self._drop(number)
            elif number not in waits or self._may_be_old(table[number]):
                self.late.add(number)
                self._blocking.discard(number)
        self._go_on()
        self._permits()

    def _go_on(self, changed: Member | None = None) -> None:
        if self.updating:
            self._advance(changed)
        else:
            self._fire()

    def _fire(self) -> None:
        enough = self._count() >= self._needed() or self._all_stand()
        if self.updating or self.finished or not enough or self._in_grace():
            return
        self.updating = True
        need = self.need
        if self.settings.transfer == "pull":
            for member in list(self.members.values()):
                if member.number in self._fresh or member.buf_low < need:
                    self._pull(member)
        for member in self.members.values():
            if member.low < need and member.number not in self.pending:
                self._send(msg.Fence(member.number, self.version + 1))
        self._advance()

    def _in_grace(self) -> bool:
        """Whether the update that could be made waits for more members; those that it waits for no longer are late."""
        if self.settings.grace is None:
            return False
        missing = self.members.keys() - self.late - self.came
        if not self._grace.is_over(self._now) and missing:
            return True
        self.late |= missing
        return False

    def _all_stand(self) -> bool:
        """Whether nobody can send more: pushes at S = 0 are answered after the update, so these must be enough."""
        held = self.settings.transfer == "push" and self.settings.holds and bool(self.came)
        return held and all(m.low == UNBOUNDED for n, m in self.members.items() if n not in self.late)

    def _pull(self, member: Member) -> None:
        self.pending[member.number] = self._next_pull
        self.pulled.add(member.number)
        self.counters["pulls"] += 1
        member.moved = self._now
        self._send(msg.Pull(member.number, self._next_pull, self.version + 1))
        self._next_pull += 1

    def _advance(self, changed: Member | None = None) -> None:
        """Apply the update once nothing too old is left out. ``changed``: the only member changed since last time."""
        if not self.updating or self.applying or self.pending:
            return
        need = self.need
        if changed is not None and self._blocking:
            pullable = self.settings.transfer == "pull" and changed.buf_low < need
            if not self._may_be_old(changed):
                self._blocking.discard(changed.number)
            if self._blocking and not pullable:
                return
        if self.settings.transfer == "pull":
            for member in self.members.values():
                if member.buf_low < need:  # finished after the pull, on an old base: take it into this update
                    self._pull(member)
            if self.pending:
                return
        self._blocking = {member.number for member in self.members.values() if self._may_be_old(member)}
        if self._blocking:
            return  # wait until those nodes send INs, or their leases end
        self.applying = True
        self._out.append(Apply(self.version, tuple(self.arrived)))

    def _may_be_old(self, member: Member) -> bool:
        """Whether something may still come from a member that the update would make too old.

        A report may overtake the pushed sum that it counts, which its bound no longer covers.
        """
        settings = self.settings
        pushed = settings.transfer == "push" and settings.max_staleness is not None and settings.enforce == "wait"
        return member.number not in self.late and (member.low < self.need or (pushed and member.fresh))

    def _grant_after_update(self) -> None:
        if self.settings.transfer == "push":
            chosen = [number for number in self.waiting if number in self.members]
        else:
            need = self.need
            there = [m for m in self.members.values() if m.sent != self.version]
            asked = self.pulled.union(self.waiting)
            chosen = [m.number for m in there if m.number in asked or m.sent < need or m.low == UNBOUNDED]
        self.waiting, self.pulled = [], set()
        for number in dict.fromkeys(chosen):
            self._grant(self.members[number])

    def _grant(self, member: Member) -> None:
        late = member.number in self.late
        if self.finished or (late and member.grants):
            return
        if not late:
            member.moved = self._now
        same = member.sent == self.version
        number = member.grant(self.version)
        member.allowed = self._allowed(member)
        self._send(
            msg.Weights(member.number, self.version, number, member.allowed, self._steps(member), same, ack=member.ack)
        )

    def _slowest(self) -> int:
        """Return the rounds of the slowest node. One round is one submission from each of its workers."""
        return min((m.clock // m.workers for n, m in self.members.items() if n not in self.late), default=0)

    def _allowed(self, member: Member) -> int:
        """Return the last start (in the member's own count) that keeps it no more than ``clock_limit`` rounds ahead."""
        if self.settings.clock_limit is None:
            return UNBOUNDED
        return (self._slowest() + self.settings.clock_limit + 1) * member.workers - 1 - member.offset

    def _steps(self, member: Member) -> int:
        """Return the batches of a member's next submission; balanced local steps give slower nodes fewer."""
        steps = self.settings.steps
        if not (self.settings.balance and member.step_us):
            return steps
        fastest = min(m.step_us for m in self.members.values() if m.step_us)
        return max(1, round(steps * fastest / member.step_us))

    def _permits(self) -> None:
        """With SSP: send weights to members that were stopped and may continue now."""
        if self.settings.clock_limit is None or self.applying:
            return
        for member in self.members.values():
            stands = self._started and member.low == UNBOUNDED and not member.grants
            if stands and self._allowed(member) > member.allowed:
                self._grant(member)

    def _drop(self, number: int, admit: bool = True) -> None:
        member = self.members.pop(number, None)
        if member is None:
            return
        self.pending.pop(number, None)
        for numbers in (self.came, self._fresh, self._blocking, self.pulled, self.late):
            numbers.discard(number)
        self._workers -= member.workers
        self.waiting = [other for other in self.waiting if other != number]
        self.counters["left"] += 1
        self.counters["lost"] += max(0, member.seen - member.ack)
        self._out.append(Forget(number))
        self._go_on()
        self._permits()
        claim = self._claims.pop(member.node, None) if admit else None
        if claim is not None:
            self._hello(claim[0])

    def _send(self, message: msg.Message) -> None:
        number = message.member  # type: ignore[union-attr]
        if number in self.members:
            self.members[number].told = self._now
        self._out.append(Send(message, number))

    def _flush(self) -> list[Effect]:
        out, self._out = self._out, []
        return out
