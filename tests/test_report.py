"""The page of `bpc inspect --html` and the comparison of two artifacts: numbers, hostile metadata, refusals."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import test_artifact
import tiny

from bpc_artifacts import LayerProjection, ProjectionArtifact, load, save

pytest.importorskip("matplotlib")
HOSTILE = '</td></title></style><script>alert(1)</script><img src=//example.org/x>" onload="x" {{ title }} \x1b\u202e'


class Page(HTMLParser):
    """The text of a page; it fails where something would run, be loaded or lead elsewhere."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text = ""
        self.feed(page)
        assert set(re.findall(r"https?://([^/]*)", page)) <= {"www.w3.org"}  # the names of SVG's namespaces
        assert not re.search(r"@import|url\((?!#)", page)

    def handle_starttag(self, tag, attributes):
        assert tag not in {"script", "img", "image", "iframe", "object", "embed", "link", "a", "base", "form"}
        if ("class", "scroll") in attributes:  # scrolls by keyboard, with a name
            assert {"tabindex", "aria-label"} <= dict(attributes).keys()
        for name, value in attributes:
            assert name not in {"src", "srcset", "action", "onload", "onerror"}
            assert not name.endswith("href") or value.startswith("#")

    def handle_data(self, data):
        self.text += f"{data.strip()}|" if data.strip() else ""


@pytest.fixture(scope="module")
def pair(tmp_path_factory, model_folder, text_folder) -> list[Path]:
    """Two artifacts of the tiny model, of 32 and 64 bits."""
    from bpc_calib.models.loading import load_model, load_tokenizer

    model, tokenizer = load_model(str(model_folder)), load_tokenizer(str(model_folder))
    paths = [tmp_path_factory.mktemp("pair") / f"tiny-{bits}.safetensors" for bits in (32, 64)]
    for bits, path in zip((32, 64), paths, strict=True):
        save(tiny.calibrated(model, tokenizer, corpora=[str(text_folder)], samples=4, bits=bits), path)
    return paths


@pytest.fixture
def page(bpc, tmp_path):
    def read(*words: object) -> str:
        assert bpc("inspect", *words, "--html", tmp_path / "page.html", "--force").code == 0
        return Page((tmp_path / "page.html").read_text()).text

    return read


def evaluation(file: Path, **settings) -> str:
    """A result of `bpc eval` with one row."""
    made, figure = load(file).metadata, {"value": 0.25, "low": 0.125, "high": 0.5}
    row = {"task": "needle", "tokens": 512, "method": "bpc", "budget": 0.02, "read": 0.055, "score": figure}
    settings |= {"prompts": 4, "min_tokens": 1, "dense_layers": [], "raw": False}
    parts = {"model": made["model"]["id"], "artifact": made["algorithm"], "settings": settings, "rows": [row]}
    return json.dumps(parts)


def test_a_page_has_what_the_artifact_holds_and_the_same_bytes_twice(page, bpc, pair, tmp_path):
    text, artifact = page(pair[0]), load(pair[0])
    before = (tmp_path / "page.html").read_bytes()
    page(pair[0])
    assert (tmp_path / "page.html").read_bytes() == before
    held_out = artifact.metadata["metrics"]["held_out"]
    for layer, projection in artifact.layers.items():
        last, new = projection.residual[:, -1], held_out["residual_by_layer"][str(layer)]
        by_layer = [last.mean(), new, last.min(), last.max(), *last]
        for values in (by_layer, held_out["residual_by_head"][str(layer)], projection.residual.mean(axis=0)[::8]):
            assert f"|{layer}|{'|'.join(f'{value:.3f}' for value in values)}|" in text
    (source,) = artifact.metadata["calibration"]["sources"]
    sentences = json.loads(bpc("inspect", pair[0], "--json").out)["verdict"]
    for part in (source["name"], source["sha256"], artifact.metadata["payload_sha256"], "32 bits per key", *sentences):
        assert part in text


def test_metadata_cannot_write_into_the_page(page, tmp_path):
    source = test_artifact.metadata()["calibration"]["sources"][0]
    changes = {"calibration__sources": [source | dict.fromkeys(("name", "path", "revision", "split"), HOSTILE)]}
    changes |= {"model__id": HOSTILE, "model__revision": HOSTILE, "bpc_version": HOSTILE, "algorithm__name": HOSTILE}
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for seed, file in enumerate(files):
        save(test_artifact.artifact(**changes, algorithm__seed=seed), file)
        file.with_suffix(".json").write_text(evaluation(file, **{HOSTILE: HOSTILE}))
    for words in (files[:1], files):
        given = [word for file in words for word in ("--evaluation", file.with_suffix(".json"))]
        assert HOSTILE[:-2] in page(*words, *given)  # as text
        assert not {*"\x1b\u202e"} & {*(tmp_path / "page.html").read_text()}


@pytest.mark.parametrize(("layers", "heads", "scale"), [(1, 1, 0.0), (80, 8, 1.0), (3, 2, 1e37)])
def test_pages_of_few_and_many_layers(page, tmp_path, layers, heads, scale):
    residual = np.full((heads, 33), scale, np.float32)
    made = {i: LayerProjection(np.ones((heads, 32, 8), np.float32), residual) for i in range(layers)}
    model = {"model__num_layers": layers, "model__kv_heads": heads, "model__query_heads": heads}
    metadata = test_artifact.metadata(**model, model__layer_types=["full_attention"] * layers)
    save(ProjectionArtifact(made, metadata), tmp_path / "a.safetensors")
    assert "Not measured on new text" in page(tmp_path / "a.safetensors")


def test_two_artifacts_are_compared(page, bpc, pair, tmp_path):
    text, shown, other = page(*pair), bpc("inspect", *pair).out, tmp_path / "other.safetensors"
    new = [load(path).metadata["metrics"]["held_out"]["residual_by_layer"] for path in pair]
    found = json.loads(bpc("inspect", *pair, "--json").out)["comparison"]
    assert found["differences"] == {"codes": ["32 bits per key", "64 bits per key"]}
    assert found["change"] == {layer: new[1][layer] - new[0][layer] for layer in new[0]}
    for layer, change in found["change"].items():
        assert f"|{new[1][layer]:.3f}|{change:+.3f}|" in text
        assert f"{change:+.3f}" in shown
    save(test_artifact.artifact(), other)
    for said in (page(pair[0], other), bpc("inspect", pair[0], other).out):
        assert "Their residuals cannot be compared: A has Residual |K - mean - UP|" in said
        assert "B minus A" not in said


def test_an_evaluation_belongs_to_its_artifact(page, bpc, pair, tmp_path):
    path = tmp_path / "eval.json"
    path.write_text(evaluation(pair[0]))
    for shown in (page(pair[0], "--evaluation", path), bpc("inspect", pair[0], "--evaluation", path).out):
        assert "25 (12-50)" in shown
    for content, said in ((evaluation(pair[1]), "made without these projections"), ("[]", "not a result of bpc eval")):
        path.write_text(content)
        assert said in bpc("inspect", pair[0], "--evaluation", path).err


def test_refusals_are_one_line_and_write_nothing(bpc, pair, tmp_path):
    page, mine, picture = (tmp_path / name for name in ("a.html", "mine.html", "p.png"))
    assert bpc("inspect", pair[0], "--html", page).code == 0
    mine.write_text("<!DOCTYPE html><p>mine</p>")
    for code, words, said in (
        (2, (*pair, pair[0]), "3 artifacts given"),
        (2, (*pair, "--plot", picture), "--plot draws one artifact: use --html"),
        (1, (pair[1], "--html", page), "a.html: exists; pass --force"),
        (1, ("none.safetensors", "--plot", picture, "--html", mine, "--force"), "is not a page of bpc inspect"),
        (2, (pair[0], "--plot", picture, "--html", picture), "is given for --html and for --plot"),
        (2, (*pair, "--evaluation", mine), "1 --evaluation for 2 artifacts"),
    ):
        ran = bpc("inspect", *words)
        assert (ran.code, ran.out, ran.err.count("\n")) == (code, "", 1)
        assert said in ran.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "mine.html"]
