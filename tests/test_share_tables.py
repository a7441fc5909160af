"""What `bpc inspect` shows of the needs of KV heads: tables, JSON, page and picture, against the counts of a cache."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import test_artifact
from test_report import Page
from test_shares import falling

from bpc_artifacts import ArtifactError, LayerProjection, ProjectionArtifact, save
from bpc_calib.method.rules import Rules, shares_of
from bpc_calib.method.shares import GRID, share_out

TOKENS = 1_000_000


def with_needs(needs, **changes) -> ProjectionArtifact:
    """An artifact with needs by layer, `[heads, 16]`."""
    heads, residual = len(needs[0]), 0.5
    layers = {
        i: LayerProjection(np.ones((heads, 32, 8), np.float32), np.full((heads, 33), residual, np.float32), need=need)
        for i, need in needs.items()
    }
    model = {"model__num_layers": len(needs), "model__kv_heads": heads, "model__query_heads": heads}
    types = {"model__layer_types": ["full_attention"] * len(needs)}
    return ProjectionArtifact(layers, test_artifact.metadata(**model, **types, format_version=3, **changes))


NEEDS = {layer: falling(4, seed=layer) for layer in range(3)}


@pytest.fixture
def file(tmp_path):
    save(with_needs(NEEDS), tmp_path / "needs.safetensors")
    return tmp_path / "needs.safetensors"


def line_between(need, share):
    """The loss at a share, on the line between the two shares of the grid beside it."""
    if share <= GRID[0]:
        return need[0]
    right = next(i for i, each in enumerate(GRID) if each >= share)
    part = (share - GRID[right - 1]) / (GRID[right] - GRID[right - 1])
    return need[right - 1] + part * (need[right] - need[right - 1])


@pytest.mark.parametrize("budget", [0.02, 0.07])
def test_shares_are_those_of_a_cache_and_losses_are_read_from_the_needs(bpc, file, budget):
    shown = json.loads(bpc("inspect", file, "--json", *(["--budget", "7%"] if budget == 0.07 else [])).out)
    assert shown["need"] == {str(layer): need.tolist() for layer, need in NEEDS.items()}
    shares, losses = shown["shares"]["by_head"], shown["shares"]["losses"]
    assert shown["shares"]["budget"] == budget
    assert [row["budget"] for row in losses] == sorted({0.005, 0.01, 0.02, 0.05, 0.1, budget})
    spent = share_out(NEEDS)
    for layer, found in shares.items():
        rules = Rules(budget, shares=spent[int(layer)])
        counts = rules.by_head(rules.count(TOKENS), TOKENS)
        assert found == pytest.approx([count / TOKENS for count in counts], abs=2 / TOKENS)
    assert np.mean(list(shares.values())) == pytest.approx(budget, rel=0.01)
    (at,) = [row for row in losses if row["budget"] == budget]
    by_need = [line_between(need, share) for i in NEEDS for need, share in zip(NEEDS[i], shares[str(i)], strict=True)]
    assert at["by_need"] == pytest.approx(sum(by_need), rel=1e-5)
    assert at["equal_shares"] == pytest.approx(sum(line_between(need, budget) for i in NEEDS for need in NEEDS[i]))
    assert all(row["by_need"] < row["equal_shares"] for row in losses)
    for side in ("by_need", "equal_shares"):
        assert [row[side] for row in losses] == sorted((row[side] for row in losses), reverse=True)


def test_the_terminal_and_the_page_have_the_same_numbers(bpc, file, tmp_path):
    pytest.importorskip("matplotlib")
    shown = json.loads(bpc("inspect", file, "--json").out)["shares"]
    ran = bpc("inspect", file, "--html", tmp_path / "a.html", "--plot", tmp_path / "a.png")
    text = Page((tmp_path / "a.html").read_text()).text
    assert ran.code == 0
    assert "Shares by head|" in text
    for said in (ran.out, text):
        assert "at a budget of 2 %, in %" in said
        assert "expect more than this sum" in said.replace("\n", " ")
    rows = [[layer, np.mean(each), *each] for layer, each in shown["by_head"].items()]
    rows = [[layer, *(f"{100 * cell:.2f}" for cell in cells)] for layer, *cells in rows]
    rows += [
        [f"{100 * row['budget']:.3g} %", f"{row['by_need']:.4f}", f"{row['equal_shares']:.4f}"]
        for row in shown["losses"]
    ]
    for row in rows:
        assert "|".join(row) in text
        assert re.search(" *│ ".join(map(re.escape, row)), ran.out)
    before = (tmp_path / "a.html").read_bytes()
    assert bpc("inspect", file, "--html", tmp_path / "a.html", "--force").code == 0
    assert (tmp_path / "a.html").read_bytes() == before
    height = int.from_bytes((tmp_path / "a.png").read_bytes()[20:24], "big")
    assert height == 2 * 4.5 * 150  # the residuals above, the shares below


def test_short_contexts_have_shares_of_their_own(bpc, tmp_path):
    made = with_needs(NEEDS)
    layers = {i: replace(layer, need_short=falling(4, seed=9 + i)) for i, layer in made.layers.items()}
    save(replace(made, layers=layers), tmp_path / "a.safetensors")
    shown = json.loads(bpc("inspect", tmp_path / "a.safetensors", "--json").out)
    assert shown["need_short"] == {str(i): layer.need_short.tolist() for i, layer in layers.items()}
    rules = {
        i: Rules(0.02, min_tokens=1, shares=each) for i, each in shares_of(replace(made, layers=layers), layers).items()
    }
    for length, key in ((TOKENS, "by_head"), (2048, "by_head_short")):
        for i, found in shown["shares"][key].items():
            counts = rules[int(i)].by_head(int(0.02 * length), length)
            assert found == pytest.approx([count / length for count in counts], abs=2 / TOKENS)
    assert "below 4,096 tokens have shares of their own" in bpc("inspect", tmp_path / "a.safetensors").out.replace(
        "\n", " "
    )


def test_a_short_need_is_in_all_layers_or_in_none(tmp_path):
    made = with_needs(NEEDS)
    layers = dict(made.layers) | {1: replace(made.layers[1], need_short=falling(4))}
    with pytest.raises(
        ArtifactError, match=r"layers\.1\.need_short: expected in all layers that have a need, or in none"
    ):
        save(replace(made, layers=layers), tmp_path / "a.safetensors")
    layers = {i: replace(layer, need_short=-falling(4)) for i, layer in made.layers.items()}
    with pytest.raises(ArtifactError, match=r"layers.0.need_short: expected values of 0 or more"):
        save(replace(made, layers=layers), tmp_path / "a.safetensors")


def test_many_heads_are_blocks(bpc, tmp_path):
    needs = {0: np.repeat(np.exp(-np.array(GRID) * 40)[None], 32, 0).astype(np.float32)}
    needs[0][5] = 0
    save(with_needs(needs), tmp_path / "a.safetensors")
    found = json.loads(bpc("inspect", tmp_path / "a.safetensors", "--json").out)["shares"]["by_head"]["0"]
    ran = bpc("inspect", tmp_path / "a.safetensors")
    (blocks,) = re.findall("[▁▂▃▄▅▆▇█]{32}", ran.out)
    assert blocks[5] == "▁"
    for block, share in zip(blocks, found, strict=True):
        steps = "▁▂▃▄▅▆▇█".index(block) - 3
        assert (share / 0.02 <= 2**-2.5) if steps == -3 else (2 ** (steps - 0.5) <= share / 0.02 <= 2 ** (steps + 0.5))
    assert max(map(len, ran.out[ran.out.index("Tokens that each") :].splitlines()[:6])) <= 80


@pytest.mark.parametrize("need", [0.0, 1.0, 1e30])
def test_heads_that_lose_the_same_at_every_share(bpc, tmp_path, need):
    pytest.importorskip("matplotlib")
    save(with_needs({0: np.full((1, 16), need, np.float32)}), tmp_path / "a.safetensors")
    ran = bpc("inspect", tmp_path / "a.safetensors", "--html", tmp_path / "a.html", "--plot", tmp_path / "a.svg")
    assert (ran.code, ran.err) == (0, "")


def test_an_artifact_without_needs_shows_nothing_of_them(bpc, file, tmp_path):
    pytest.importorskip("matplotlib")
    artifact = with_needs(NEEDS)
    layers = {i: replace(layer, need=None) for i, layer in artifact.layers.items()}
    plain = tmp_path / "plain.safetensors"
    save(ProjectionArtifact(layers, artifact.metadata | {"format_version": 1}), plain)
    alone, both = (json.loads(bpc("inspect", *files, "--json").out) for files in ([plain], [file, plain]))
    assert not {"need", "shares"} & {*alone}
    assert ["shares" in each for each in both["artifacts"]] == [True, False]
    assert "budget" not in bpc("inspect", plain).out
    assert bpc("inspect", file, plain, "--html", tmp_path / "a.html").code == 0
    text = Page((tmp_path / "a.html").read_text()).text
    assert "Shares by head of A" in text
    assert "Shares by head of B" not in text


@pytest.mark.parametrize("budget", ["0", "0%", "2048", "-2%", "120%", "nan", "much"])
def test_a_budget_is_a_share(bpc, file, budget):
    ran = bpc("inspect", file, "--budget", budget)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert ran.err.startswith("Error: Invalid value for '--budget': ")


@pytest.mark.parametrize("budget", ["0.000001%", "100%"])
def test_the_smallest_and_the_largest_budget(bpc, file, budget):
    shares = json.loads(bpc("inspect", file, "--budget", budget, "--json").out)["shares"]
    if budget == "100%":
        assert {share for each in shares["by_head"].values() for share in each} == {1.0}
        assert shares["losses"][-1]["by_need"] == pytest.approx(shares["losses"][-1]["equal_shares"])


def test_needs_are_shown_without_torch(file):
    script = (
        f"import sys\nfrom bpc_cli.main import app\ntry:\n    app(['inspect', {str(file)!r}])\n"
        "except SystemExit as done:\n    print(done.code, [m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "Sum of what the heads lose" in ran.stdout
    assert ran.stdout.splitlines()[-1] == "0 []"
