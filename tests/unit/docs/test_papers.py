"""Who knows a system by its paper's name finds it: in the README's table, on its page, and in the differences."""

import re
from pathlib import Path

import pytest

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
