"""The tables of methods are made from the registry and the words of each page."""

import re
import shutil

import method_tables
import pytest

from thinwire.core.methods.registry import METHODS

INDEX = method_tables.FOLDER / "index.md"


def test_the_index_is_what_the_script_writes():
    page = INDEX.read_text()
    assert page == method_tables.rendered(page), "run: python docs/method_tables.py"
    first, second = (re.findall(rf"^\| {start}`\"?(\w+)", page, re.MULTILINE) for start in (r"\[", ""))
    assert first == second
    assert list(dict.fromkeys(first)) == list(METHODS)


def test_a_page_without_words_is_named(tmp_path):
    shutil.copytree(method_tables.FOLDER, tmp_path / "methods")
    page = tmp_path / "methods" / "acp.md"
    page.write_text(page.read_text().partition("<!-- in the index")[0])
    with pytest.raises(ValueError, match=r"acp\.md has no comment 'in the index'"):
        method_tables.rows(tmp_path / "methods")
