"""An adversary for the state machines: messages wait as long as it likes, workers finish when it likes, nodes die.

Order is kept within a channel only. Everything is drawn from one seed.
"""

import random
from collections import Counter, deque

from thinwire.systems.parameter_server.effects import Apply, Join, Leave, Refuse, Report, Send, Start
from thinwire.systems.parameter_server.leader import Leader
from thinwire.systems.parameter_server.messages import Grad, Weights, decode, encode
from thinwire.systems.parameter_server.server import Server


class Violation(AssertionError):
    """A gradient was applied too late, twice, or from nowhere."""


class Node:
    def __init__(self, leader):
        self.leader = leader
        self.up = {"control": deque(), "data": deque()}
        self.down = {"control": deque(), "data": deque()}
        self.due = False
        self.work = {}  # worker -> Start
        self.link_up = True


class Chaos:
    """Random events on one server and its leaders.

    Args:
        far: this node's messages are 30 times less likely to be delivered.
        slow: this node's workers are 10 times less likely to finish.
        kill, bad: probability per event of a death, and per gradient of one that is not finite.
        instances: a leader that comes after a dead one is known to be another process.
    """

    def __init__(self, settings, nodes, workers, seed, *, far=None, slow=None, kill=0.0, bad=0.0, instances=False):
        self.random = random.Random(seed)
        self.settings, self.workers, self.kill, self.bad = settings, workers, kill, bad
        self.far, self.slow, self.instances = far, slow, instances
        self.server = Server(settings)
        self.now, self.events = 0.0, 0
        self.times_applied = Counter()
        self.updates = []
        self.node_of = {}
        self.nodes = {n: Node(Leader(settings, n, workers)) for n in range(nodes)}
        for n in self.nodes:
            self.do_leader(n, self.nodes[n].leader.join(0.0))

    def do_server(self, effects):
        for effect in effects:
            if isinstance(effect, Send):
                member = self.server.members.get(effect.member)
                number = member.node if member else self.node_of.get(effect.member)
                if number is not None and number in self.nodes and self.nodes[number].link_up:
                    self.node_of[effect.member] = number
                    self.nodes[number].down[self.channel(effect.message)].append(effect.message)
            elif isinstance(effect, Apply):
                self.check(effect)
            elif isinstance(effect, Refuse) and effect.instance == self.nodes[effect.node].leader.instance:
                raise Violation("a node was refused for the sake of a dead one")

    def do_leader(self, n, effects):
        node = self.nodes[n]
        for effect in effects:
            if isinstance(effect, Send):
                if node.link_up:
                    node.up[self.channel(effect.message)].append(effect.message)
            elif isinstance(effect, Report):
                node.due = True
            elif isinstance(effect, Start):
                node.work[effect.worker] = effect
            elif isinstance(effect, (Join, Leave)):
                node.due = False
                if isinstance(effect, Join):
                    self.do_leader(n, node.leader.join(self.now))

    def channel(self, message):
        two = self.settings.channels == 2
        return "data" if two and isinstance(message, (Grad, Weights)) else "control"

    def check(self, effect):
        version = effect.version
        if self.updates and version != self.updates[-1][0] + 1:
            raise Violation(f"version {version} after {self.updates[-1][0]}")
        for part in effect.contributions:
            for row in part.rows:
                key = (part.node, row.worker, row.step)
                self.times_applied[key] += 1
                if self.times_applied[key] > 1:
                    raise Violation(f"{key} was applied twice")
                tau = version - row.base
                if not 0 <= tau <= self.settings.bound:
                    raise Violation(f"a gradient {tau} versions old was applied, limit {self.settings.max_staleness}")
        self.updates.append((version, effect.contributions))

    def choices(self):
        found = []
        for n, node in self.nodes.items():
            near = 1.0 if n == self.far else 30.0
            for direction, target in ((node.up, "up"), (node.down, "down")):
                for name, queue in direction.items():
                    blocked = target == "down" and name == "data" and node.down["control"] and not node.leader.member
                    if queue and not blocked:
                        found.append((near, (target, n, name)))
            if node.due and node.leader.member:
                found.append((near, ("report", n)))
            for worker in node.work:
                found.append((1.0 if n == self.slow else 10.0, ("done", n, worker)))
        if self.server.applying:
            found.append((20.0, ("applied",)))
        if not found:
            found.append((1.0, ("idle",)))
        return found

    def step(self):
        self.events += 1
        self.now += 0.001
        if self.kill and self.random.random() < self.kill:
            self.fault()
        found = self.choices()
        ((_, event),) = self.random.choices(found, weights=[w for w, _ in found])
        getattr(self, event[0])(*event[1:])

    def run(self, events):
        for _ in range(events):
            self.step()
        return self

    def settle(self, updates, events=6000):
        """From now on all are equal and nobody dies: so many updates must come."""
        self.far = self.slow = None
        self.kill = 0.0
        wanted = len(self.updates) + updates
        for _ in range(events):
            if len(self.updates) >= wanted:
                return
            self.step()
        raise AssertionError(f"no {updates} updates in {events} events: it stalls")

    def up(self, n, name):
        message = self.nodes[n].up[name].popleft()
        self.do_server(self.server.on(message, self.now))

    def down(self, n, name):
        message = self.nodes[n].down[name].popleft()
        frame = encode(message)  # what the wire would do to it
        if not isinstance(message, Weights):
            assert decode(frame)[0] == message
        self.do_leader(n, self.nodes[n].leader.on(message, self.now))

    def report(self, n):
        node = self.nodes[n]
        node.due = False
        message = node.leader.report(self.now)
        assert decode(encode(message))[0] == message
        node.up["control"].append(message)

    def done(self, n, worker):
        node = self.nodes[n]
        start = node.work.pop(worker)
        finite = self.random.random() >= self.bad
        self.do_leader(n, node.leader.done(worker, start.token, None, self.now, finite=finite))

    def applied(self):
        self.do_server(self.server.applied(self.now))

    def idle(self):
        """Nothing is under way: time passes, as heartbeats do."""
        self.now += self.settings.lease_seconds / 3 + 0.01
        self.do_server(self.server.tick(self.now))
        for n, node in self.nodes.items():
            self.do_leader(n, node.leader.tick(self.now))

    def fault(self):
        n = self.random.choice(list(self.nodes))
        node = self.nodes[n]
        kind = self.random.choice(["leader", "link", "worker"])
        if kind == "worker":
            worker = self.random.randrange(self.workers)
            node.work.pop(worker, None)
            self.do_leader(n, node.leader.lost(worker, self.now))
            self.do_leader(n, node.leader.returned(worker, self.now))
            return
        for queue in (*node.down.values(), *node.up.values()):
            queue.clear()  # a broken connection takes what is on it along
        member = node.leader.member
        if kind == "leader":
            instance = self.random.getrandbits(60) if self.instances else 0
            self.nodes[n] = Node(Leader(self.settings, n, self.workers, instance=instance))
            effects = self.nodes[n].leader.join(self.now)
        else:
            node.due = False
            effects = node.leader.ended("the link broke", self.now)
        if member and self.random.random() < 0.7:  # else the server learns of it from the next HELLO
            self.do_server(self.server.gone(member, self.now))
        self.do_leader(n, effects)
