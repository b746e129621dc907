"""Two processes with one node number: the one that is at work stays, the other is refused or waits for its end."""

from __future__ import annotations

from thinwire.parameter_server.messages import Hello


class Contenders:
    """Who has said HELLO with the number of a member of another process.

    The member may be dead without the server knowing it, so it is asked for a sign of life. If it answers, the newcomer
    is refused; if its lease ends first, the newcomer takes its place. An IN that was under way before the question
    proves nothing, hence the number of the question.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Hello, int]] = {}
        self._asked = 0

    def wait(self, hello: Hello) -> Hello | None:
        """A newcomer waits. Returns who waited before it and must not now."""
        before = self._waiting.get(hello.node)
        self._asked += 1
        self._waiting[hello.node] = hello, self._asked
        other = before[0] if before is not None and before[0].instance != hello.instance else None
        return other

    def question(self, node: int) -> int:
        """The number that is asked of this node's member; 0: none."""
        return self._waiting[node][1] if node in self._waiting else 0

    def answered(self, node: int, probe: int) -> Hello | None:
        """A member answers: who is to be refused, if anybody."""
        if not probe or node not in self._waiting or probe < self._waiting[node][1]:
            return None
        return self.leave(node)

    def leave(self, node: int) -> Hello | None:
        """Who waits for this number waits no more."""
        hello, _ = self._waiting.pop(node, (None, 0))
        return hello
