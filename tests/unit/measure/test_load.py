import os

import pytest

from thinwire.predict.measure.machine import Load, LoadSample


def machine(root, average, stolen, ticks, throttled, periods, group="sys/fs/cgroup/cpu.stat"):
    files = {
        "proc/loadavg": f"{average} 0.50 0.40 3/200 4711\n",
        "proc/stat": f"cpu  {ticks - stolen} 0 0 0 0 0 0 {stolen} 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n",
        group: f"usage_usec 5\nnr_periods {periods}\nnr_throttled {throttled}\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize("group", ["sys/fs/cgroup/cpu.stat", "sys/fs/cgroup/cpu/cpu.stat"])
def test_what_happened_meanwhile_is_the_difference(tmp_path, group):
    machine(tmp_path, 0.3, 100, 1000, 7, 50, group)
    watch = LoadSample(tmp_path)
    machine(tmp_path, 2.5, 130, 2000, 9, 90, group)
    assert watch.load() == Load(os.cpu_count(), 0.3, 2.5, 0.03, 2, 40)


def test_without_a_control_group_nobody_was_held_back_and_elsewhere_nothing_is_known(tmp_path):
    assert LoadSample(tmp_path).load() is None
    machine(tmp_path, 0.3, 0, 1000, 0, 0)
    (tmp_path / "sys/fs/cgroup/cpu.stat").unlink()
    assert LoadSample(tmp_path).load() == Load(os.cpu_count(), 0.3, 0.3, 0.0, 0, 0)


CALM = {"cores": 4, "before": 0.5, "after": 4.2, "stolen": 0.001, "throttled": 1, "periods": 100}


@pytest.mark.parametrize(
    ("change", "own", "said"),
    [
        ({}, 4, ""),
        ({"before": 3.5}, 4, "load average 3.5 on 4 cores before the start"),
        ({"after": 9.0}, 4, "load average 9.0 on 4 cores at the end, 4 of it our own"),
        ({"stolen": 0.08}, 4, "8% of the CPU's time went to other guests of its host"),
        ({"throttled": 30}, 4, "held back by its control group in 30 of 100 periods"),
        ({"cores": 1, "before": 2.0}, 1, "load average 2.0 on 1 core before the start"),
    ],
)
def test_one_line_says_why_figures_are_not_to_be_trusted(change, own, said):
    found = Load(**{**CALM, **change}).sentence(own)
    assert said in found
    assert found.startswith("this machine is overloaded: ") if said else found == ""
    assert "\n" not in found
