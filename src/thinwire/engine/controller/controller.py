"""Change plans between steps: once to the first step's order of arrival, then as a pilot's measurements say."""

from __future__ import annotations

from thinwire.engine.buckets import Buckets, Step
from thinwire.engine.controller.pilot import Decision, Pilot
from thinwire.engine.controller.rebuild import rebuild
from thinwire.engine.executors.watch import ExchangeWatch
from thinwire.engine.schedules.schedule import Schedule
from thinwire.predict.measure.kernels import Stopwatch


class Controller:
    """The controller of one attached model.

    Args:
        buckets: whose plan it chooses.
        schedule: may know a better order than that of arrival.
        pilot: measures; None: nothing is measured.
        pinned: whether the first plan is the user's, and stays.

    Attributes:
        rebuilt: whether the plan follows the first step.
        why: the pilot's reasons for the plan in force.
        waiting: a decision to follow before the next backward.
    """

    def __init__(self, buckets: Buckets, schedule: Schedule, pilot: Pilot | None, *, pinned: bool) -> None:
        self._buckets, self._schedule, self.pilot = buckets, schedule, pilot
        self.rebuilt = pinned
        self.why: tuple[str, ...] = ()
        self.waiting: Decision | None = None
        comm = buckets.session.comm
        if comm is not None and (pilot is not None or not pinned):
            comm.steps.executor.watch = ExchangeWatch(Stopwatch(comm.device))

    @property
    def settled(self) -> bool:
        """Whether the plan in force is the one that measurements led to, or nothing was to be measured."""
        return self.rebuilt and self.waiting is None and (self.pilot is None or self.pilot.predicted is not None)

    def after_step(self, step: Step | None, backward_seconds: float) -> Decision | None:
        """Return what to do before the next step. All ranks call it alike; it is sometimes a collective.

        Args:
            step: the step that has ended; None: ignore its order of arrival.
            backward_seconds: from its first gradient to its last bucket.
        """
        if self.pilot is not None:
            self.pilot.timings.ended()
        if not self.rebuilt and step is not None:
            return self._rebuild(step, backward_seconds)
        if self.pilot is None:
            return None
        session = self._buckets.session
        decision = self.pilot.after_step(session.method, session.dense)
        if self.pilot.costs is not None:
            self._watch_no_more()
        if decision is not None and self._buckets.pauses:  # this step's updates are not made yet
            self.waiting, decision = decision, None
        return decision

    def before_step(self) -> Decision | None:
        """Return the decision that had to wait until no update is pending."""
        decision, self.waiting = self.waiting, None
        return decision

    def _rebuild(self, step: Step, seconds: float) -> Decision | None:
        """Make the plan, once, in rank 0's order of arrival; decoupled: in reverse of the layers' order of need."""
        self.rebuilt = True
        buckets = self._buckets
        session, managed = buckets.session, buckets.parameters.managed
        assert session.comm is not None
        unseen = [m.index for m in reversed(managed) if not step.seen[m.index]]
        order = self._schedule.order() or [*step.arrival, *unseen]
        measured = self.pilot is not None
        plan = rebuild(session.method, managed, session.comm, order, unseen, seconds, measured=measured)
        if not measured:
            self._watch_no_more()
        return None if plan == buckets.plan else Decision(plan, 0.0)

    def _watch_no_more(self) -> None:
        comm = self._buckets.session.comm
        assert comm is not None
        comm.steps.executor.watch = None
