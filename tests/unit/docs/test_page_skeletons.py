"""The pages of methods and systems have one shape, every page is in the contents, and no page grows long."""

import re
from pathlib import Path

import pytest

from fences import blocks
from thinwire.core.methods.registry import METHODS

DOCS = Path(__file__).parents[3] / "docs"
SYSTEMS = {  # the paper's name for it, and the most words that the page may have
    "large_batch": ("PTO", 650),
    "data": ("DataCache", 750),
    "kfac": ("SPD-KFAC", 1100),
    "parameter_server": ("InHAD", 1800),
    "federated": ("FedML Parrot", 1500),
    "split": ("SFT", 1500),
    "supernet": ("EASNet", 900),
}
HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WIDTH = 88
FRAGMENTS = ("_build", "when", "winners")


def pages():
    """Every page that is built."""
    return [p for p in sorted(DOCS.rglob("*.md")) if not set(p.relative_to(DOCS).parts) & set(FRAGMENTS)]


def without_code(text):
    return re.sub(r"^(`{3,}).*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", METHODS)
def test_methods(name):
    page, index = (DOCS / "methods" / f"{name}.md").read_text(), (DOCS / "methods" / "index.md").read_text()
    text = without_code(page)
    found = HEADING.findall(text)
    assert (*found[:2], found[2][:17], found[3]) == ("The program", "Turn it on", "Differences from ", "When it pays")
    assert re.search(r"^(Papers?|Like it): ", text, re.MULTILINE), "where it comes from is not said"
    assert len(text[text.index("## When it pays") :].split()) > 20
    assert page.startswith(f"# {name}: ")
    assert page.count("<!-- tested -->") == 1
    assert f'"{name}"' in page.partition("## Turn it on")[2].partition("## Differences")[0]
    assert page.count(f"```{{include}} when/{name}.md\n```") == 1
    assert f"\n{name}\n" in index[index.index("{toctree}") :]


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
    words = [word for word in text.split() if re.search(r"[A-Za-z0-9]", word)]
    assert len(words) <= most, f"{len(words)} words, of at most {most}"


@pytest.mark.parametrize("page", [DOCS.parent / "README.md", *pages()], ids=lambda page: page.name)
def test_code_is_not_cut_on_a_screen_of_1280_pixels(page):
    shown = [block for block in blocks(page.read_text()) if not block.language.startswith("{")]
    wide = [line for block in shown for line in block.code.splitlines() if len(line) > WIDTH]
    assert not wide, f"{page.name}: break these lines, and put remarks above them"


def test_every_page_is_in_the_contents_once():
    listed = []
    for page in pages():
        for body in TOCTREE.findall(page.read_text()):
            for line in filter(None, map(str.strip, body.splitlines())):
                if not line.startswith(":"):
                    found = [p for p in page.parent.glob(f"{line}.md") if p != page]
                    assert found, f"{page.name} lists {line}, which is not there"
                    listed += found
    assert len(listed) == len(set(listed))
    left_out = set(pages()) - set(listed) - {DOCS / "index.md"}
    assert not left_out, f"put into a toctree: {', '.join(str(page.relative_to(DOCS)) for page in sorted(left_out))}"


def test_the_contents_have_captions():
    text = (DOCS / "index.md").read_text()
    captions = re.findall(r"^:caption: (\w+)$", text, re.MULTILINE)
    assert captions == ["Start", "Choose", "Methods", "Systems", "Tools", "Reference"]
    assert len(TOCTREE.findall(text)) == len(captions)


def test_both_pictures_of_a_step_are_there_and_alike():
    light, dark = ((DOCS / "images" / f"step-{theme}.svg").read_text() for theme in ("light", "dark"))
    texts = [re.findall(r">([^<>]*\w[^<>]*)</text>", picture) for picture in (light, dark)]
    assert texts[0] == texts[1]
    assert any("exposed" in text for text in texts[0])
    assert "#1f2328" in light
    assert "#e6e6e6" in dark


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
    texts = [(ROOT / page).read_text() for page in re.findall(r"\]\(([^)]+)\)", pages)]
    assert texts
    for name in filter(None, names):
        assert any(name in text for text in texts), name
    assert all(any(address in text for text in texts) for address in paper)


def test_the_differences_can_be_found_by_name():
    text = (ROOT / "docs" / "differences.md").read_text()
    assert [name for name in NAMES if name not in text] == []
