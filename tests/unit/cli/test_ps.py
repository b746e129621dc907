"""The verbs of ``thinwire ps``: what they print, and what they refuse."""

import json

from thinwire.systems.cli.ps_work import read_outer
from verbs import call


def test_simulate_compares_a_setting_with_what_it_has_to_beat():
    words = ["--nodes", "4", "--workers", "2", "--slow", "0:4", "--seconds", "60", "--json"]
    result = call("ps", "simulate", "--settings", "inhad:max_staleness=4", *words)
    rows = {row["scheme"]: row for row in json.loads(result.stdout)}
    assert list(rows) == ["inhad:max_staleness=4", "asp", "bsp", "hierarchical all-reduce"]
    assert rows["inhad:max_staleness=4"]["max_staleness"] <= 4
    inhad, asp, _, ring = rows.values()
    assert inhad["gradients_per_second"] > 1.5 * ring["gradients_per_second"]
    assert asp["gradients_per_second"] == asp["updates_per_second"]  # each is an update
    assert asp["bytes_per_gradient"] > 1.5 * inhad["bytes_per_gradient"]
    assert ring["bytes_per_gradient"] == 2 * 4e7 * (4 - 1) / 8


def test_on_equal_nodes_behind_a_slow_server_link_the_all_reduce_wins():
    words = ("--nodes", 8, "--workers", 4, "--step", 0.3, "--link", "1gbit", "--seconds", 30, "--json")
    result = call("ps", "simulate", *words)
    rows = {row["scheme"]: row["gradients_per_second"] for row in json.loads(result.stdout)}
    assert rows["hierarchical all-reduce"] > max(rows["inhad"], rows["asp"], rows["bsp"])


def test_shards_carry_more_where_the_servers_link_is_the_bound():
    rows = {}
    for shards in ("0", "2"):
        result = call("ps", "simulate", "--settings", "asp", "--nodes", "24", "--parameters", "10", "--link", "1gbit",
                      "--seconds", "60", "--shards", shards, "--json")  # fmt: skip
        rows[shards] = json.loads(result.stdout)[0]["gradients_per_second"]
    assert rows["2"] > 1.7 * rows["0"]


def test_what_takes_long_says_first_what_it_begins():
    model = ["--model", "mlp:width=16:layers=1"]
    words = ["--nodes", "1", "--updates", "3", "--seconds", "9", "--timeout", "0.1"]
    said = call("ps", "run", *model, *words, code=1).stderr.splitlines()
    begins = "... starting a server, 1 node of 1 worker, link unlimited: mlp:width=16:layers=1 with inhad, "
    assert said[0] == begins + "9 s of training or 3 updates"
    assert said[-1].startswith("error: the server ended")
    said = call("ps", "server", *model, "--updates", "3", "--port", "99999", code=2).stderr.splitlines()
    assert said[0] == "... building mlp:width=16:layers=1"


def test_outer_optimizers_by_name():
    import torch

    assert read_outer("auto") is None
    assert read_outer("adamw:lr=0.1:beta1=0")([torch.zeros(2)]).defaults["betas"] == (0.0, 0.999)
    made = read_outer("sgd:lr=0.5:momentum=0.9")([torch.zeros(2)])
    assert made.defaults["lr"] == 0.5
    assert type(read_outer("delayed_nesterov:lr=0.1:period=3")([torch.zeros(2)])).__name__ == "DelayedNesterov"
