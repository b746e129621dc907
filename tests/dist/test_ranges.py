"""Ranges in a trace of torch.profiler, on two ranks; and a step log of the same run."""

import json
from collections import Counter

import cases
import pytest
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

import thinwire as tw
from spawned import run
from thinwire.tools.report.inputs import read_files
from thinwire.tools.report.log import read_log

pytestmark = pytest.mark.dist


def _profiled(rank, size, folder, method, options):
    net = cases.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sync = tw.attach(net, optimizer, method, fusion="none", **options)
    log = tw.StepLog(sync, f"{folder}/{method}-{{rank}}.jsonl")
    config = _ExperimentalConfig(profile_all_threads=True)
    for step in range(3):
        if step == 1:
            with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiler:
                cases.loss_of(net, rank, step).backward()
            profiler.export_chrome_trace(f"{folder}/{method}-{rank}.json")
        else:
            cases.loss_of(net, rank, step).backward()
        log.write()
        optimizer.zero_grad()
    log.close()
    kinds, total, buckets = sync.stats().collectives, sync.stats().bytes_sent, len(sync.plan.phases[0])
    sync.close()
    return kinds, total, buckets


def _both(rank, size, folder):
    return [
        _profiled(rank, size, folder, *case)
        for case in (("ssgd", {}), ("topk", {"density": 0.1, "start_compression_step": 0}))
    ]


def test_a_profiler_sees_each_bucket_and_the_log_counts_its_bytes(tmp_path):
    for rank, found in enumerate(run(_both, 2, str(tmp_path))):
        for method, (kinds, total, buckets) in zip(("ssgd", "topk"), found):
            path = tmp_path / f"{method}-{rank}.json"
            names = Counter(
                event["name"]
                for event in json.loads(path.read_text())["traceEvents"]
                if event.get("ph") == "X" and event["name"].startswith("thinwire::")
            )
            exchanges = {name: count for name, count in names.items() if "segment" not in name}
            assert sum(exchanges.values()) * 3 == sum(kinds.values()), names
            assert {name.split("::")[1] for name in exchanges} == set(kinds)
            assert {int(name.split("::")[2]) for name in names} == set(range(buckets))
            (trace,) = read_files([path]).traces
            assert not trace.predicted
            assert {event.lane for event in trace.events} == {"method", "link world"}
            assert trace.exposed is None
            steps = read_log(tmp_path / f"{method}-{rank}.jsonl")
            assert [one["step"] for one in steps] == [1, 2, 3]
            assert sum(one["bytes_sent"] for one in steps) == total
