"""A run is followed from the file that it writes: pictures of step logs and journals, and the page that shows them."""

import http.client
import json
import shutil
import subprocess
import threading

import pytest
from test_step_log import Counter, train

from thinwire.tools.report.inputs import read_files
from thinwire.tools.report.runs import RunPicture

pytest.importorskip("plotly")

from thinwire.tools.report.watch import WatchPage


@pytest.fixture
def watch():
    opened = []

    def start(*paths):
        page = WatchPage(paths)
        thread = threading.Thread(target=page.serve_forever)
        thread.start()
        opened.append((page, thread))
        return page

    yield start
    for page, thread in opened:
        page.shutdown()
        page.server_close()
        thread.join()


def ask(page, path, host=None):
    connection = http.client.HTTPConnection("127.0.0.1", page.server_port)
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


def state(page):
    return json.loads(ask(page, "/state")[1])


def picture_of(path):
    (run,) = read_files([path]).of(RunPicture)
    return run.picture


def test_the_picture_of_a_step_log(tmp_path):
    path = tmp_path / "steps.jsonl"
    train(Counter(), path, 3)
    train(Counter(start=2), path, 2)  # started again from a checkpoint after step 2
    with path.open("a") as file:
        file.write('{"kind": "step", "st')  # is being written
    picture = picture_of(path)
    assert picture.title == "acp, 4 workers, step 4"
    loss, seconds, sent = picture.panels
    assert loss.lines[0].y == pytest.approx((1.0, 0.5, 1 / 3, 0.25))
    assert list(loss.lines[0].x) == sorted(loss.lines[0].x)
    assert [mark.text for mark in loss.marks] == ["started again at step 2"]
    assert seconds.lines[1].y == (0.25,) * 4
    assert [line.y for line in sent.lines] == [(1e-4,) * 4, (4e-4,) * 4]


def test_a_log_without_a_step_yet_and_a_long_one(tmp_path):
    path = tmp_path / "steps.jsonl"
    train(Counter(), path, 0)
    assert picture_of(path).title == "acp, 4 workers, no step yet"
    train(Counter(), path, 2500)
    (loss, *_) = picture_of(path).panels
    assert len(loss.lines[0].y) <= 1000
    assert loss.lines[0].y[-1] == pytest.approx(1 / 2500)


def test_the_picture_of_a_journal(tmp_path):
    path = tmp_path / "run.jsonl"
    lines = [{"settings": {}, "facts": {}}]
    lines += [{"version": v, "at": 0.5 * v, "parts": [[v % 2, 0, 1.0, 1.0, [[v - v % 2, 0, v, 8]]]]} for v in range(5)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given, age = picture_of(path).panels
    assert [(line.name, line.x, line.y) for line in given.lines] == [
        ("node 0", (0.0, 1.0, 2.0), (1.0, 2.0, 3.0)), ("node 1", (0.5, 1.5), (1.0, 2.0)),
    ]  # fmt: skip
    assert [line.y for line in age.lines] == [(0.0, 0.0, 0.0), (1.0, 1.0)]


def test_the_page_follows_a_file_that_comes_and_grows(watch, tmp_path):
    path = tmp_path / "steps.jsonl"
    page = watch(path)
    assert state(page) == {"lines": [f"waiting for {path}"], "pictures": []}
    sync = Counter()
    train(sync, path, 2)
    (picture,) = state(page)["pictures"]
    assert picture["title"] == "acp, 4 workers, step 2"
    train(sync, path, 1)
    assert [picture["title"] for picture in state(page)["pictures"]] == ["acp, 4 workers, step 3"]
    status, html = ask(page, "/")
    assert (status, b"thinwire watch" in html) == (200, True)
    assert len(ask(page, "/plotly.js")[1]) > 1e6


def test_what_cannot_be_drawn_is_said_and_the_page_goes_on(watch, tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text("[1]")
    page = watch(path)
    assert "contains nothing that a report can show" in state(page)["lines"][0]
    path.unlink()
    train(Counter(), path, 1)
    assert len(state(page)["pictures"]) == 1


def test_nobody_else_is_answered(watch, tmp_path):
    page = watch(tmp_path / "steps.jsonl")
    assert page.server_address[0] == "127.0.0.1"
    assert ask(page, "/state", "elsewhere.example:80")[0] == 403  # a name that leads here: DNS rebinding
    assert ask(page, "/../../etc/passwd")[0] == 404


@pytest.mark.slow
def test_a_browser_draws_it(watch, tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium here")
    path = tmp_path / "steps.jsonl"
    train(Counter(), path, 5)
    done = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=5000", "--dump-dom", watch(path).address,
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "<h2>acp, 4 workers, step 5</h2>" in done.stdout
    assert done.stdout.count('class="scatterlayer') == 3  # a panel each
    assert "seconds per step" in done.stdout
