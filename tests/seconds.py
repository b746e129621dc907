"""What tests take: wall and processor seconds of each, of its ranks and servers too, for ``benchmarks/size.py``."""

import contextlib
import json
import os
import time
from collections import Counter
from pathlib import Path

import pytest

TICK = os.sysconf("SC_CLK_TCK")


def processor(pid="self"):
    """Return the processor seconds of a process and of all that it has started, as far as they are its descendants."""
    ticks, children = 0, set()
    for list_of_thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread or a process that ends meanwhile
            children.update(list_of_thread.read_text().split())
    with contextlib.suppress(OSError):
        ticks = sum(int(field) for field in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:15])
    return ticks / TICK + sum(map(processor, children))


class Seconds:
    """Writes ``.pytest_cache/seconds.json`` after a run of more than 1,000 tests."""

    def __init__(self):
        self.began, self.tests, self.folders, self.each = time.monotonic(), 0, Counter(), {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        began = time.monotonic(), processor()
        item.user_properties.append(("seconds", began))  # a list that the report of the teardown takes along
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if call.when == "teardown":
            wall, used = next(value for name, value in item.user_properties if name == "seconds")
            report.user_properties = [("seconds", (time.monotonic() - wall, processor() - used))]
        return report

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown":
            wall, used = dict(report.user_properties)["seconds"]
            self.tests += 1
            folder = report.nodeid.partition("::")[0].split("/")[: 3 if "/unit/" in report.nodeid else 2]
            self.folders["/".join(folder)] += used
            self.each[report.nodeid] = round(wall, 2), round(used, 2)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        if hasattr(session.config, "workerinput") or self.tests < 1000:
            return
        longest = dict(sorted(self.each.items(), key=lambda one: -max(one[1]))[:80])
        took = {"tests": self.tests, "wall": time.monotonic() - self.began, "processor": processor()}
        took |= {"folders": dict(self.folders.most_common()), "longest": longest}
        (session.config.rootpath / ".pytest_cache").mkdir(exist_ok=True)
        (session.config.rootpath / ".pytest_cache" / "seconds.json").write_text(json.dumps(took))
