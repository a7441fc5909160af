"""The tables in README.md and docs/ are those of the committed results."""

import copy
import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import tables
from report import percent, table

NUMBER = re.compile(r"\W*\d[\d.,]*( ?(%|[a-zA-Z]{1,2}|±.*|\(.*\)|(to|and) [\d.,]+))?\W*")
PAGES = [pytest.param(page, id=page.name) for page in tables.pages()]


@pytest.fixture(scope="module")
def results():
    return tables.load()


@pytest.mark.parametrize("page", PAGES)
def test_the_page_is_what_the_results_give(page, results):
    text = page.read_text()
    assert tables.fill(text, results) == text, "run `python benchmarks/tables.py`"


def test_every_table_is_on_a_page():
    marked = [name for page in tables.pages() for name in re.findall(r"<!-- table: (.*?) -->", page.read_text())]
    assert sorted(marked) == sorted(tables.TABLES)


@pytest.mark.parametrize("page", PAGES)
def test_every_table_of_figures_is_marked(page):
    text = page.read_text()
    assert text.count("<!-- table: ") == text.count("<!-- end -->") == len(tables.BLOCK.findall(text))
    unmarked = [found for found in markdown_tables(tables.BLOCK.sub("", text)) if is_of_figures(found)]
    assert not unmarked, "a table of figures stands between `<!-- table: NAME -->` and `<!-- end -->`"


def markdown_tables(text: str) -> list[list[list[str]]]:
    """The cells of every table outside of code."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [[line.strip("|").split("|") for line in block.splitlines()] for block in blocks]


def is_of_figures(cells: list[list[str]]) -> bool:
    """Whether a quarter of the cells that are neither heads nor names are numbers."""
    body = [cell.strip() for row in cells[2:] for cell in row[1:] if cell.strip()]
    return 4 * sum(bool(NUMBER.fullmatch(cell)) for cell in body) >= len(body) > 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("| a | b |\n|---|---|\n| x | 97.7 % |\n", True),
        ("| a | b |\n|---|---|\n| x | **0.5** |\n| y | 1.31 to 1.33 |\n", True),
        ("| a | b |\n|---|---|\n| 1 | a word |\n| 2 | 8 facts about names |\n", False),
        ("```\n| a | b |\n|---|---|\n| x | 1 |\n```\n", None),
    ],
)
def test_tables_of_figures_are_recognized(text, expected):
    assert [is_of_figures(found) for found in markdown_tables(text)] == ([] if expected is None else [expected])


def test_another_result_gives_another_table(results):
    changed = copy.deepcopy(dict(results))
    changed["fitting_time"]["rows"][0]["numba_seconds"] *= 2
    changed["bench_cpu_layer"]["layer"][0]["median"] *= 2
    before, after = tables.TABLES["fitting-time"](results), tables.TABLES["fitting-time"](changed)
    assert "| 0.87 s |" in before
    assert "| 1.74 s |" in after
    assert tables.TABLES["layer"](results) != tables.TABLES["layer"](changed)


def test_only_marked_text_is_rewritten(results):
    text = "before\n<!-- table: fitting-time -->\nold\n<!-- end -->\n| old |\n"
    made = tables.TABLES["fitting-time"](results)
    assert tables.fill(text, results) == f"before\n<!-- table: fitting-time -->\n\n{made}\n\n<!-- end -->\n| old |\n"
    with pytest.raises(KeyError, match="no-such-table"):
        tables.fill(text.replace("fitting-time", "no-such-table"), results)


def test_a_missing_row_is_an_error(results):
    changed = copy.deepcopy(dict(results))
    changed["answers_demo"]["rows"]["equal"] = []
    with pytest.raises(KeyError, match="bpc"):
        tables.TABLES["headline"](changed)


def test_cells():
    assert table(["a", "b"], [["x", 1], ["y", ""]]) == "| a | b |\n|---|---|\n| x | 1 |\n| y |  |"
    assert [percent(0.625, 0), percent(0.976667), percent(1.0), percent(0.0)] == ["63", "97.7", "100.0", "0.0"]
