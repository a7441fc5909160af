"""The tables in README.md and docs/ are those of the committed results."""

import copy
import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import offload_plan
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


def test_keys_and_values_in_main_memory(results):
    """Llama 3.1 8B on 24 GB after 1M tokens by hand: 2 % are 20,971 tokens, and 2 bytes a number."""
    assert results["offload_plan"] == offload_plan.plans(results), "run `python benchmarks/offload_plan.py`"
    known = {"card_share": 0.9, "chosen_shares": [0.2, 0.5], "seconds_beyond": {"graphs": 1e-4, "eager": 1e-3}}
    row = offload_plan.plan("RTX 4090, 24 GB", "llama-3.1-8b", 16, 1 << 20, known)
    layer = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336
    weights, head = 2 * 32 * layer, 2 * 128256 * 4096
    assert row["held"] == {"weights": weights + 2 * head, "codes": 32 * 8 * 9 << 20, "keys_and_values": 1 << 37}
    assert (row["fits"], row["all_fits"]) == (True, False)
    pcie = 32 * (2 * 32 * 128 * 2 + 2 * 8 * 128 * 2 + 8 * 20971 * 8)
    chosen = 32 * 2 * 8 * 128 * 2 * 20971
    assert (row["moved"]["pcie"], row["moved"]["main"]) == (pcie, chosen)
    card = (weights + head + (32 * 8 * 9 << 20)) / (0.9 * 1008e9)
    back = 32 * 30e-6 + pcie / 25e9
    cpu = [back + chosen / (share * 100e9) for share in (0.2, 0.5)]
    assert row["seconds"]["cpu"] == pytest.approx([card + 32e-4 + each for each in cpu])
    assert row["seconds"]["cpu_eager"] == pytest.approx([card + 32e-3 + each for each in cpu])
    bounds = [row["seconds"][f"least_{each}"] for each in ("rows_up", "dense_over_pcie", "dense_on_cpu")]
    on_cpu = (weights + head) / (0.9 * 1008e9) + (1 << 37) / 100e9
    assert bounds == pytest.approx([card + 32e-4 + chosen / 25e9, (1 << 37) / 25e9, on_cpu])
    prompt = {"copied": (1 << 38) / 25e9, "least_computed": (1 << 20) * (64 * layer + 64 * 4096 * (1 << 20)) / 165e12}
    assert row["prompt_seconds"] == pytest.approx(prompt)
    assert not offload_plan.plan("RTX 4090, 24 GB", "llama-3.1-70b", 4.5, 1 << 17, known)["fits"]
    assert offload_plan.plan("H100, 80 GB", "llama-3.1-8b", 16, 1 << 18, known)["all_fits"]
