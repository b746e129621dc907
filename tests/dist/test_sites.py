"""Local steps between two sites, each with the model sharded over two ranks, on real ranks, against whole copies."""

import cases
import pytest
import torch
import torch.distributed as dist
from fsdp2_cases import WIDTH, Net, rows, sharded, whole
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import thinwire as tw
from spawned import run
from thinwire.engine.local.settings import local_settings
from thinwire.engine.local.travel import LocalRanks

pytestmark = pytest.mark.dist
SITES = SHARDS = 2
LATE = {"sync_every": 4, "codec": "int2", "fragments": 2, "fragment_sync_delay": 1}


def mesh():
    _clear_sharding_prop_cache()  # of the run before in these processes, whose meshes are equal and have no groups
    return init_device_mesh("cpu", (SITES, SHARDS), mesh_dim_names=("site", "shard"))


def place():
    return divmod(dist.get_rank(), SHARDS)


def attached(on, net=None, method="local", optimizer=None, **options):
    net = sharded(on["shard"], Net().double() if net is None else net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9) if optimizer is None else optimizer(net)
    return net, optimizer, tw.adapters.fsdp2.attach(net, optimizer, method, sites=on["site"], **options)


def step_of(net, optimizer, rank, step):
    cases.down(cases.loss_of(net, rank, step, WIDTH, torch.float64), optimizer)


def gathered(net):
    return {name: x.tolist() for name, x in whole(net).items()}


class Oracle:
    """The same training in one process, on whole copies whose gradients are the means of a site's ranks."""

    def __init__(self, local):
        self.nets = [Net().double() for _ in range(SITES)]
        self.optimizers = [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9) for net in self.nets]
        self.worlds = []
        for shard in range(SHARDS):
            weights = [
                {n: rows(p.detach(), shard) for n, p in net.named_parameters() if p.requires_grad} for net in self.nets
            ]
            weights = [{n: x for n, x in one.items() if x.numel()} for one in weights]
            self.worlds.append(LocalRanks(local, weights, start=0))

    def step(self, step):
        for world in self.worlds:
            world.look()
        for site, (net, optimizer) in enumerate(zip(self.nets, self.optimizers)):
            for shard in range(SHARDS):
                (cases.loss_of(net, site * SHARDS + shard, step, WIDTH, torch.float64) / SHARDS).backward()
            optimizer.step()
            optimizer.zero_grad()
        for world in self.worlds:
            world.step()

    def weights(self, site):
        return {n: p.detach() for n, p in self.nets[site].named_parameters()}


def _like_one(rank, size, options):
    """By how much the weights differ from the oracle's after twelve steps, and at their outer weights."""
    net, optimizer, sync = attached(mesh(), start_compression_step=0, **options)
    oracle = Oracle(local_settings("local", options))
    site = place()[0]
    for step in range(12):
        step_of(net, optimizer, rank, step)
        oracle.step(step)
    found = whole(net)
    apart = max(float((found[n] - x).abs().max()) for n, x in oracle.weights(site).items())
    with sync.outer_weights():
        outer = gathered(net)
    stats = sync.stats()
    sync.close()
    return apart, outer, stats.bytes_sent


@pytest.mark.parametrize(
    "options",
    [
        {"sync_every": 1, "codec": "none"},
        {"sync_every": 3, "codec": "none"},
        LATE,
        {"sync_every": 2, "codec": "int8", "look": 0.5},
    ],
    ids=str,
)
def test_shards_make_the_steps_of_whole_models(options):
    found = run(_like_one, SITES * SHARDS, options)
    assert max(apart for apart, _, _ in found) < 1e-12
    assert found[0][1] == found[SHARDS][1]  # outer weights of both sites
    assert all(sent > 0 for _, _, sent in found)


def _joint(rank, size):
    net, optimizer, sync = attached(mesh(), sync_every=1, codec="none")
    plain = Net().double()
    one = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for step in range(6):
        step_of(net, optimizer, rank, step)
        for other in range(size):
            (cases.loss_of(plain, other, step, WIDTH, torch.float64) / size).backward()
        one.step()
        one.zero_grad()
    found = whole(net)
    sync.close()
    return max(float((found[n] - p).abs().max()) for n, p in plain.named_parameters())


def test_averaging_after_every_step_is_training_on_the_joint_batch():
    assert max(run(_joint, SITES * SHARDS)) < 1e-12


def _evaluated(rank, size):
    """Losses of evaluations at outer weights and own ones, after forwards that leave the root's weights gathered."""
    net, optimizer, sync = attached(mesh(), sync_every=4, codec="int8", start_compression_step=0)
    x = torch.ones(3, WIDTH, dtype=torch.float64)
    for step in range(6):
        step_of(net, optimizer, rank, step)
    with torch.no_grad():
        own = net(x)
        with sync.outer_weights():
            values = whole(net)
            outer = net(x)
        again = net(x)
        plain = Net().double()
        plain.load_state_dict(values, strict=False)
        wanted = plain(x)
    sync.finish()
    with torch.no_grad():
        ended = net(x)
    sync.close()
    return (
        float((outer - wanted).abs().max()),
        torch.equal(own, again),
        torch.equal(own, outer),
        ended.tolist(),
    )


def test_evaluations_see_the_weights_that_are_lent():
    found = run(_evaluated, SITES * SHARDS)
    for apart, back, same, _ in found:
        assert apart < 1e-12
        assert back
        assert not same
    assert len({str(ended) for *_, ended in found}) == 1


def _spoilt(rank, size):
    """One rank's shard becomes infinite before a round: its whole site returns, and nothing is averaged."""
    net, optimizer, sync = attached(mesh(), sync_every=2, codec="int8", start_compression_step=0)
    step_of(net, optimizer, rank, 0)
    if rank == 1:
        with torch.no_grad():
            net.first.weight.to_local().fill_(float("inf"))
    before = whole(net)
    step_of(net, optimizer, rank, 1)
    finite = all(bool(x.isfinite().all()) for x in whole(net).values())
    rejected = sync.stats().rejected_steps
    with sync.outer_weights():
        outer = gathered(net)
    sync.close()
    return finite, rejected, outer, not all(bool(x.isfinite().all()) for x in before.values())


def test_a_site_with_one_infinite_shard_returns_to_the_outer_weights_as_a_whole():
    found = run(_spoilt, SITES * SHARDS)
    assert [infinite for *_, infinite in found] == [True, True, False, False]
    assert all(finite for finite, *_ in found)
    assert [rejected for _, rejected, *_ in found] == [1] * 4
    assert found[0][2] == found[2][2]


def _chosen(rank, size):
    net, optimizer, sync = attached(mesh(), method="local")
    for step in range(40):
        step_of(net, optimizer, rank, step)
    stats, period = sync.stats(), sync.period
    sync.close()
    return period, stats.settled, stats.note.split(", by ")[1]


def test_all_shards_take_the_same_measured_period_and_codec():
    assert len(set(run(_chosen, SITES * SHARDS))) == 1


def _refused(rank, size):
    on = mesh()
    net = sharded(on["shard"], Net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    attach = tw.adapters.fsdp2.attach
    found = [
        cases.said(call)
        for call in (
            lambda: attach(net, optimizer, "local"),
            lambda: attach(net, "ssgd", sites=on["site"]),
            lambda: attach(net, optimizer, "acp", sites=on["site"]),
            lambda: attach(net, optimizer, "local", sites=on["shard"]),
            lambda: attach(net, optimizer, "local", sites=on),
            lambda: attach(net, optimizer, "local", sites="site"),
            lambda: attach(net, optimizer, "local", sites=on["site"], inside="ssgd", sync_every=4),
            lambda: attach(net, optimizer, "local", sites=on["site"], every=4),
            lambda: attach(net, None, "local", sites=on["site"]),
            lambda: attach(Net(), torch.optim.SGD(Net().parameters(), lr=0.05), "local", sites=on["site"]),
        )
    ]
    with attach(net, optimizer, "local", sites=on["site"], sync_every=4):
        found.append(cases.said(lambda: attach(net, optimizer, "local", sites=on["site"], sync_every=4)))
    dist.barrier()
    return found


def test_what_does_not_work_says_so():
    (found, *others) = run(_refused, SITES * SHARDS)
    assert all(other == found for other in others)
    for said, words in zip(
        found,
        (
            'attach(model, optimizer, "local", sites=mesh["site"])',
            "sites= is for local steps",
            'weights by "local", "diloco"',
            "no other rank of its site",
            "sites= must be one dimension of a mesh",
            'such as mesh["site"], not str',
            "leave out inside=",
            "unknown option of local: 'every'",
            "pass the optimizer",
            "the optimizer does not own",
            "this model is attached already",
        ),
        strict=True,
    ):
        assert words in said, said


def _weights(net):
    return torch.cat([x.reshape(-1) for x in whole(net).values()])


def _cut(rank, size, folder, options):
    """Weights after a run, and after the same one that was cut in the middle and continued by new models."""
    on = mesh()
    adamw = {"optimizer": lambda net: torch.optim.AdamW(net.parameters(), lr=0.01)}
    net, optimizer, sync = attached(on, start_compression_step=0, **adamw, **options)
    for step in range(8):
        step_of(net, optimizer, rank, step)
    pending = len(sync.pending)
    sync.save(folder)
    for step in range(8, 16):
        step_of(net, optimizer, rank, step)
    sync.finish()
    wanted = _weights(net)
    sync.close()
    again, optimizer, sync = attached(on, Net(seed=9).double(), start_compression_step=0, **adamw, **options)
    sync.load(folder)
    for step in range(8, 16):
        step_of(again, optimizer, rank, step)
    sync.finish()
    found = _weights(again)
    sync.close()
    _, _, sync = attached(on, start_compression_step=0, **adamw, sync_every=7)
    misfit = cases.said(lambda: sync.load(folder))
    sync.close()
    return torch.equal(wanted, found), pending, misfit


@pytest.mark.parametrize(
    "options",
    [
        LATE,
        {"sync_every": 4, "codec": "int8", "outer": tw.Nesterov(), "look": 0.5},
        {"sync_every": 2, "codec": "powersgd", "fragment_sync_delay": 1},
        {"sync_every": 3, "codec": "none"},
    ],
    ids=str,
)
def test_a_run_that_was_cut_continues_bit_for_bit(options, tmp_path):
    for equal, pending, misfit in run(_cut, SITES * SHARDS, str(tmp_path / "cut"), options):
        assert equal
        assert (pending > 0) == ("fragment_sync_delay" in options)
        assert "to change settings" in misfit


def _moved(rank, size, folder, sites, shards):
    """The outer weights that were saved, and those of another mesh that has loaded them; then some more steps."""
    _clear_sharding_prop_cache()
    saved = torch.load(f"{folder}.pt")
    on = init_device_mesh("cpu", (sites, shards), mesh_dim_names=("site", "shard"))
    net, optimizer, sync = attached(on, Net(seed=9).double(), start_compression_step=0, **LATE)
    sync.load(folder)
    with sync.outer_weights():
        outer = _weights(net)
    before = _weights(net)
    for step in range(20, 24):
        step_of(net, optimizer, rank, step)
    sync.finish()
    ended = _weights(net)
    sync.close()
    return torch.equal(saved, outer), float((before - saved).abs().max()), ended.tolist()


def _saved(rank, size, folder):
    net, optimizer, sync = attached(mesh(), start_compression_step=0, **LATE)
    for step in range(8):
        step_of(net, optimizer, rank, step)
    sync.finish()
    for step in range(8, 11):
        step_of(net, optimizer, rank, step)
    sync.save(folder)
    with sync.outer_weights():
        outer = _weights(net)
    if rank == 0:
        torch.save(outer, f"{folder}.pt")
    sync.close()


def test_other_numbers_of_shards_and_sites_continue_from_the_outer_weights(tmp_path):
    folder = str(tmp_path / "saved")
    run(_saved, SITES * SHARDS, folder)
    for sites, shards in ((2, 1), (4, 1), (1, 4), (1, 2)):
        found = run(_moved, sites * shards, folder, sites, shards)
        assert all(equal for equal, *_ in found)
        assert all((apart == 0) == (sites != SITES) for _, apart, _ in found)  # as many sites have their own weights
        assert len({str(ended) for *_, ended in found}) == 1


class Expert(Net):
    """With an expert that some sites use."""

    def __init__(self, seed=1):
        super().__init__(seed)
        self.expert, self.used = torch.nn.Linear(16, 16), True

    def forward(self, x):
        x = torch.tanh(self.first(x))
        x = x + self.expert(x).tanh() if self.used else x
        return self.last(self.second(x)) * self.scale


def _with_expert(on, seed=1, kind=torch.optim.AdamW, used=True, frozen=False, more=False, **options):
    net = Expert(seed).double()
    fully_shard(net.expert, mesh=on["shard"])
    net.used = used
    net.expert.requires_grad_(not frozen)
    options = {"sync_every": 3, "codec": "int8", "start_compression_step": 0} | options
    net, optimizer, sync = attached(on, net, optimizer=lambda net: kind(net.parameters(), lr=0.01), **options)
    if more:
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    return net, optimizer, sync


def _steps(net, optimizer, rank, first, last):
    for step in range(first, last):
        step_of(net, optimizer, rank, step)


def _resumed(rank, size, folder):
    """What differs from uninterrupted runs, by how the expert was used: never, at one site, and after a warm-up."""
    on, found = mesh(), {}
    for name, used, warm in (("never", False, False), ("one site", place()[0] == 0, False), ("warm", True, True)):
        net, optimizer, sync = _with_expert(on, used=used)
        _steps(net, optimizer, rank, 0, 4)
        sync.save(f"{folder}/{name}")
        _steps(net, optimizer, rank, 4, 8)
        wanted, had = _weights(net), len(optimizer.state)
        sync.close()
        net, optimizer, sync = _with_expert(on, 9, used=used)
        if warm:
            cases.loss_of(net, rank, 0, WIDTH, torch.float64).backward()
        sync.load(f"{folder}/{name}")
        optimizer.zero_grad()
        _steps(net, optimizer, rank, 4, 8)
        found[name] = torch.equal(wanted, _weights(net)), len(optimizer.state) == had
        sync.close()
    return found


@pytest.mark.slow
def test_states_of_parameters_that_nobody_or_one_site_has_used_and_after_a_warm_up(tmp_path):
    for found in run(_resumed, SITES * SHARDS, str(tmp_path)):
        assert set(found.values()) == {(True, True)}, found


def _saved_at_once(rank, size, folder):
    """Whether saving before the first step changes nothing, and what was saved then can be loaded."""
    on, found = mesh(), []
    for saves, loads in ((False, False), (True, False), (False, True)):
        net, optimizer, sync = _with_expert(on)
        if saves:
            sync.save(folder)
            assert not optimizer.state
        if loads:
            sync.load(folder)
        _steps(net, optimizer, rank, 0, 4)
        found.append(_weights(net))
        sync.close()
    return [torch.equal(found[0], one) for one in found]


def test_saving_before_the_first_step_changes_nothing(tmp_path):
    assert run(_saved_at_once, SITES * SHARDS, str(tmp_path)) == [[True] * 3] * 4


def _at_their_own_pace(rank, size, folder):
    on, found = mesh(), []
    options = {"sync_every": 3, "codec": "int8", "pace": "own"}
    net, optimizer, sync = attached(on, **options)
    sync.steps(9)
    _steps(net, optimizer, rank, 0, 3)
    sync.save(folder)
    found.append(_weights(net))
    sync.close()
    net, optimizer, sync = attached(on, **options)
    sync.load(folder)
    found.append(_weights(net))
    assert next(sync.steps(9)) == 3
    sync.close()
    return torch.equal(*found)


def test_sites_at_their_own_pace_go_on_from_a_checkpoint(tmp_path):
    assert run(_at_their_own_pace, SITES * SHARDS, str(tmp_path)) == [True] * 4


def _unfit(rank, size, folder):
    """What ranks say of a checkpoint that does not fit on all of them, or on the last; whether nothing has changed."""
    on, found = mesh(), []
    net, optimizer, sync = _with_expert(on)
    _steps(net, optimizer, rank, 0, 4)
    sync.save(folder)
    sync.close()
    others = {
        "optimizer": lambda: _with_expert(on, 9, kind=torch.optim.SGD),
        "groups on one rank": lambda: _with_expert(on, 9, more=rank == size - 1),
        "model": lambda: attached(on, sync_every=3, codec="int8", start_compression_step=0),
    }
    for name, make in others.items():
        net, optimizer, sync = make()
        _steps(net, optimizer, rank, 0, 2)
        before = _weights(net)
        said = cases.said(lambda: sync.load(folder))  # noqa: B023
        found.append((name, said, torch.equal(before, _weights(net))))
        _steps(net, optimizer, rank, 2, 7)  # all are still together
        sync.close()
    return found


@pytest.mark.slow
def test_what_does_not_fit_is_refused_on_all_ranks_and_changes_nothing(tmp_path):
    words = {
        "optimizer": "was saved from another optimizer, which had no dampening",
        "groups on one rank": "does not fit: rank 3: ",
        "model": "was saved from another model or optimizer: they differ in site",
    }
    ranks = run(_unfit, SITES * SHARDS, str(tmp_path))
    for found in ranks:
        for name, said, same in found:
            assert said.startswith("ValueError: "), said
            assert words[name] in said
            assert same


def _frozen_since(rank, size, folder):
    on = mesh()
    net, optimizer, sync = _with_expert(on)
    _steps(net, optimizer, rank, 0, 4)
    sync.save(folder)
    moments = len(optimizer.state)
    sync.close()
    net, optimizer, sync = _with_expert(on, 9, frozen=True)
    lines = cases.logged()
    sync.load(folder)
    kept = len(optimizer.state) == moments
    sync.close()
    return [line for line in lines if "left out" in line], kept


def test_what_was_trained_when_saved_and_is_frozen_now_is_named(tmp_path):
    for lines, kept in run(_frozen_since, SITES * SHARDS, str(tmp_path)):
        (line,) = lines
        assert "expert.bias, expert.weight: frozen now" in line
        assert kept
