"""The verbs of ``thinwire federated``, called from tests."""

from thinwire.tools.cli.main import app
from verbs import CliRunner

SMALL = ["federated", "run", "digits:clients=12:width=2:hidden=8", "--rounds", "2", "--clients-per-round", "4"]
MINE = """
import torch
from thinwire.systems import federated as fl

def build(lr=0.1):
    def load(i):
        draw = torch.Generator().manual_seed(i)
        x = torch.randn(6, 5, generator=draw)
        return x, (x.sum(1) > 0).long()
    torch.manual_seed(0)
    clients = fl.FunctionClients(9, load, 6)
    return fl.Federation(fl.FedAvg(lr=lr), torch.nn.Linear(5, 2), clients, rounds=2, clients_per_round=3)

def nothing():
    return 3

def raises():
    return {}["x"]
"""


def call(*arguments, code=None):
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    assert code in (None, done.exit_code), done.output
    return done
