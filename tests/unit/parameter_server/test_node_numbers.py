"""Two processes with one node number: who is at work stays, and a dead one's place is free after its lease."""

import pytest

from thinwire.systems.parameter_server.effects import GiveUp, Refuse, Send
from thinwire.systems.parameter_server.leader import Leader
from thinwire.systems.parameter_server.messages import (
    OTHER_PROTOCOL,
    TAKEN,
    Fence,
    Hello,
    Refused,
    Weights,
    Welcome,
    decode,
    encode,
)
from thinwire.systems.parameter_server.server import Server
from thinwire.systems.parameter_server.settings import Settings


def sent(effects, kind):
    return [effect.message for effect in effects if isinstance(effect, Send) and isinstance(effect.message, kind)]


@pytest.fixture
def pair():
    """A server with one member, node 7, whose leader is at work."""
    server, leader = Server(Settings(lease_seconds=9.0)), Leader(Settings(lease_seconds=9.0), 7, 1, instance=11)
    effects = server.on(leader.hello(), 0.0)
    for message in (*sent(effects, Welcome), *sent(effects, Weights)):
        leader.on(message, 0.0)
    server.on(leader.report(0.1), 0.1)
    return server, leader


def test_a_second_process_is_refused_as_soon_as_the_first_answers(pair):
    server, leader = pair
    under_way = leader.report(0.9)
    effects = server.on(Hello(7, 1, instance=22), 1.0)
    (question,) = sent(effects, Fence)
    assert decode(encode(question))[0] == question
    assert not any(isinstance(effect, Refuse) for effect in server.on(under_way, 1.1))  # proves nothing
    leader.on(question, 1.2)
    assert Refuse(7, 22, TAKEN) in server.on(leader.report(1.2), 1.3)
    assert list(server.members) == [leader.member]
    assert server.counters["refused"] == 1

    (end,) = Leader(Settings(), 7, 1, instance=22).on(Refused(7, TAKEN), 1.4)
    assert isinstance(end, GiveUp)
    assert "its own number" in end.reason


def test_a_second_process_takes_the_place_of_a_silent_one_after_its_lease(pair):
    server, _ = pair
    server.on(Hello(7, 1, instance=22), 5.0)
    assert not sent(server.tick(9.0), Welcome)
    (welcome,) = sent(server.tick(9.2), Welcome)
    assert server.members[welcome.member].instance == 22


def test_the_newest_of_several_waits(pair):
    server, leader = pair
    server.on(Hello(7, 1, instance=22), 5.0)
    assert Refuse(7, 22, TAKEN) in server.on(Hello(7, 1, instance=33), 5.1)
    (welcome,) = sent(server.gone(leader.member, 5.2), Welcome)  # its connection breaks: no need to wait
    assert server.members[welcome.member].instance == 33


def test_a_process_that_comes_again_replaces_itself_and_whoever_waits_goes_on_waiting(pair):
    server, leader = pair
    server.on(Hello(7, 1, instance=22), 5.0)
    effects = server.on(leader.hello(), 5.1)
    (welcome,) = sent(effects, Welcome)
    assert server.members[welcome.member].instance == 11
    for message in (welcome, *sent(effects, Weights), *sent(effects, Fence)):
        leader.on(message, 5.2)
    assert Refuse(7, 22, TAKEN) in server.on(leader.report(5.3), 5.3)


def test_another_version_of_the_protocol_is_refused():
    assert server_says(Hello(1, 1, protocol=1)) == [Refuse(1, 0, OTHER_PROTOCOL)]


def server_says(message):
    return Server(Settings()).on(message, 0.0)
