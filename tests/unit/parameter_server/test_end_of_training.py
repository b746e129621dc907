"""Nothing is made of the weights that all were told are the last."""

import torch

from thinwire.systems.parameter_server.effects import Apply, Send, Start
from thinwire.systems.parameter_server.leader import Leader
from thinwire.systems.parameter_server.messages import Grad, Pull, Stop, Weights, Welcome
from thinwire.systems.parameter_server.server import Server
from thinwire.systems.parameter_server.settings import Settings


def sent(effects, kind):
    return [effect.message for effect in effects if isinstance(effect, Send) and isinstance(effect.message, kind)]


def test_an_update_that_waits_for_sums_when_training_ends_is_not_made():
    server, leader = Server(Settings()), Leader(Settings(), 0, 1)
    effects = server.on(leader.hello(), 0.0)
    started = [x for message in (*sent(effects, Welcome), *sent(effects, Weights)) for x in leader.on(message, 0.0)]
    (start,) = [effect for effect in started if isinstance(effect, Start)]
    leader.done(start.worker, start.token, torch.ones(2), 0.1)
    (pull,) = sent(server.on(leader.report(0.1), 0.1), Pull)
    (grad,) = sent(leader.on(pull, 0.2), Grad)
    (stop,) = sent(server.finish(0.2), Stop)
    assert stop.version == 0
    for effects in (server.on(grad, 0.3), server.gone(leader.member, 0.4)):
        assert not any(isinstance(effect, Apply) for effect in effects)
    assert not server.members
