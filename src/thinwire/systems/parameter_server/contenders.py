"""Two processes with one node number: the one at work stays, the other is refused or waits until the first has gone."""

from __future__ import annotations

from thinwire.systems.parameter_server.messages import Hello


class Contenders:
    """Processes that said HELLO with the number of another process's member.

    That member may be dead without the server knowing it, so the server asks it for a sign of life. If it answers, the
    newcomer is refused; if its lease ends first, the newcomer takes its place. Questions are numbered, because an IN
    sent before the question proves nothing.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Hello, int]] = {}
        self._asked = 0

    def wait(self, hello: Hello) -> Hello | None:
        """Let a newcomer wait; return another process that waited for this number and is now to be refused, or None."""
        before = self._waiting.get(hello.node)
        self._asked += 1
        self._waiting[hello.node] = hello, self._asked
        other = before[0] if before is not None and before[0].instance != hello.instance else None
        return other

    def question(self, node: int) -> int:
        """Return the number of the question to ask this node's member; 0: nobody waits."""
        return self._waiting[node][1] if node in self._waiting else 0

    def answered(self, node: int, probe: int) -> Hello | None:
        """Note a member's answer; return the HELLO to refuse, if any."""
        if not probe or node not in self._waiting or probe < self._waiting[node][1]:
            return None
        return self.leave(node)

    def leave(self, node: int) -> Hello | None:
        """Remove and return the process that waits for this number, if any."""
        hello, _ = self._waiting.pop(node, (None, 0))
        return hello
