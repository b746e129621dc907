"""Sites under torchft: processes that share a model by FSDP2, which write down each round; and who kills them."""

import json
import os
import time
from datetime import timedelta

from torchft_cases import TIMEOUT, UnderLighthouse, digest, ended, projected

from spawned import fork, free_port

SHARDS = 2
WIDTH = 12


def _model():
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 31), nn.Tanh(), nn.Linear(31, 16), nn.Tanh(), nn.Linear(16, 4))


def rank_of_site(site, rank, shards, port, lighthouse, folder, options, dies, patience):
    """One rank's life, until the file ``end`` names the last round.

    ``dies``: where it is gone, in the "step" that ends a round, at its "quorum" or its "vote"; and after which round.
    """
    os.environ.setdefault("RUST_LOG", "error")
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torchft import Manager, ProcessGroupGloo

    from thinwire.adapters.torchft import attach
    from thinwire.core.program.bucket import local_shard

    torch.set_num_threads(1)
    os.dup2(os.open(f"{folder}/{site}{rank}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    log = open(f"{folder}/{site}{rank}.jsonl", "a", buffering=1)  # noqa: SIM115
    limit = timedelta(seconds=TIMEOUT)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("site", store), rank=rank, world_size=shards)
    mesh = init_device_mesh("cpu", (shards,), mesh_dim_names=("shard",))
    model = _model()
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit), load_state_dict=None, state_dict=None, min_replica_size=1,
        use_async_quorum=False, timeout=limit, quorum_timeout=timedelta(seconds=patience), rank=rank, world_size=shards,
        store_addr="127.0.0.1", store_port=port, lighthouse_addr=lighthouse, replica_id=f"site{site}",
        hostname="127.0.0.1",
    )  # fmt: skip
    start, ask, rounds = manager.start_quorum, manager.should_commit, []

    def may_die(where):
        if dies is not None and dies[0] == where and manager.current_step() >= dies[1]:
            os._exit(9)

    def asked():
        may_die("vote")
        return ask()

    def held():
        return {name: local_shard(p).detach() for name, p in model.named_parameters()}

    def started():
        may_die("quorum")
        start()
        rounds[:] = [{"brought": projected(held()), "owed": projected(sync.residuals())}]

    def made(*_, loss=None):
        if not rounds:
            return
        note = {"pid": os.getpid(), "round": manager.current_step(), "size": sync.stats().world_size, "loss": loss}
        note |= {**rounds.pop(), "outer": projected(held()), "owes": projected(sync.residuals())}
        note |= {"weights": digest(held().values()), "adam": [float(x["step"]) for x in optimizer.state.values()]}
        log.write(json.dumps(note) + "\n")
        torch.save([x.clone() for x in held().values()], f"{folder}/{site}{rank}.pt")

    manager.start_quorum, manager.should_commit = started, asked
    model.register_forward_pre_hook(made, prepend=True)  # after attach's own: the first forward makes a round
    sync = attach(model, optimizer, manager=manager, **options)
    torch.manual_seed(10 * site + rank)
    steps = 0
    while not ended(folder, manager.current_step()):
        x = torch.randn(16, WIDTH)
        loss = (model(x) - torch.tanh(x[:, :4])).square().mean()
        loss.backward()
        steps += 1
        if steps % options["sync_every"] == 0:
            may_die("step")
        optimizer.step()
        optimizer.zero_grad()
        made(loss=loss.item())
        time.sleep(0.01)
    log.close()
    os._exit(0)  # torchft's threads take their time


class Sites(UnderLighthouse):
    """Sites of which some are killed."""

    def __init__(self, folder, count, options, patience=60):
        super().__init__(folder)
        self._options, self._patience = options, patience
        for site in range(count):
            self.start(site)

    def start(self, site, dies=None, shards=SHARDS):
        """``dies``: where and after which round the site's last rank ends itself."""
        port, rest = free_port(), (str(self.folder), self._options)
        for rank in range(shards):
            args = (site, rank, shards, port, self.address, *rest, dies if rank else None, self._patience)
            self.running[site, rank] = fork.Process(target=rank_of_site, args=args, daemon=True)
            self.running[site, rank].start()

    def events(self, site, rank, *, of_all=False):
        try:
            lines = (self.folder / f"{site}{rank}.jsonl").read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [e for e in found if of_all or e["pid"] == self.running[site, rank].pid]

    def round_of(self, site):
        return min(self.events(site, rank)[-1]["round"] if self.events(site, rank) else 0 for rank in range(SHARDS))

    def wait(self, done, seconds=90.0):
        deadline = time.monotonic() + seconds
        while not done():
            at = [(who, p.exitcode, self.said(*who)) for who, p in self.running.items()]
            assert time.monotonic() < deadline, f"hang: {at}"
            time.sleep(0.05)

    def said(self, site, rank):
        path = self.folder / f"{site}{rank}.err"
        return path.read_text()[-2000:] if path.exists() else ""

    def kill(self, site):
        for rank in range(SHARDS):
            self.running[site, rank].kill()
        for rank in range(SHARDS):
            self.running[site, rank].join()

    def finish(self, round_):
        self.end_at(round_)
        for (site, rank), process in self.running.items():
            process.join(90)
            assert process.exitcode == 0, f"rank {rank} of site {site}: {process.exitcode}: {self.said(site, rank)}"
