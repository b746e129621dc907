"""The table of methods is made from the registry and the words of the families' pages."""

import re
import shutil

import method_tables
import pytest

from thinwire.core.methods.registry import METHODS
from thinwire.engine.local.settings import PRESETS


def test_the_table_has_all_methods_and_leads_to_their_sections():
    found = re.findall(r"^\| \[`(\w+)`\]\((\w+\.md)#(\w+)\)", method_tables.table(), re.MULTILINE)
    assert {name for name, _, _ in found} == {*METHODS, *PRESETS}
    for name, page, anchor in found:
        assert name == anchor
        assert f"\n## {anchor}\n" in (method_tables.FOLDER / page).read_text()


def test_a_method_without_words_is_named(tmp_path):
    shutil.copytree(method_tables.FOLDER, tmp_path / "methods")
    page = tmp_path / "methods" / "low_rank.md"
    page.write_text(page.read_text().replace("method: acp\n", "method: powersgd\n"))
    with pytest.raises(ValueError, match=r"has a comment 'in the index' with method: acp"):
        method_tables.rows(tmp_path / "methods")
