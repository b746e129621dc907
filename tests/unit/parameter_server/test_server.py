"""The server's state machine, told what happened: node numbers, the end, what is not used, who goes."""

import contextlib
from dataclasses import replace

import pytest
import torch

from thinwire.systems.link.codec import FRAME
from thinwire.systems.parameter_server import messages as msg
from thinwire.systems.parameter_server.effects import Apply, Drop, GiveUp, Refuse, Send, Start
from thinwire.systems.parameter_server.leader import Leader
from thinwire.systems.parameter_server.presets import asp, bsp, diloco, fedbuff
from thinwire.systems.parameter_server.server import Server
from thinwire.systems.parameter_server.settings import Settings


def sent(effects, kind):
    return [effect.message for effect in effects if isinstance(effect, Send) and isinstance(effect.message, kind)]


@pytest.fixture
def pair():
    """A server with one member, node 7, whose leader is at work."""
    server, leader = Server(Settings(lease_seconds=9.0)), Leader(Settings(lease_seconds=9.0), 7, 1, instance=11)
    effects = server.on(leader.hello(), 0.0)
    for message in (*sent(effects, msg.Welcome), *sent(effects, msg.Weights)):
        leader.on(message, 0.0)
    server.on(leader.report(0.1), 0.1)
    return server, leader


def test_a_second_process_is_refused_as_soon_as_the_first_answers(pair):
    server, leader = pair
    under_way = leader.report(0.9)
    effects = server.on(msg.Hello(7, 1, instance=22), 1.0)
    (question,) = sent(effects, msg.Fence)
    assert msg.decode(msg.encode(question))[0] == question
    assert not any(isinstance(effect, Refuse) for effect in server.on(under_way, 1.1))  # proves nothing
    leader.on(question, 1.2)
    assert Refuse(7, 22, msg.TAKEN) in server.on(leader.report(1.2), 1.3)
    assert list(server.members) == [leader.member]
    assert server.counters["refused"] == 1

    (end,) = Leader(Settings(), 7, 1, instance=22).on(msg.Refused(7, msg.TAKEN), 1.4)
    assert isinstance(end, GiveUp)
    assert "its own number" in end.reason


def test_a_second_process_takes_the_place_of_a_silent_one_after_its_lease(pair):
    server, _ = pair
    server.on(msg.Hello(7, 1, instance=22), 5.0)
    assert not sent(server.tick(9.0), msg.Welcome)
    (welcome,) = sent(server.tick(9.2), msg.Welcome)
    assert server.members[welcome.member].instance == 22


def test_the_newest_of_several_waits(pair):
    server, leader = pair
    server.on(msg.Hello(7, 1, instance=22), 5.0)
    assert Refuse(7, 22, msg.TAKEN) in server.on(msg.Hello(7, 1, instance=33), 5.1)
    (welcome,) = sent(server.gone(leader.member, 5.2), msg.Welcome)  # its connection breaks: no need to wait
    assert server.members[welcome.member].instance == 33


def test_a_process_that_comes_again_replaces_itself_and_whoever_waits_goes_on_waiting(pair):
    server, leader = pair
    server.on(msg.Hello(7, 1, instance=22), 5.0)
    effects = server.on(leader.hello(), 5.1)
    (welcome,) = sent(effects, msg.Welcome)
    assert server.members[welcome.member].instance == 11
    for message in (welcome, *sent(effects, msg.Weights), *sent(effects, msg.Fence)):
        leader.on(message, 5.2)
    assert Refuse(7, 22, msg.TAKEN) in server.on(leader.report(5.3), 5.3)


@pytest.mark.parametrize("says", ["low=0", "answers no pull", "counts what it never pushes"])
def test_a_member_that_gives_signs_of_life_and_nothing_else_holds_nobody_up(says):
    """For ever, in whatever way: the others wait for a lease, once, and then no more."""
    push = says == "counts what it never pushes"
    settings = Settings(transfer="push", update_every=1) if push else Settings(lease_seconds=9.0)
    server, leader = Server(settings), Leader(settings, 0, 1, instance=1)
    inbox = server.on(leader.hello(), 0.0)
    server.on(msg.Hello(1, 1, instance=2), 0.0)
    liar, versions = max(server.members), []
    for second in range(1, 80):
        now, out = float(second), []
        while inbox:  # what the server does, and what the honest node answers
            effect = inbox.pop(0)
            if isinstance(effect, Apply):
                inbox += server.applied(now)
            elif (isinstance(effect, Send) and effect.member == leader.member) or sent([effect], msg.Welcome):
                out += leader.on(effect.message, now) if effect.member != liar else []
        for worker, token in list(leader.running.items()):
            out += leader.done(worker, token, torch.ones(1), now)
        seen = 0 if says == "low=0" else 1
        lie = msg.IterationNumber(liar, second, seen, 0 if says == "low=0" else 1 << 60, 0, second)
        inbox += server.on(lie, now)
        for effect in [*out, Send(leader.report(now))]:
            if isinstance(effect, Send):
                inbox += server.on(effect.message, now)
        inbox += server.tick(now)
        versions.append(server.version)
    assert versions[-1] > 50
    waits = [versions.count(v) for v in sorted(set(versions))]
    assert max(waits) <= 2 * settings.lease_seconds
    assert sum(wait > 3 for wait in waits) == 1


def test_another_version_of_the_protocol_is_refused():
    assert Server(Settings()).on(msg.Hello(1, 1, protocol=1), 0.0) == [Refuse(1, 0, msg.OTHER_PROTOCOL)]


def test_an_update_that_waits_for_sums_when_training_ends_is_not_made():
    server, leader = Server(Settings()), Leader(Settings(), 0, 1)
    effects = server.on(leader.hello(), 0.0)
    started = [
        x for message in (*sent(effects, msg.Welcome), *sent(effects, msg.Weights)) for x in leader.on(message, 0.0)
    ]
    (start,) = [effect for effect in started if isinstance(effect, Start)]
    leader.done(start.worker, start.token, torch.ones(2), 0.1)
    (pull,) = sent(server.on(leader.report(0.1), 0.1), msg.Pull)
    (grad,) = sent(leader.on(pull, 0.2), msg.Grad)
    (stop,) = sent(server.finish(0.2), msg.Stop)
    assert stop.version == 0
    for effects in (server.on(grad, 0.3), server.gone(leader.member, 0.4)):
        assert not any(isinstance(effect, Apply) for effect in effects)
    assert not server.members


def test_sums_for_a_member_that_has_gone_are_refused_and_counted():
    server = Server(Settings())
    effects = server.on(msg.Grad(77, 1, 1, 1, 0, 1, (msg.Row(0, 0, 0, 1), msg.Row(0, 1, 0, 1))), 0.0)
    assert effects == [Send(msg.Nack(77), 77)]
    assert server.counters["late"] == 2


@pytest.mark.parametrize("step", [2**62 - 1, 2**62])
def test_a_node_that_names_the_largest_step_can_come_again(step):
    server = Server(asp())
    server.on(msg.Hello(0, 1), 0.0)
    (member,) = server.members
    grad = msg.Grad(member, 0, 1, 1, 0, 1, tensor=torch.zeros(1))
    with contextlib.suppress(ValueError):  # refused is as good
        table = msg.encode(replace(grad, rows=(msg.Row(0, 0, step, 8),)))[FRAME.size :]
        server.on(msg.CODEC.with_rows(grad, table), 0.0)
        server.applied(0.0)
    server.on(msg.Bye(member), 1.0)
    (welcome,) = sent(server.on(msg.Hello(0, 1), 2.0), msg.Welcome)
    assert msg.decode(msg.encode(welcome))[0] == welcome


@pytest.mark.parametrize("pull", [0, 1])
def test_who_sends_gradients_of_weights_to_come_is_dropped(pull):
    server = Server(asp())
    server.on(msg.Hello(0, 1), 0.0)
    (member,) = server.members
    server.on(msg.Grad(member, pull, 1, 1, 0, 1, (msg.Row(1, 0, 0, 8),), torch.zeros(1)), 0.0)
    assert not server.members
    assert server.version == 0


def test_every_sum_that_is_not_used_is_dropped_by_name():
    server = Server(fedbuff(size=1, max_staleness=0, steps=1))
    server.on(msg.Hello(0, 1), 0.0)
    (member,) = server.members

    def push(seq, base, tensor="x", who=member):
        return server.on(msg.Grad(who, 0, seq, seq, base, 1, (msg.Row(base, 0, seq, 1),), tensor), 0.0)

    def dropped(effects):
        return [effect.tensor for effect in effects if isinstance(effect, Drop)]

    assert not dropped(push(1, 0, "used"))
    server.applied(0.0)
    assert dropped(push(2, 0, "stale")) == ["stale"]  # one version late
    assert dropped(push(2, 1, "twice")) == ["twice"]
    assert dropped(push(3, 1, "stranger", who=99)) == ["stranger"]
    assert (server.counters["stale"], server.counters["late"]) == (1, 2)


def test_an_update_that_takes_long_is_no_silence_and_nobody_is_dropped_meanwhile():
    server = Server(asp(lease_seconds=9.0))
    server.on(msg.Hello(0, 1), 0.0)
    (member,) = server.members
    server.on(msg.Grad(member, 0, 1, 1, 0, 1, (msg.Row(0, 0, 0, 1),), "x"), 1.0)
    assert server.applying
    assert [effect.message for effect in server.tick(20.0)] == [msg.Fence(member, 0)]
    assert member in server.members


@pytest.mark.parametrize("when", ["before WELCOME", "as a member"])
def test_a_worker_that_comes_after_the_last_has_gone_has_work_to_do(when):
    """Were the node a member without workers, the server would wait for what it never starts."""
    server, leader = Server(bsp()), Leader(bsp(), 0, 2)
    leader.alive.clear()

    def carry(effects, now):
        """Both ways until nothing more is said; what is to start."""
        started = []
        for effect in effects:
            if isinstance(effect, Start):
                started.append(effect.worker)
            elif isinstance(effect, Send):
                for answer in server.on(effect.message, now):
                    if isinstance(answer, Send):
                        started += carry(leader.on(answer.message, now), now)
        return started

    hello = leader.returned(1, 0.0)
    if when == "as a member":
        assert carry(hello, 0.1) == [1]
        assert not carry(leader.lost(1, 0.2), 0.2)
        assert not leader.ended("the server has closed the connection of a node that left", 0.3)
    else:
        leader.lost(1, 0.1)
        assert not carry(hello, 0.2)
    assert not server.members
    assert carry(leader.returned(0, 0.4), 0.4) == [0]


def test_a_report_that_overtakes_the_sum_it_counts_lets_no_update_pass():
    """Of a node of two workers at S = 0: its second sum is on the way when the report says that nothing is computed."""
    settings = diloco(4, start_nodes=2)
    server = Server(settings)
    leaders = [Leader(settings, node, workers) for node, workers in ((0, 1), (1, 2))]
    effects = [server.on(leader.hello(), 0.0) for leader in leaders]
    for leader, some in zip(leaders, effects):
        for welcome in sent(some, msg.Welcome):
            leader.on(welcome, 0.0)
    weights = sent(effects[1], msg.Weights)  # to both, as the second has come
    starts = [
        [one for message in weights for one in leader.on(message, 0.0) if isinstance(one, Start)] for leader in leaders
    ]
    assert list(map(len, starts)) == [1, 2]
    sums = [
        effect.message
        for leader, begun in zip(leaders, starts)
        for start in begun
        for effect in leader.done(start.worker, start.token, torch.ones(1), 0.1)
        if isinstance(effect, Send)
    ]
    effects = [*server.on(sums[0], 0.2), *server.on(sums[1], 0.2), *server.on(leaders[1].report(0.2), 0.2)]
    assert not any(isinstance(effect, Apply) for effect in effects)
    (update,) = [effect for effect in server.on(sums[2], 0.3) if isinstance(effect, Apply)]
    assert len(update.contributions) == 3
