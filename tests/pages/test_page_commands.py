"""Every command that a page shows runs, in the page's order and one folder, and something is asserted of its result.

A new command on a page is a new row here. Short forms, which `make test` runs, are in the tests of each verb.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import fences
from fences import blocks
from thinwire.systems.papers import NAMES
from thinwire.systems.papers.paper import paper

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ran:
    """A command that has ended with 0."""

    out: str
    folder: Path

    def json(self, name: str = "") -> dict:
        """What it printed, or a file that it wrote."""
        return json.loads((self.folder / name).read_text() if name else self.out)

    def number(self, pattern: str, number: int = 0) -> float:
        """The first group, of one of the places that match."""
        found = re.findall(pattern, self.out)
        assert len(found) > number, f"nothing like {pattern} in:\n{self.out}"
        return float(found[number].replace(",", ""))

    def has(self, *words: str) -> None:
        """Words in what it printed, wherever its lines were cut."""
        flat = " ".join(self.out.split())
        for word in words:
            assert word in flat, f"no {word!r} in:\n{self.out}"


@dataclass(frozen=True)
class Shown:
    """A command as a page shows it: a check of its result, and what runs here if that is something shorter."""

    check: Callable[[Ran], None]
    instead: str = ""


def python_of(page: str) -> list[str]:
    """The Python of a page that other tests run."""
    return [block.code for block in blocks((ROOT / page).read_text()) if block.above == "<!-- tested -->"]


def own_model() -> str:
    """The page's recipe of `mymodule:build`."""
    return next(code for code in python_of(BENCH) if "def build()" in code)


def commands(page: str) -> list[str]:
    return [line for block in blocks((ROOT / page).read_text()) for line in fences.commands(block) if line[:3] != "cd "]


def sends(least: float, most: float) -> Callable[[Ran], None]:
    """The quickstart's line: so many MB leave in all."""

    def check(ran: Ran) -> None:
        assert least <= ran.number(r"([\d.]+) MB sent") <= most

    return check


def rows(*names: str) -> Callable[[Ran], None]:
    """A bench's JSON: each row has trained, and sent fewer bytes than DDP unless it is exact."""

    def check(ran: Ran) -> None:
        found = {row["label"].split(" (")[0]: row for row in ran.json()["rows"]}
        assert list(found) == ["compute", *names]
        for name, row in found.items():
            if name != "compute":
                assert 0 < row["loss"] < 5.4, row  # 5.54 at the first step: the logarithm of 256 bytes
            if name.startswith(("powersgd", "local")):
                assert row["bytes_per_step"] < 0.3 * found["ddp"]["bytes_per_step"]

    return check


def wrote(*names: str, words: str = "") -> Callable[[Ran], None]:
    def check(ran: Ran) -> None:
        ran.has(*filter(None, [words]))
        for name in names:
            assert (ran.folder / name).stat().st_size > 0, name

    return check


def said(*words: str) -> Callable[[Ran], None]:
    return lambda ran: ran.has(*words)


def _script(ran: Ran) -> None:
    """Local steps, of which a busy machine chooses other periods: each averaged in 8 bits would be a quarter."""
    assert 0 < ran.number(r"sent (\d+) bytes") < 0.3 * ran.number(r"S-SGD (\d+)\.")


def _falls(ran: Ran) -> None:
    assert ran.number(r"loss [\d.]+ at first, ([\d.]+) at the end") < 0.7 * ran.number(r"loss ([\d.]+) at first")


def _supernet_trained(ran: Ran) -> None:
    found = ran.json("run/report.json")
    assert all(corner["epe"] < 0.6 * found["constant_guess_epe"] for corner in found["corners"].values())


def _supernet_found(ran: Ran) -> None:
    found = ran.json("run/best.json")
    assert found["epe"] < 1.0
    assert found["measured_ms"] <= found["limit_ms"]
    wrote("run/pareto.png", "run/calibrated.pt")(ran)


def _went_on(ran: Ran) -> None:
    """From about the logarithm of 256 bytes, although a node is slow and another dies."""
    assert ran.number(r"held-out loss 5\.5\d+ -> ([\d.]+)") < 3.5
    wrote("run.png")(ran)


def _raced(ran: Ran) -> None:
    found = ran.json("thinwire-out/race.json")
    assert {row["label"] for row in found["bench"]["rows"]} > {"ddp", "ssgd", "alone"}
    assert found["rows"] or found["race"]["winner"] is None  # on a busy machine three minutes time steps alone


def _probed(ran: Ran) -> None:
    assert {group for (_, group, _), _ in ran.json("costs.json")["exchanges"]} == {"world"}


SMALL = "chargpt:layers=2:width=64:heads=2"
SCRIPT = "torchrun --standalone --nproc-per-node 2 train.py"
PROBE = "torchrun --nnodes 4 --nproc-per-node 1 ... --no-python thinwire probe"
PROFILE = "thinwire profile mymodule:build --out profile.json"
PAGES: dict[str, dict[str, Shown]] = {
    "README.md": {
        "thinwire lab run --workers 4 --link 200mbit -- python train.py": Shown(_script),
        "torchrun --nnodes 4 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 train.py": Shown(
            _script, SCRIPT
        ),
        "thinwire plan resnet50 --link 1gbit --workers 4": Shown(said("use local: 4 workers reach the loss")),
    },
    "docs/commands.md": {
        "thinwire lab run --workers 4 --link 200mbit -- python train.py": Shown(_script),
        "thinwire lab run --workers 4 --slow 2:2,3:2 -- python train.py": Shown(_script),
        "thinwire lab run --workers 2 --link 100mbit --delay 25ms --jitter 2ms --loss 0.1% --congestion bbr "
        "-- python train.py": Shown(  # BBR is not in every kernel
            _script,
            instead="thinwire lab run --workers 2 --link 100mbit --delay 25ms --jitter 2ms --loss 0.1% "
            "-- python train.py",
        ),
        "thinwire bench --model chargpt:layers=4:width=144:heads=4 --workers 2 --link 50mbit "
        "--methods ddp,ddp-best,ssgd,powersgd:rank=4": Shown(
            rows("ddp", "ddp-best", "ssgd", "powersgd rank=4"),
            f"thinwire bench --model {SMALL} --workers 2 --link 50mbit --steps 4 --rounds 1 "
            "--methods ddp,ddp-best,ssgd,powersgd:rank=4 --json",
        ),
        "thinwire bench --methods ddp,ssgd,mymodule:by_hand": Shown(
            rows("ddp", "ssgd", "mymodule:by_hand"),
            f"thinwire bench --model {SMALL} --steps 4 --rounds 1 --methods ddp,ssgd,mymodule:by_hand --json",
        ),
        PROBE: Shown(_probed, "torchrun --standalone --nproc-per-node 2 --no-python thinwire probe"),
        "thinwire probe --workers 2 --link 100mbit": Shown(_probed),
        "thinwire profile mymodule:build --workers 2": Shown(wrote("profile.json")),
        "thinwire bench --workers 2 --link 50mbit --json > bench.json": Shown(
            wrote("bench.json"),
            f"thinwire bench --model {SMALL} --steps 4 --rounds 1 --workers 2 --link 50mbit --json > bench.json",
        ),
        "thinwire demo": Shown(wrote("thinwire-out/demo.json"), "thinwire demo --quick --steps 6"),
        "thinwire report bench.json thinwire-out/demo.json --out report.html": Shown(
            wrote("report.html", words="report.html")
        ),
        "thinwire doctor": Shown(said("torch", "Gloo")),
        "thinwire doctor --json": Shown(lambda ran: ran.json()["torch"]),
    },
    "docs/gpu.md": {
        "thinwire race chargpt:layers=8:width=320:heads=8 --link 1gbit --device cuda": Shown(
            wrote("thinwire-out/race.json"),
            instead="thinwire race mlp:width=64:layers=1 --link 1mbit --device cpu --minutes 3",
        ),
        "thinwire lab run --workers 2 --link 1gbit -- python train.py": Shown(_falls),
    },
    "docs/kfac.md": {
        "thinwire kfac calibrate --out costs.json": Shown(wrote("costs.json")),
    },
    "docs/methods/index.md": {
        "thinwire plan resnet50 --link 1gbit --workers 16 --methods ssgd,powersgd:rank=4": Shown(
            said("powersgd:rank=4")
        ),
    },
    "docs/papers.md": {
        "thinwire reproduce": Shown(said("ACP-SGD", "holds", "claims.json"), "thinwire reproduce acp lags"),
        "thinwire reproduce acp dear": Shown(said("bandwidth alone"), "thinwire reproduce acp dear --simulated"),
        "thinwire reproduce --simulated": Shown(said("not judged", *(paper(name).system for name in NAMES))),
        **{
            f"thinwire reproduce {name}{' --full' * (name == 'sft')}": Shown(
                said(paper(name).link), f"thinwire reproduce {name} --simulated"
            )
            for name in NAMES
        },
    },
    "docs/parameter_server.md": {
        "thinwire ps run --nodes 4 --slow 3:4 --kill 1:25 --link 200mbit --seconds 60 --plot run.png": Shown(_went_on),
        "thinwire ps simulate --settings inhad:max_staleness=4 --nodes 16 --workers 4 --slow 0:4 --link 1gbit": Shown(
            said("inhad:max_staleness=4", "22.24")
        ),
        "thinwire ps replay run.jsonl": Shown(
            said("20 updates, weights"),
            "thinwire ps run --nodes 2 --updates 20 --model mlp:width=64:layers=2 --journal run.jsonl"
            " && thinwire ps replay run.jsonl",
        ),
    },
    "docs/plan.md": {
        "thinwire plan resnet50 --link 10gbit --workers 16": Shown(said("worth: times as soon at a loss", "exposed")),
        PROBE: Shown(_probed, "torchrun --standalone --nproc-per-node 2 --no-python thinwire probe"),
        "thinwire profile chargpt": Shown(wrote("profile.json")),
        "thinwire plan profile.json --costs costs.json": Shown(said("measured")),
        "thinwire plan profile.json --link 10gbit --workers 16": Shown(said("worth: times as soon at a loss")),
        "thinwire plan resnet50 --link 10gbit --speeds 1,1,0.5,0.5": Shown(
            said("use local pace=own sync_every=2 ", "the 2 slow machines add 27 %")
        ),
    },
    "docs/quickstart.md": {
        "thinwire plan resnet50 --link 1gbit --workers 4": Shown(said("use local: 4 workers reach the loss")),
        "thinwire lab run --workers 2 --link 100mbit -- python train.py ssgd": Shown(sends(504, 510)),
        "thinwire lab run --workers 2 --link 100mbit -- python train.py local": Shown(sends(5, 100)),
    },
    "docs/race.md": {
        "thinwire race mymodule:build --link 100mbit --workers 2 --minutes 3": Shown(
            _raced,  # fewer methods, so that a busy machine trains them too
            "thinwire race mymodule:build --link 100mbit --workers 2 --minutes 3 --methods alone,ssgd,local",
        ),
        "thinwire plan mymodule:build --link 1gbit --workers 8 --worth thinwire-out/race.json": Shown(
            said("your race")
        ),
        "thinwire report thinwire-out/race.json": Shown(wrote("report.html")),
    },
    "docs/script.md": {
        "thinwire lab run --workers 2 --link 100mbit -- python train.py": Shown(_script),
        "torchrun --standalone --nproc-per-node 2 train.py": Shown(_script, SCRIPT),
        "torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 train.py": Shown(
            _script, SCRIPT
        ),
    },
    "docs/split.md": {
        "thinwire split plan --model bert:layers=2:hidden=128:heads=4 --task stdlib --cut 1 --rank 8 --link 10mbit "
        "--out halves": Shown(wrote("halves/edge.safetensors", words="771 steps in 3 epochs")),
        "thinwire split compare --model bert:layers=2:hidden=128:heads=4 "
        '--plans "boundary lowrank lowrank:int8,pack" --seeds 3 --plot split.png': Shown(
            wrote("split.png", words="lowrank:int8,pack"),
            "thinwire split compare --model bert:layers=2:hidden=128:heads=4 "
            '--plans "boundary lowrank lowrank:int8,pack" --seeds 1 --plot split.png',
        ),
    },
    "docs/supernet.md": {
        "thinwire supernet train --out run --data dots": Shown(_supernet_trained),
        "thinwire supernet search run/net.pt": Shown(_supernet_found),
        "thinwire supernet export run/calibrated.pt --sub-net run/best.json --out best.pt2": Shown(
            said("differs by at most 0 px")
        ),
        "thinwire lab run --workers 2 --link 100mbit -- "
        "thinwire supernet train --out run --config published --epoch 1000 --data pairs.txt": Shown(
            wrote("two/net.pt"),
            "thinwire lab run --workers 2 --link 100mbit -- thinwire supernet train --out two --steps 4,4",
        ),
    },
    "docs/two_sites.md": {
        "thinwire plan gpt2 --workers 2 --link 100mbit --delay 25ms --loss 0.1%": Shown(said("local is faster here")),
    },
    "docs/troubleshooting.md": {
        PROFILE: Shown(wrote("profile.json")),
        "thinwire plan profile.json --link 1gbit --workers 4": Shown(said("worth: times as soon at a loss")),
    },
    "docs/working.md": {
        "thinwire lab run --workers 2 --link 100mbit -- python train.py": Shown(_script),
        "thinwire plan profile.json --link 1gbit --workers 4 --trace predicted.json": Shown(wrote("predicted.json")),
    },
}
ELSEWHERE = """
# tests/net/test_demo.py::test_what_it_says_is_what_it_measured
make demo
# .ci/run::make lint test
make test
# tests/net/test_race_on_a_link.py::test_what_sends_little_is_first_on_a_thin_link
thinwire race mymodule:build --link 100mbit --workers 4
# tests/dist/test_restart.py::test_a_killed_job_goes_on_bit_for_bit
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 2 --max-restarts 1 train.py
# tests/dist/test_adapter_torchft.py::test_the_commands_of_the_page
TORCHFT_LIGHTHOUSE=http://localhost:29510 python train.py 0
TORCHFT_LIGHTHOUSE=http://localhost:29510 python train.py 1
# tests/packaging/test_wheel.py::test_the_wheel_works_in_a_clean_environment
pip install 'thinwire[data]'
pip install 'thinwire[papers]'
pip install .
pip install torch --index-url https://download.pytorch.org/whl/cpu
pip install 'thinwire[split]'
# tests/unit/cli/test_doctor_verb.py::test_only_what_prevents_training_changes_the_exit_code
thinwire doctor --nodes 2
# tests/net/test_doctor_gloo.py::test_gloo_listens_where_doctor_says
GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0 torchrun --nnodes 2 ...
# tests/unit/federated/test_fed_page.py::test_the_pages_figures
thinwire federated run digits
thinwire federated run digits --algorithm fedavg,fedopt,scaffold --plot curves.png
thinwire federated run digits --per-client
thinwire federated run digits --compress topk:density=0.1 --checkpoint-dir run1
thinwire federated run digits:clients=10 --clients-per-round 5 --algorithm
    fedavg,fedavg:noise_multiplier=1:max_grad_norm=1:epochs=1
# tests/unit/federated/test_fed_new.py::test_every_command_of_its_readme
thinwire federated new mine
# tests/unit/federated/test_fed_page.py::test_on_ranks
torchrun --nproc-per-node 4 --no-python thinwire federated run digits --checkpoint-dir run2
# tests/unit/federated/test_fed_page.py::test_predict
thinwire federated predict --clients-per-round 100 --fast 4 --slow 4
# tests/dist/test_federated_flower.py::test_a_real_deployment_with_tls_gives_the_bits_of_the_simulation
thinwire federated run digits_clients:build --out simulated.safetensors
thinwire federated serve digits_clients:build --nodes 2 --local --out deployed
# tests/dist/test_sites_example.py::test_the_pages_training_and_its_continuation
torchrun --nproc-per-node 4 train.py
# tests/dist/test_sites_example.py::test_the_pages_count_of_memory
thinwire plan llama:model:size=7b --memory --shards 8 --dtype bf16
    --methods local:sync_every=32:codec=int2:fragments=8:anchors=cpu
# tests/dist/test_gpu_report.py::test_methods_are_right_on_ranks
make gpu
# tests/dist/test_gpu_report.py::test_all_measurements_run_small_without_a_card
python benchmarks/gpu/all.py --seconds 420
# tests/unit/cli/test_kfac_tune_verb.py::test_the_pages_tuning
thinwire kfac tune --plot tune.png
# tests/unit/cli/test_kfac_tune_verb.py::test_the_pages_plan
thinwire kfac plan resnet50 --workers 16 --link 10gbit
# tests/net/test_kfac_example.py::test_the_pages_example
thinwire lab run --workers 4 --link 100mbit -- python examples/kfac/train.py --plot kfac.png
# tests/unit/test_lab_faults.py::test_the_command_of_the_page
thinwire lab run --workers 3 --kill 2:1s --restart 500ms --stop 1:2s:300ms -- python train.py
# tests/dist/test_launchers.py::test_by_torchrun
torchrun --standalone --nproc-per-node 2 examples/launchers/train.py local
torchrun --nnodes 4 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 examples/launchers/train.py
    local
# tests/net/test_two_sites.py::test_the_page_ends_in_a_training_that_runs_although_the_wire_is_cut
thinwire keys new keys --names a,b
THINWIRE_KEYS=keys/a torchrun --nnodes 2 --node-rank 0 --master-addr A --master-port 29500
    examples/launchers/train.py local
# tests/net/test_two_sites.py::test_the_probe_says_what_kind_of_wire_it_is
torchrun --nnodes 2 --node-rank 0 --master-addr A --master-port 29500 --no-python thinwire probe
# tests/net/test_two_sites.py::test_the_lab_trains_over_the_same_wire
thinwire lab run --workers 2 --link 100mbit --delay 25ms --loss 0.1% -- python examples/launchers/train.py local
# tests/dist/test_launchers.py::test_by_ray_train
pip install 'ray[train]'
python examples/launchers/train.py local
# tests/dist/test_parameter_server_intra_node.py::test_ranks_on_their_own_are_workers_of_one_node
torchrun --nnodes 1 --nproc-per-node 2 train.py
# tests/unit/cli/test_keys_verb.py::test_the_commands_of_the_pages_do_what_they_say
thinwire keys new keys --names server,a,b --host 10.0.0.1
thinwire keys new keys --names shard0,shard1
thinwire keys new keys --names c
thinwire keys show keys
thinwire keys new keys --names cloud,edge --host cloud.example.org
# tests/dist/test_parameter_server_tls.py::test_by_the_command_line_each_in_its_own_process
thinwire ps server --model chargpt --settings asp --nodes 2 --updates 1000 --checkpoint-dir ckpt --host 10.0.0.1
    --keys keys/server --journal run.jsonl
thinwire ps node --server 10.0.0.1:29400 --model chargpt --node 0 --workers 2 --keys keys/a
thinwire ps shard 10.0.0.1:29400 --index 0 --checkpoint-dir slice --host 10.0.0.2 --keys keys/shard0
# tests/dist/test_parameter_server_tls.py::test_local_steps_by_the_command_line_and_from_a_loop_of_ones_own
thinwire ps server --model mymodel:make --settings local:quorum=2:codec=int2 --updates 1000 --checkpoint-dir ckpt
    --host 10.0.0.1 --keys keys/server
# tests/dist/test_split_processes.py::test_two_processes_are_one
thinwire split cloud halves --keys keys/cloud --listen 0.0.0.0:7443
thinwire split edge halves --keys keys/edge --cloud cloud.example.org:7443
# tests/unit/report/test_watch.py::test_the_page_follows_a_file_that_comes_and_grows
thinwire watch steps.jsonl
"""
"""Commands that other tests run: below the file and the name of each."""
BENCH, SCRIPTS = "docs/commands.md", "docs/script.md"
FILES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"train.py": lambda: python_of(SCRIPTS)[-1]},
    "docs/commands.md": {
        "mymodule.py": lambda: "\n".join(code for code in python_of(BENCH) if "\ndef " in code),
        "train.py": lambda: python_of(SCRIPTS)[-1],
    },
    "docs/gpu.md": {
        "train.py": lambda: next(b.code for b in blocks((ROOT / "docs/gpu.md").read_text()) if "attach" in b.code)
    },
    "docs/quickstart.md": {"train.py": lambda: python_of("docs/quickstart.md")[0]},
    "docs/race.md": {"mymodule.py": lambda: python_of("docs/race.md")[0]},
    "docs/script.md": {"train.py": lambda: python_of(SCRIPTS)[-1]},
    "docs/troubleshooting.md": {"mymodule.py": own_model},
    "docs/working.md": {"train.py": lambda: python_of(SCRIPTS)[-1]},
}
BEFORE = {"docs/working.md": "thinwire profile mlp:width=64 --out profile.json"}
"""Files that a page's commands need: blocks of pages, and what another page has made."""


def pages() -> list[str]:
    found = ["README.md", *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").rglob("*.md")))]
    return [page for page in found if commands(page)]


@pytest.mark.docs
def test_every_command_is_run_here_or_elsewhere():
    told = ELSEWHERE.replace("\n    ", " ").strip().splitlines()
    elsewhere = {line for line in told if line[0] != "#"}
    for page in pages():
        left = set(commands(page)) - set(PAGES.get(page, {}))
        assert left <= elsewhere, f"{page}: {left - elsewhere}"
        assert set(PAGES.get(page, {})) <= set(commands(page)), page
    assert elsewhere <= {command for page in pages() for command in commands(page)}
    assert set(PAGES) <= set(pages())
    for test in set(told) - elsewhere:
        file, name = test.removeprefix("# ").split("::")
        assert name in (ROOT / file).read_text()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", PAGES)
def test_commands_do_what_the_page_says(page, tmp_path):
    for name, text in FILES.get(page, {}).items():
        (tmp_path / name).write_text(text())
    environment = {name: v for name, v in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}", "COLUMNS": "80", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    todo = [(line, PAGES[page][line]) for line in dict.fromkeys(commands(page)) if line in PAGES[page]]
    if page in BEFORE:
        todo.insert(0, (BEFORE[page], Shown(said())))
    for line, shown in todo:
        done = subprocess.run(
            shown.instead or line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True,
            executable="/bin/bash", check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
        shown.check(Ran(done.stdout, tmp_path))
