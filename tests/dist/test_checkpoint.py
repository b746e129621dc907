"""Checkpoints: bit for bit at the same size, the mean of residuals at another, whole or not there."""

import contextlib
import os
import pathlib
import resource
import signal
import subprocess
import sys

import cases
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import thinwire as tw
from spawned import run
from thinwire.systems.kfac import KFAC

pytestmark = pytest.mark.dist


def _build(name, options, **attach):
    net = cases.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    return net, optimizer, tw.attach(net, optimizer, name, **options, **attach)


def _killed_while_saving(rank, size, folder):
    net, optimizer, sync = _build("topk", {"density": 0.1})
    cases.walk(net, optimizer, rank, 0, 2)
    tw.checkpoint.save(folder, net, optimizer, sync, 2)
    cases.walk(net, optimizer, rank, 2, 4)
    if rank == 0:
        write = tw.engine.state.checkpoint.write_file

        def die(path, content):
            write(path, content)
            if path.name == "model.pt":
                os.kill(os.getpid(), signal.SIGKILL)

        tw.engine.state.checkpoint.write_file = die
    try:
        tw.checkpoint.save(folder, net, optimizer, sync, 4)
    except (RuntimeError, OSError):
        return "lost its peer"
    return "saved"


def _after_the_kill(rank, size, folder):
    net, optimizer, sync = _build("topk", {"density": 0.1})
    step = tw.checkpoint.load(folder, net, optimizer, sync)
    sync.close()
    return step


def test_a_kill_in_the_middle_of_saving_loses_nothing(tmp_path):
    import thinwire.engine.state.checkpoint  # noqa: F401

    results = run(_killed_while_saving, 2, str(tmp_path), expect_exit={0: -signal.SIGKILL})
    assert results[1] == "lost its peer"
    assert run(_after_the_kill, 2, str(tmp_path)) == [2, 2]


def _wrong(rank, size, folder):
    messages = []
    net, optimizer, sync = _build("acp", {"rank": 2})
    cases.walk(net, optimizer, rank, 0, 2)
    mine = sync.state_dict()
    if rank == 1:
        mine = {k.replace("residual/1/", "residual/0/"): v for k, v in mine.items()}
    sync.close()
    net, optimizer, sync = _build("acp", {"rank": 2})
    if rank == 1:
        with pytest.raises(ValueError, match=r"checkpoint\.save") as error:
            sync.load_state_dict(mine)
        messages.append(str(error.value))
    with pytest.raises(ValueError, match="topk"):
        sync.load_state_dict({**mine, "method": "topk"})
    with pytest.raises(FileNotFoundError):
        tw.checkpoint.load(folder, net, optimizer, sync, step=7)
    assert tw.checkpoint.load(folder, net, optimizer, sync) is None
    sync.close()
    return messages


def test_states_that_do_not_fit_are_refused(tmp_path):
    run(_wrong, 2, str(tmp_path))


def _until_the_kill(rank, size, folder):
    """Save every three steps; rank 2 dies in the middle of step 7."""
    net, optimizer, sync = _build("acp", {"rank": 2}, timeout=15)
    try:
        for step in range(20):
            if step == 7 and rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            cases.walk(net, optimizer, rank, step, step + 1)
            if step % 3 == 2:
                tw.checkpoint.save(folder, net, optimizer, sync, step + 1)
    except RuntimeError as error:
        return str(error)
    return "finished"


def _to_the_end(rank, size, folder):
    net, optimizer, sync = _build("acp", {"rank": 2})
    step = tw.checkpoint.load(folder, net, optimizer, sync) or 0
    cases.walk(net, optimizer, rank, step, 12)
    return step, cases.weights(net), dict(sync.services.state.residuals)


def test_a_restart_after_a_kill_goes_on_bit_for_bit(tmp_path):
    killed = run(_until_the_kill, 3, str(tmp_path / "killed"), expect_exit={2: -signal.SIGKILL})
    assert all("step 7" in message for message in killed[:2])
    again = run(_to_the_end, 3, str(tmp_path / "killed"))
    through = run(_to_the_end, 3, str(tmp_path / "none"))
    for (step, weights, residuals), (zero, wanted, owed) in zip(again, through):
        assert (step, zero) == (6, 0)
        assert all(torch.equal(a, b) for a, b in zip(weights, wanted))
        assert residuals.keys() == owed.keys()
        assert all(torch.equal(residuals[n], owed[n]) for n in owed)


EVERY_METHOD = [
    ("ssgd", {}),
    ("ssgd", {"decoupled": True}),
    ("dear", {}),
    ("cast", {}),
    ("cast", {"dtype": torch.int8}),
    ("cast", {"decoupled": True}),
    ("signsgd", {}),
    ("onebit", {}),
    ("qsgd", {}),
    ("terngrad", {}),
    ("topk", {"density": 0.1}),
    ("gtopk", {"density": 0.1}),
    ("oktopk", {"density": 0.1}),
    ("dgc", {"density": 0.1}),
    ("powersgd", {"rank": 2}),
    ("acp", {"rank": 2}),
    ("acp", {"rank": 2, "decoupled": True}),
    ("acp", {"rank": 2, "collective": "auto"}),
    ("hitopk", {"density": 0.1}),
    ("omgs", {"density": 0.1}),
    ("lags", {"max_ratio": 10.0}),
    ("auto", {}),
]


def _begin(folder, index):
    name, options = EVERY_METHOD[index]
    net = cases.model()
    momentum = 0.0 if name == "dgc" else 0.9  # dgc has its own
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=momentum)
    nodes = tw.Topology(dist.get_world_size()) if name == "hitopk" else None  # it compresses between nodes
    sync = tw.attach(net, optimizer, name, topology=nodes, **options)
    step = tw.checkpoint.load(f"{folder}/{index}", net, optimizer, sync) or 0
    return net, optimizer, sync, step


def _owed(net, sync):
    """What a rank owes, in whole tensors."""
    shapes = {name: p.shape for name, p in net.named_parameters()}
    return {
        name: sync.services.state.extended(name, shapes[name]).reshape(shapes[name]).double()
        for name in sync.services.state.residuals
    }


def _every_method(rank, size, folder, steps):
    """Load what is there, go on for some steps, save. Returns for each method: the step, what was owed, the weights."""
    found = []
    for index in range(len(EVERY_METHOD)):
        net, optimizer, sync, step = _begin(folder, index)
        loaded, weights = _owed(net, sync), cases.weights(net)
        cases.walk(net, optimizer, rank, step, step + steps)
        sync.synchronize()
        tw.checkpoint.save(f"{folder}/{index}", net, optimizer, sync, step + steps)
        found.append((step, loaded, weights, _owed(net, sync), cases.weights(net)))
        sync.close()
    return found


@pytest.mark.slow
def test_every_method_goes_from_two_ranks_to_one_and_back(tmp_path):
    from thinwire.core.methods.registry import METHODS as registered

    assert {name for name, _ in EVERY_METHOD} == {*registered, "auto"}
    two, one, again = (run(_every_method, size, str(tmp_path), 3, seconds=300) for size in (2, 1, 2))
    owing = set()
    for (name, options), *before, alone, after, _ in zip(EVERY_METHOD, *two, *one, *again):
        which = f"{name} {options}"
        assert (alone[0], after[0]) == (3, 6), which
        assert not any(torch.equal(a, b) for a, b in zip(alone[2], alone[4])), which  # one rank has trained
        assert all(torch.equal(a, b) for a, b in zip(alone[4], after[2])), which
        mean = {n: sum(rank[3].get(n, torch.zeros(())) for rank in before) / 2 for n in {*before[0][3], *before[1][3]}}
        for name_, x in mean.items():
            if x.any():
                owing.add(name)
                torch.testing.assert_close(after[1][name_], x, rtol=1e-6, atol=1e-7, msg=which)
            else:
                assert not after[1].get(name_, x).any(), which
        assert {n for n, x in after[1].items() if x.any()} == {n for n, x in mean.items() if x.any()}, which
    assert {"acp", "topk", "signsgd", "powersgd", "hitopk", "dgc"} <= owing


def test_one_rank_and_then_two(tmp_path):
    one, two = (run(_every_method, size, str(tmp_path), 2, seconds=300) for size in (1, 2))
    for (name, options), alone, *ranks in zip(EVERY_METHOD, *one, *two):
        for rank in ranks:
            assert rank[0] == 2, (name, options)
            assert all(torch.equal(a, b) for a, b in zip(alone[4], rank[2])), (name, options)
            assert not any(x.any() for x in rank[1].values()), (name, options)


def _full(rank, size, folder, who):
    """Save; then with a limit on the size of a file for one rank; then without it again."""
    net, optimizer, sync = _build("topk", {"density": 0.1})
    cases.walk(net, optimizer, rank, 0, 2)
    tw.checkpoint.save(folder, net, optimizer, sync, 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    said = []
    for step in (3, 4):
        cases.walk(net, optimizer, rank, step - 1, step)
        if rank == who:
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
        try:
            tw.checkpoint.save(folder, net, optimizer, sync, step)
        except OSError as error:
            said.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    sync.services.agree(False)  # rank 0 has cleared up
    left = sorted(os.listdir(folder))
    sync.services.agree(False)  # all have looked
    cases.walk(net, optimizer, rank, 4, 5)
    tw.checkpoint.save(folder, net, optimizer, sync, 5)
    weights = cases.weights(net)
    sync.close()
    net, optimizer, sync = _build("topk", {"density": 0.1})
    step = tw.checkpoint.load(folder, net, optimizer, sync)
    sync.close()
    return said, left, step, all(torch.equal(a, b) for a, b in zip(weights, cases.weights(net)))


@pytest.mark.parametrize("who, file", [(0, "rank-00000.pt"), (1, "rank-00001.pt")])
def test_a_rank_that_cannot_write_is_named_by_all_and_training_goes_on(tmp_path, who, file):
    """EFBIG comes the way that ENOSPC comes, and needs no full disk."""
    for said, left, step, same in run(_full, 2, str(tmp_path), who):
        assert said == [
            f"no checkpoint was written at {tmp_path}/step-{step:09d}: "
            f"rank {who}: File too large: {tmp_path}/.partial-step-{step:09d}/{file}"
            for step in (3, 4)
        ]
        assert left == [".lock", "step-000000002"]
        assert (step, same) == (5, True)


FULL_DISK = """
import os, sys, torch, thinwire as tw
folder = sys.argv[1]
net = torch.nn.Linear(300, 300)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
sync = tw.attach(net, optimizer)
tw.checkpoint.save(folder, net, optimizer, sync, 1)
with open(f"{folder}/others", "wb") as file:
    file.write(bytes(400_000))
for step in (2, 3):
    try:
        tw.checkpoint.save(folder, net, optimizer, sync, step)
    except OSError as error:
        print(error)
print(sorted(os.listdir(folder)))
os.remove(f"{folder}/others")
print(tw.checkpoint.save(folder, net, optimizer, sync, 4))
print(tw.checkpoint.load(folder, net, optimizer, sync))
"""


def test_a_full_disk_is_said_and_keeps_nothing_of_the_checkpoint(tmp_path):
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=1m tmpfs {tmp_path}"
    try:
        tried = subprocess.run([*inside, mount], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("a small disk needs unshare (util-linux)")
    if tried.returncode:
        pytest.skip(f"a small disk needs a mount namespace, which is not to be had here: {tried.stderr.strip()}")
    script = [*inside, f'{mount} && exec "$@"', "sh", sys.executable, "-c", FULL_DISK, str(tmp_path)]
    said = subprocess.run(script, capture_output=True, text=True, check=True).stdout.splitlines()
    for step, line in zip((2, 3), said):
        assert line.startswith(f"no checkpoint was written at {tmp_path}/step-{step:09d}: rank 0: No space left on ")
    assert said[2:] == ["['.lock', 'others', 'step-000000001']", f"{tmp_path}/step-000000004", "4"]


def _killed_between_the_renames(rank, size, folder):
    net, optimizer, sync = _build("topk", {"density": 0.1})
    cases.walk(net, optimizer, rank, 0, 2)
    tw.checkpoint.save(folder, net, optimizer, sync, 2)
    torch.save(cases.weights(net), f"{folder}/weights")
    cases.walk(net, optimizer, rank, 2, 4)
    rename = pathlib.Path.rename

    def die(self, target):
        if self.name.startswith(".partial"):
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, target)

    pathlib.Path.rename = die
    tw.checkpoint.save(folder, net, optimizer, sync, 2)


def test_a_kill_while_one_step_replaces_another_loses_neither_name(tmp_path):
    run(_killed_between_the_renames, 1, str(tmp_path), expect_exit={0: -signal.SIGKILL})
    assert not (tmp_path / "step-000000002").exists()
    net, optimizer, sync = _build("topk", {"density": 0.1})
    assert tw.checkpoint.load(tmp_path, net, optimizer, sync) == 2
    assert tw.checkpoint.load(tmp_path, net, optimizer, sync, step=2) == 2
    assert all(torch.equal(a, b) for a, b in zip(cases.weights(net), torch.load(tmp_path / "weights")))
    tw.checkpoint.save(tmp_path, net, optimizer, sync, 2)
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-000000002", "weights"]
    sync.close()


def _after_damage(rank, size, folder):
    """What each rank loads, and says, where a file of one rank is damaged; then where all are."""
    found = []
    for _ in range(2):
        net, optimizer, sync = _build("acp", {"rank": 2})
        before = cases.weights(net)
        try:
            step = tw.checkpoint.load(folder, net, optimizer, sync)
            cases.walk(net, optimizer, rank, step, step + 1)
            found.append((step, cases.weights(net)))
        except ValueError as error:
            found.append((str(error), all(torch.equal(a, b) for a, b in zip(before, cases.weights(net)))))
        sync.close()
        if rank == 0:
            (pathlib.Path(folder) / "step-000000003" / "model.pt").write_bytes(b"")
        dist.barrier()
    return found


def _three_and_six(rank, size, folder):
    net, optimizer, sync = _build("acp", {"rank": 2})
    for step in (3, 6):
        cases.walk(net, optimizer, rank, step - 3, step)
        tw.checkpoint.save(folder, net, optimizer, sync, step)
    sync.close()


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_go_back_to_one_step_where_one_finds_its_file_damaged(tmp_path, size):
    run(_three_and_six, 2, str(tmp_path))
    file = tmp_path / "step-000000006" / "rank-00001.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    ranks = run(_after_damage, size, str(tmp_path))
    for (step, weights), (said, untouched) in ranks:
        assert step == 3
        assert all(torch.equal(a, b) for a, b in zip(weights, ranks[0][0][1]))
        assert f"rank 1: {file} is not as it was saved: its checksum differs" in said
        assert "step-000000003/model.pt is not as it was saved" in said
        assert untouched


def _does_not_fit_on_one(rank, size, folder):
    net, optimizer, sync = _build("topk", {"density": 0.1})
    cases.walk(net, optimizer, rank, 0, 1)
    tw.checkpoint.save(folder, net, optimizer, sync, 1)
    sync.close()
    net, optimizer, sync = _build("topk", {"density": 0.1})
    if rank == 1:
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    before = cases.weights(net)
    with pytest.raises(ValueError, match="step-000000001 does not fit"):
        tw.checkpoint.load(folder, net, optimizer, sync)
    assert all(torch.equal(a, b) for a, b in zip(before, cases.weights(net)))
    assert not optimizer.state_dict()["state"]
    cases.walk(net, optimizer, rank, 0, 1)
    sync.close()


def test_what_does_not_fit_on_one_rank_is_taken_over_by_none(tmp_path):
    run(_does_not_fit_on_one, 2, str(tmp_path))


class Experts(torch.nn.Module):
    """A body for all, and of each rank an expert and statistics of its own; the last rank has one expert more."""

    def __init__(self, rank, size, rows):
        super().__init__()
        torch.manual_seed(rank)
        self.body, self.norm, self.mine = torch.nn.Linear(8, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, rows)
        self.more = torch.nn.Linear(6, 2) if rank == size - 1 else None

    def forward(self, x):
        x = self.norm(self.body(x)).tanh()
        more = 0.0 if self.more is None else self.more(x).square().mean()
        return self.mine(x).square().mean() + more


def _private(rank, size, method, rows=4, wrapped=False, **attach):
    net = Experts(rank, size, rows)
    if wrapped:  # a state dict then has other names than the model
        net.mine = checkpoint_wrapper(net.mine)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    own = [name for name, _ in net.named_parameters() if name.startswith(("mine", "more"))]
    return net, optimizer, tw.attach(net, optimizer, method, **{"ignore": own, "broadcast_buffers": False} | attach)


def _own_walk(net, optimizer, rank, first, last):
    for step in range(first, last):
        cases.down(net(cases.batch(rank, step, 8)[0]), optimizer)


def _keeps_its_own(rank, size, folder):
    found = []
    for method, *form in (("ssgd", 4), ("powersgd", 4), ("ssgd", 4 + rank), ("cast", 4, True)):
        net, optimizer, sync = _private(rank, size, method, *form)
        _own_walk(net, optimizer, rank, 0, 3)
        tw.checkpoint.save(f"{folder}/{method}", net, optimizer, sync, 3)
        _own_walk(net, optimizer, rank, 3, 6)
        wanted = list(net.state_dict().values())
        sync.close()
        net, optimizer, sync = _private(rank, size, method, *form)
        assert tw.checkpoint.load(f"{folder}/{method}", net, optimizer, sync) == 3
        _own_walk(net, optimizer, rank, 3, 6)
        found.append(all(torch.equal(a, b) for a, b in zip(wanted, net.state_dict().values(), strict=True)))
        sync.close()
    return found


def _on_another_number(rank, size, folder, method):
    net, optimizer, sync = _private(rank, size, method)
    before = [x.clone() for x in net.state_dict().values()]
    said = cases.said(lambda: tw.checkpoint.load(folder, net, optimizer, sync))
    same = all(torch.equal(a, b) for a, b in zip(before, net.state_dict().values(), strict=True))
    sync.close()
    return said, same and not optimizer.state


def test_what_each_rank_keeps_to_itself_is_its_own_again(tmp_path):
    assert run(_keeps_its_own, 2, str(tmp_path)) == [[True] * 4] * 2
    for said, same in run(_on_another_number, 3, str(tmp_path / "powersgd"), "powersgd"):
        assert "has of each of 2 ranks its own mine.bias, mine.weight, more.bias: load it on as many ranks" in said
        assert same


def _equal_after_all(rank, size, folder, method):
    """Buffers that nobody sends but that are equal, which any number of ranks can have; experts of local steps."""
    net = torch.nn.Sequential(cases.model(), torch.nn.Linear(5, 5))
    net.register_buffer("mask", torch.ones(3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    own = {"ignore": ["1.weight"]} if method == "local" else {"broadcast_buffers": False}
    sync = tw.attach(net, optimizer, method, **own)
    if size == 2:
        cases.walk(net, optimizer, rank, 0, 2)
        tw.checkpoint.save(folder, net, optimizer, sync, 2)
    said = cases.said(lambda: tw.checkpoint.load(folder, net, optimizer, sync))
    sync.close()
    return said


@pytest.mark.parametrize("method", ["ssgd", "local"])
def test_only_what_differs_is_in_the_way_of_another_number_of_ranks(tmp_path, method):
    assert run(_equal_after_all, 2, str(tmp_path), method) == ["", ""]
    for said in run(_equal_after_all, 3, str(tmp_path), method):
        assert ("has of each of 2 ranks its own 1.weight" in said) if method == "local" else not said


IN_MODES = [
    ("local", {"sync_every": 2, "fragments": 2, "fragment_sync_delay": 1, "codec": "int8"}),
    ("topk", {"density": 0.2, "look": 0.5}),
    ("signsgd", {}),
    ("ssgd", {"kfac": True}),
]


@contextlib.contextmanager
def _modes():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def _in_modes(rank, size, folder, inside):
    """Weights of runs whose handles, states and checkpoints are made inside of modes, and which train outside."""
    modes, found = _modes if inside else contextlib.nullcontext, []
    for number, (method, given) in enumerate(IN_MODES):
        options, at = dict(given), f"{folder}/{number}"
        kfac = options.pop("kfac", False)
        for first in (0, 4):
            net = cases.model(width=6)
            optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
            with modes():
                sync = tw.attach(net, optimizer, method, **options)
                if kfac:
                    KFAC(net, sync)
                if first:
                    assert tw.checkpoint.load(at, net, optimizer, sync) == first
            for step in range(first, 7):
                cases.down(cases.loss_of(net, rank, step, 6), optimizer)
                if step in (2, 3) and not first:
                    with modes():
                        sync.load_state_dict(sync.state_dict())
                        tw.checkpoint.save(at, net, optimizer, sync, step + 1)
            found += cases.weights(net)
            sync.close()
    return found


@pytest.mark.slow
def test_what_lives_on_is_made_outside_of_the_users_modes(tmp_path):
    wanted, found = (run(_in_modes, 2, str(tmp_path / str(inside)), inside) for inside in (False, True))
    for some, others in zip(wanted, found):
        assert all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def _refused(rank, size, folder):
    net, optimizer, sync = _build("topk", {"density": 0.1})
    said = []
    for _ in range(2):
        cases.walk(net, optimizer, rank, 0, 1)
        with pytest.raises(OSError, match="no checkpoint was written at") as error:
            tw.checkpoint.save(folder, net, optimizer, sync, 7)
        said.append(str(error.value))
    sync.close()
    return said


def test_a_second_job_is_refused_on_all_ranks(tmp_path):
    net, optimizer, sync = _build("topk", {"density": 0.1})
    tw.checkpoint.save(tmp_path, net, optimizer, sync, 1)
    for said in run(_refused, 2, str(tmp_path)):
        for sentence in said:
            assert f"rank 0: another job writes checkpoints in {tmp_path} (process {os.getpid()} on " in sentence
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-000000001"]
    sync.close()
