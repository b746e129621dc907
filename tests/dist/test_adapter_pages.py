"""Runs what pages show on so many real ranks: blocks under ``<!-- tested on N ranks -->``."""

import contextlib
import io
import os
import re
import types
from pathlib import Path

import pytest
import torch

from spawned import run

pytestmark = pytest.mark.dist

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^<!-- tested on (\d+) ranks -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DIFF = re.compile(r"^<!-- both sides run on two ranks -->\n```diff\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _blocks(page):
    return [(int(found[1]), found[2]) for found in BLOCK.finditer(page.read_text())]


def _run(rank, size, page, code, folder):
    """All blocks of a page in one module, on every rank."""
    import torch.distributed as dist

    os.chdir(folder)
    try:
        module = types.ModuleType(f"blocks_of_{Path(page).stem}")
        for block in code:
            exec(compile(block, page, "exec"), module.__dict__)
    finally:
        os.chdir("/")
        if dist.is_initialized():
            dist.destroy_process_group()
    if losses := getattr(module, "losses", None):
        assert losses[-1] < 0.7 * losses[0]
    return sorted(name for name in vars(module) if not name.startswith("_"))


SLOW = [pytest.param(page, marks=pytest.mark.slow) for page in ("frameworks", "larger_than_a_card", "checkpoints")]


@pytest.mark.parametrize("name", [*SLOW, "gpu"])
def test_blocks_run_on_ranks(name, tmp_path):
    page = DOCS / f"{name}.md"
    blocks = _blocks(page)
    assert len(blocks) == page.read_text().count("<!-- tested on ")
    for size in {size for size, _ in blocks}:
        code = [block for ranks, block in blocks if ranks == size]
        fresh = "fully_shard" in code[0]  # DTensor remembers meshes beyond the life of a process group
        for names in run(_run, size, str(page), code, str(tmp_path), init=False, fresh=fresh):
            assert "tw" in names


def _as_script(rank, size, code, folder, environment):
    """Run it as torchrun would, in a rank that is there already. Returns what it printed."""
    import torch.distributed as dist

    os.environ.update(environment)
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(code, "train.py", "exec"), {"__name__": "__main__"})
    finally:
        os.chdir("/")
        for name in environment:
            del os.environ[name]
        if dist.is_initialized():
            dist.destroy_process_group()
    return out.getvalue()


@pytest.mark.parametrize("name", ["script", "frameworks"])
def test_both_sides_of_a_diff_train(name, tmp_path):
    (diff,) = DIFF.findall((DOCS / f"{name}.md").read_text())
    lines = diff.splitlines(keepends=True)
    losses, found = [], []
    for side in "-+":
        code = "".join(line[1:] or line for line in lines if line[0] in (" ", side, "\n"))
        said = run(_as_script, 2, code, str(tmp_path), {}, init=False)[0]
        losses.append(float(re.search(r"^loss ([\d.]+)$", said, re.MULTILINE)[1]))
        found.append([*torch.load(tmp_path / "model.pt")] if name == "script" else "powersgd" in said)
    assert max(losses) < 1.2  # 2.3 at first: the logarithm of 10
    assert found == ([found[0]] * 2 if name == "script" else [False, True])


def test_the_whole_script_has_readmes_two_lines_and_runs_on_two_ranks(tmp_path):
    page = (DOCS / "script.md").read_text()
    script = re.findall(r"^<!-- tested -->\n```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[-1]
    (lines,) = re.findall(r"```python\n(import thinwire.*?)```", (DOCS.parent / "README.md").read_text(), re.DOTALL)
    imported, *_, attached = lines.splitlines()
    assert {imported, attached} <= set(script.splitlines())
    said = run(_as_script, 2, script, str(tmp_path), {}, init=False)[0]
    sent, exact = map(int, re.search(r"^local: sent (\d+) bytes, S-SGD (\d+)\.$", said, re.MULTILINE).groups())
    assert 0 < sent < exact


@pytest.mark.slow
def test_fabric_takes_attach_to_the_bare_model_or_the_hook(tmp_path):
    pytest.importorskip("lightning")
    page = (DOCS / "frameworks.md").read_text()
    (block,) = re.findall(r"<!-- tested under Fabric -->\n```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    code = block + "print(f'steps {sync.stats().steps} {hook[0].stats().steps}', flush=True)\n"
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "GROUP_WORLD_SIZE": "1"}
    for said in run(_as_script, 2, code, str(tmp_path), torchrun, init=False):
        assert "steps 4 1" in said
