"""The pages of methods and systems have one shape, every page is in the contents, and no page grows long."""

import contextlib
import re
from pathlib import Path

import loss_curves
import pytest
import torch
from conf import CONTENTS

import thinwire as tw
from fences import blocks
from thinwire.core.methods.registry import METHODS, class_of, public
from thinwire.engine.local.settings import PRESETS

DOCS = Path(__file__).parents[3] / "docs"
SYSTEMS = {  # the paper's name for it, and the most words that the page may have
    "large_batch": ("PTO", 650),
    "data": ("DataCache", 750),
    "kfac": ("SPD-KFAC", 1100),
    "parameter_server": ("InHAD", 2200),
    "federated": ("FedML Parrot", 1500),
    "split": ("SFT", 1500),
    "supernet": ("EASNet", 900),
}
HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
WIDTH = 88


def pages():
    """Every page that is built."""
    return [p for p in sorted(DOCS.rglob("*.md")) if "_build" not in p.relative_to(DOCS).parts]


def without_code(text):
    return re.sub(r"^(`{3,}).*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)


def families():
    """The page of each family of methods, by the names of its sections."""
    pages = sorted((DOCS / "methods").glob("*.md"))
    return {name: page for page in pages for name in HEADING.findall(without_code(page.read_text()))}


def section(name):
    return families()[name].read_text().partition(f"\n## {name}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("name", [*METHODS, *PRESETS])
def test_methods(name):
    text = section(name)
    said = re.findall(r"^\*\*(.+?)\*\*", text, re.MULTILINE)
    assert "When it pays." in said
    paper = re.search(r"^\*\*Papers?\.\*\* (.*?)\n\n", text, re.MULTILINE | re.DOTALL)
    assert "](https://" in paper[1]
    (differences,) = (words for words in said if words.startswith("Differences from "))
    assert text.partition(f"**{differences}**\n\n")[2].startswith("* ")
    assert "sends" in text
    assert "bytes" in text


@pytest.mark.parametrize("name", [*METHODS, *PRESETS])
def test_the_line_that_attaches_a_method_runs(name):
    (code,) = (block.code for block in blocks(section(name)) if "attach(" in block.code)
    assert f'"{name}"' in code
    model = torch.nn.Linear(64, 32)
    names = {"tw": tw, "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    exec(code, names)
    with contextlib.closing(names["sync"]) as sync:
        model(torch.randn(2, 64)).sum().backward()
        names["optimizer"].step()
        lossy = name in METHODS and not class_of(name).exact
        assert (f"{name} runs as ssgd" in sync.stats().note) == lossy


@pytest.mark.parametrize("page", sorted({families()[name] for name in METHODS}), ids=lambda page: page.stem)
def test_a_family_counts_the_bytes_of_its_methods(page):
    shown = "".join(block.code for block in blocks(page.read_text()) if block.above == "<!-- tested -->")
    here = [name for name, found in families().items() if found == page and name in METHODS]
    classes = {name: cls for cls, name in public().items()}
    counted = [name for name in here if f"tw.{classes[name]}(" in shown]
    assert counted == [name for name in here if name != "dear"]  # the bytes of ssgd


@pytest.mark.parametrize("name", SYSTEMS)
def test_systems(name):
    """Who needs it, something to copy, when it pays, and at the end how it differs from its paper."""
    text, (paper, most) = (DOCS / f"{name}.md").read_text(), SYSTEMS[name]
    title, _, first = text.split("\n", 2)
    assert title.endswith(f"({paper})")
    assert first.startswith("This page is for ")
    found = HEADING.findall(without_code(text))
    assert found.count("When it pays") == 1
    assert re.fullmatch(r"Differences from the papers?", found[-1])
    assert "](papers.md#" in text[text.index(f"## {found[-1]}") :], "no link to what was reproduced"
    before = re.split(r"^```.*$", text, maxsplit=1, flags=re.MULTILINE)[0]
    assert len(before.splitlines()) < 30, "the first thing to copy comes late"
    words = [
        word for word in re.sub("<!--.*?-->", "", text, flags=re.DOTALL).split() if re.search(r"[A-Za-z0-9]", word)
    ]
    assert len(words) <= most, f"{len(words)} words, of at most {most}"


@pytest.mark.parametrize("page", [DOCS.parent / "README.md", *pages()], ids=lambda page: page.name)
def test_code_is_not_cut_on_a_screen_of_1280_pixels(page):
    shown = [block for block in blocks(page.read_text()) if not block.language.startswith("{")]
    wide = [line for block in shown for line in block.code.splitlines() if len(line) > WIDTH]
    assert not wide, f"{page.name}: break these lines, and put remarks above them"


def test_every_page_is_in_the_contents_once():
    listed = [
        page.parent / link
        for page in (DOCS / "index.md", DOCS / "methods" / "index.md")
        for _, links in CONTENTS.findall(page.read_text())
        for link in re.findall(r"\]\((.+?)\)", links)
    ]
    assert len(listed) == len(set(listed))
    left_out = set(pages()) - set(listed) - {DOCS / "index.md"}
    assert not left_out, f"list at the end of an index: {', '.join(map(str, sorted(left_out)))}"


def test_the_contents_have_captions():
    found = CONTENTS.findall((DOCS / "index.md").read_text())
    assert [caption for caption, _ in found] == ["Tutorials", "How to", "Systems", "Reference", "Explanation"]


def test_the_pictures_show_what_their_scripts_draw():
    assert "exposed" in (DOCS / "images" / "step.svg").read_text()
    for name, drawn in loss_curves.drawings().items():
        picture = (loss_curves.FOLDER / f"{name}.svg").read_text()
        assert all(f">{words}<" in picture for words in (drawn.title, *drawn.names())), name
        assert f"images/curves/{name}.svg" in (DOCS / "methods" / f"{name}.md").read_text()


ROOT = Path(__file__).parents[3]
NAMES = (
    "S-SGD", "WFBP", "MG-WFBP", "mixed precision + LARS", "DeAR", "ACP-SGD", "OMGS-SGD", "LAGS-SGD", "MSTopK",
    "HiTopKComm", "PTO", "SPD-KFAC", "InHAD", "FedML Parrot", "SFT", "EASNet",
)  # fmt: skip


def rows():
    """Names, address of the paper, and addresses of the pages of each row."""
    table = (
        (ROOT / "README.md").read_text().partition("## Methods and systems by their papers")[2].partition("\n## ")[0]
    )
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == 4 and "](" in cells[1]:
            yield re.split(r", | \(|\)", cells[0]), re.findall(r"\((http[^)]+)\)", cells[1]), cells[2]


def test_the_table_has_every_name_once():
    names = [name for found, _, _ in rows() for name in found if name]
    assert sorted(names) == sorted(NAMES)


@pytest.mark.parametrize(("names", "paper", "pages"), rows(), ids=lambda value: value[0] if value else "")
def test_the_page_knows_the_name_and_the_paper(names, paper, pages):
    texts = [(ROOT / page).read_text() for page in re.findall(r"\]\(([^)#]+)[^)]*\)", pages)]
    assert texts
    for name in filter(None, names):
        assert any(name in text for text in texts), name
    assert all(any(address in text for text in texts) for address in paper)


def test_the_differences_can_be_found_by_name():
    text = (ROOT / "docs" / "differences.md").read_text()
    assert [name for name in NAMES if name not in text] == []
