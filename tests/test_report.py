"""The page of `bpc inspect --html` and the comparison of two artifacts: facts, hostile metadata, a real browser."""

import json
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import test_artifact
import tiny
from browser import Browser, find_browser

from bpc_artifacts import LayerProjection, ProjectionArtifact, load, save

VOID = {"meta"}
HOSTILE = (
    '</td></title></style><script>alert(1)</script><img src=//example.org/x onerror=\'x\'>" onload="x" {x} \x1b\u202e'
)


class Page(HTMLParser):
    """The elements of a page with their attributes, and its text; fails where an end tag does not match."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        assert len({name for name, _ in attributes}) == len(attributes), f"{tag} has an attribute twice"
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.words.append(data)

    @property
    def text(self) -> str:
        return "|".join(self.words)


@pytest.fixture(scope="module")
def pair(tmp_path_factory, model_folder, text_folder, fitting_kernels) -> list[Path]:
    """Two artifacts of the tiny model, of 32 and 64 bits."""
    from bpc_calib.models.loading import load_model, load_tokenizer

    model, tokenizer = load_model(str(model_folder)), load_tokenizer(str(model_folder))
    paths = []
    for bits in (32, 64):
        artifact = tiny.calibrated(model, tokenizer, corpora=[str(text_folder)], samples=4, bits=bits)
        paths.append(tmp_path_factory.mktemp("pair") / f"tiny-{bits}.safetensors")
        save(artifact, paths[-1])
    return paths


SETTINGS = {"prompts": 4, "min_tokens": 1, "dense_layers": [], "raw": False}


def evaluation(file: Path, **changes) -> dict:
    """A result of `bpc eval` with two rows."""
    figure = {"value": 0.25, "low": 0.125, "high": 0.5}
    metadata = load(file).metadata
    row = {"task": "needle", "tokens": 512, "method": "bpc", "budget": 0.02, "prompts": 4, "read": 0.055}
    text = {"task": "text", "loss_difference": {"value": 0.2, "low": 0.1, "high": 0.3}}
    rows = [row | {"score": figure}, row | text]
    return {
        "model": metadata["model"]["id"],
        "artifact": metadata["algorithm"],
        "settings": SETTINGS,
        "rows": rows,
    } | changes


def assert_inert(page: str) -> Page:
    """Nothing runs, nothing is loaded and nothing leads elsewhere."""
    parsed = Page(page)
    for tag, attributes in parsed.elements:
        assert tag not in {"script", "img", "iframe", "object", "embed", "link", "a", "base", "form", "foreignobject"}
        for name, value in attributes.items():
            assert not name.startswith("on")
            assert name not in {"href", "src", "xlink:href", "srcset", "action"}
            assert "url(" not in (value or "")
    policy = next(each["content"] for _, each in parsed.elements if each.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert "url(" not in page
    assert "@import" not in page
    return parsed


def test_a_page_has_what_the_artifact_holds(bpc, pair, tmp_path):
    ran = bpc("inspect", pair[0], "--html", tmp_path / "a.html")
    assert ran.code == 0, ran.err
    assert ran.out.endswith(f"Wrote {tmp_path / 'a.html'}\n")
    page, artifact = (tmp_path / "a.html").read_text(), load(pair[0])
    text = assert_inert(page).text
    held_out = artifact.metadata["metrics"]["held_out"]
    for layer, projection in artifact.layers.items():
        for head, value in enumerate(projection.residual[:, -1]):
            assert f"layer {layer}, head {head}: {value:.3f}|" in text
            assert f"layer {layer}, head {head}: {held_out['residual_by_head'][str(layer)][head]:.3f}|" in text
        assert f"layer {layer}, new text: {held_out['residual_by_layer'][str(layer)]:.3f}|" in text
    for source in artifact.metadata["calibration"]["sources"]:
        assert f"{source['name']}|" in text
        assert f"|{source['sha256'][:16]}|" in text
    for part in ("tiny-llama", "32 bits per key", "384|keys per KV head", "512|tokens", "query metric", "aside"):
        assert part in text
    assert artifact.metadata["payload_sha256"] in text
    assert f"{artifact.metadata['metrics']['residual']:.3f}|residual, fitted keys" in text
    shown = json.loads(bpc("inspect", pair[0], "--json").out)
    for sentence in shown["verdict"]:
        assert sentence in text
    assert page.count("<path ") == 2 + len(artifact.layers)  # every layer, and the mean with its edge


def test_the_curve_passes_through_every_bit(bpc, pair, tmp_path):
    assert bpc("inspect", pair[0], "--html", tmp_path / "a.html").code == 0
    paths = [each["d"] for tag, each in Page((tmp_path / "a.html").read_text()).elements if tag == "path"]
    residual = load(pair[0]).layers[0].residual.mean(0)
    points = np.array([[float(x) for x in point.split()] for point in paths[0][1:].split(" L")])
    assert len(points) == 33
    fallen = points[:, 1] - points[0, 1]
    assert np.allclose(fallen / fallen[-1], (1 - residual) / (1 - residual[-1]), atol=2e-3)
    assert np.allclose(np.diff(points[:, 0]), np.diff(points[:, 0]).mean(), atol=0.2)


def test_metadata_cannot_write_into_the_page(bpc, tmp_path):
    source = test_artifact.metadata()["calibration"]["sources"][0]
    text = dict.fromkeys(("name", "path", "revision", "split", "field", "sha256"), HOSTILE)
    changes = {"model__id": HOSTILE, "model__revision": HOSTILE, "model__model_type": HOSTILE, "bpc_version": HOSTILE}
    changes |= {"model__rope": {HOSTILE: HOSTILE}, "model__config_sha256": HOSTILE, "calibration__dtype": HOSTILE}
    changes |= {"algorithm__name": HOSTILE, "calibration__sources": [source | text]}
    for name, seed in (("a", 0), ("b", 1)):
        save(test_artifact.artifact(**changes, algorithm__seed=seed), tmp_path / f"{name}.safetensors")
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for file in files:
        result = evaluation(file, settings=SETTINGS | {HOSTILE: HOSTILE})
        result["rows"][0]["task"] = HOSTILE
        result["rows"].append(
            {"task": HOSTILE, "tokens": None, "method": "bpc", "budget": 8, "prompts": 1, "metrics": {HOSTILE + ",": 1}}
        )
        file.with_suffix(".json").write_text(json.dumps(result))
    page = tmp_path / "a.html"
    for words in (files[:1], files):
        given = [word for file in words for word in ("--evaluation", file.with_suffix(".json"))]
        ran = bpc("inspect", *words, *given, "--html", page, "--force")
        assert ran.code == 0, ran.err
        assert "\x1b" not in ran.out
        parsed = assert_inert(page.read_text())
        assert "<script>alert(1)</script>" in parsed.text  # as text
        for character in "\x1b\u202e":
            assert character not in page.read_text()


@pytest.mark.parametrize(("layers", "heads", "scale"), [(1, 1, 0.0), (80, 8, 1.0), (40, 32, 1e37)])
def test_pages_of_few_and_many_layers(bpc, tmp_path, layers, heads, scale):
    rng = np.random.default_rng(0)
    made = {
        i: LayerProjection(
            rng.standard_normal((heads, 32, 8)).astype(np.float32), (rng.random((heads, 33)) * scale).astype(np.float32)
        )
        for i in range(layers)
    }
    model = {"model__num_layers": layers, "model__kv_heads": heads, "model__query_heads": heads}
    metadata = test_artifact.metadata(**model, model__layer_types=["full_attention"] * layers)
    save(ProjectionArtifact(made, metadata), tmp_path / "a.safetensors")
    ran = bpc("inspect", tmp_path / "a.safetensors", "--html", tmp_path / "a.html")
    assert ran.code == 0, ran.err
    page = assert_inert((tmp_path / "a.html").read_text())
    assert sum(tag == "rect" for tag, _ in page.elements) == layers * heads  # no new text was measured
    assert "Not measured on new text" in page.text
    assert "nan" not in page.text
    assert "inf" not in page.text


def test_compare(bpc, pair, tmp_path):
    page = tmp_path / "c.html"
    ran = bpc("inspect", *pair, "--html", page)
    assert ran.code == 0, ran.err
    for part in ("signs, 32 bits per key", "signs, 64 bits per key", "B minus A", "A, new text", "B: "):
        assert part in ran.out
    assert "position shift" not in ran.out  # the same in both
    one, two = map(load, pair)
    new = [each.metadata["metrics"]["held_out"]["residual_by_layer"] for each in (one, two)]
    shown = json.loads(bpc("inspect", *pair, "--json").out)
    found = shown["comparison"]
    assert [each["file"] for each in shown["artifacts"]] == [str(path) for path in pair]
    assert found["differences"] == {"codes": ["signs, 32 bits per key", "signs, 64 bits per key"]}
    assert found["comparable"] is True
    assert found["residual_on_new_text"] == new
    assert found["change"] == {layer: new[1][layer] - new[0][layer] for layer in new[0]}
    text = assert_inert(page.read_text()).text
    for layer in new[0]:
        assert f"layer {layer}, A, new text: {new[0][layer]:.3f}|" in text
        assert f"|{new[1][layer] - new[0][layer]:+.3f}|" in text
        assert f"{new[1][layer] - new[0][layer]:+.3f}" in ran.out
    assert "Nothing: the two" in Page(_page(bpc, tmp_path, pair[0], pair[0])).text


def _page(bpc, folder: Path, *files: Path) -> str:
    assert bpc("inspect", *files, "--html", folder / "p.html", "--force").code == 0
    return (folder / "p.html").read_text()


def test_what_cannot_be_compared_is_said(bpc, pair, tmp_path):
    save(test_artifact.artifact(), tmp_path / "other.safetensors")
    ran = bpc("inspect", pair[0], tmp_path / "other.safetensors")
    assert "They belong to different models: tiny-llama and org/name." in ran.out
    assert "Their residuals cannot be compared: A has Residual |K - mean - UP|" in ran.out
    assert "B minus A" not in ran.out
    text = assert_inert(_page(bpc, tmp_path, pair[0], tmp_path / "other.safetensors")).text
    assert "Their residuals cannot be compared" in text
    assert "B minus A" not in text
    found = json.loads(bpc("inspect", pair[0], tmp_path / "other.safetensors", "--json").out)["comparison"]
    assert found["comparable"] is False
    assert found["change"] == {}


def test_artifacts_of_other_layers(bpc, tmp_path):
    rng = np.random.default_rng(0)
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for file, full in zip(files, ((0, 2), (0, 3)), strict=True):
        layers = {
            layer: LayerProjection(
                rng.standard_normal((2, 32, 8)).astype(np.float32), np.full((2, 33), layer / 4, np.float32)
            )
            for layer in full
        }
        kinds = ["full_attention" if layer in full else "sliding_attention" for layer in range(4)]
        metadata = test_artifact.metadata(model__num_layers=4, model__layer_types=kinds)
        save(ProjectionArtifact(layers, metadata), file)
    text = assert_inert(_page(bpc, tmp_path, *files)).text
    assert "|0|0.000|0.000|+0.000|2|0.500|3|0.750|" in text


def test_texts_are_shown_once_only_if_all_that_is_shown_is_equal(bpc, tmp_path):
    source = test_artifact.metadata()["calibration"]["sources"][0]
    sources = [source | {"path": path, "revision": path * 7} for path in ("first", "second")]
    held_out = test_artifact.held_out()
    changes = {
        "a": {"calibration__sources": sources[:1], "metrics__held_out": held_out},
        "same": {"calibration__sources": sources[:1], "metrics__held_out": held_out, "algorithm__seed": 1},
        "other-path": {"calibration__sources": sources[1:], "metrics__held_out": held_out},
        "more-aside": {"calibration__sources": sources[:1], "metrics__held_out": held_out | {"samples": 3}},
        "none-aside": {"calibration__sources": sources[:1]},
    }
    files = {name: tmp_path / f"{name}.safetensors" for name in changes}
    for name, file in files.items():
        save(test_artifact.artifact(**changes[name]), file)
    texts = {name: assert_inert(_page(bpc, tmp_path, files["a"], file)).text for name, file in files.items()}
    for name, text in texts.items():
        assert ("Calibration text of both" in text) is (name in ("a", "same")), name
        assert ("Calibration text of A" in text and "Calibration text of B" in text) is (name not in ("a", "same"))
    assert "|first|firstfirstfi|" in texts["other-path"]
    assert "|second|secondsecond|" in texts["other-path"]
    assert "; 3 samples were kept aside" in texts["more-aside"]
    assert "; no sample was kept aside" in texts["none-aside"]


def test_refusals(bpc, pair, tmp_path):
    def error(*words) -> str:
        ran = bpc("inspect", *words)
        assert ran.code == 1
        assert ran.out == ""
        (line,) = ran.err.splitlines()
        return line

    assert "3 artifacts given" in error(*pair, pair[0])
    assert "--plot draws one artifact: use --html" in error(*pair, "--plot", tmp_path / "a.png")
    page = tmp_path / "a.html"
    assert bpc("inspect", pair[0], "--html", page).code == 0
    before = page.read_text()
    assert "a.html: exists; pass --force" in error(pair[1], "--html", page)
    assert page.read_text() == before
    assert bpc("inspect", pair[1], "--html", page, "--force").code == 0
    page.write_text("<!DOCTYPE html><p>mine</p>")
    assert "exists and is not a page of bpc inspect, so it is never replaced" in error(
        pair[0], "--html", page, "--force"
    )
    assert page.read_text() == "<!DOCTYPE html><p>mine</p>"


def test_a_page_that_cannot_be_written_leaves_no_picture(bpc, pair, tmp_path):
    (tmp_path / "mine.html").write_text("mine")
    for page, part in (("mine.html", "mine.html: exists and is not a page"), ("no/a.html", "there is no folder")):
        # Said before the artifact is looked for.
        for file in (pair[0], tmp_path / "none.safetensors"):
            ran = bpc("inspect", file, "--plot", tmp_path / "p.png", "--html", tmp_path / page)
            assert (ran.code, ran.out) == (1, "")
            assert part in ran.err
    ran = bpc("inspect", pair[0], "--plot", tmp_path / "p.png", "--html", tmp_path / "p.png")
    assert ran.err == f"Error: {tmp_path / 'p.png'}: is given for --html and for --plot: give two files\n"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.html"]


def test_an_evaluation_belongs_to_its_artifact(bpc, pair, tmp_path):
    path = tmp_path / "eval.json"
    path.write_text(json.dumps(evaluation(pair[0])))
    ran = bpc("inspect", pair[0], "--evaluation", path, "--html", tmp_path / "a.html")
    assert ran.code == 0, ran.err
    text = Page((tmp_path / "a.html").read_text()).text
    for part in ("tiny-llama, 2 % of 512 tokens: right answers in %", "5.5%|25 (12-50)|", "5.5%|0.200 ±0.100|"):
        assert part in text
    assert "25 (12-50)" in ran.out
    shown = json.loads(bpc("inspect", pair[0], "--evaluation", path, "--json").out)
    assert shown["evaluation"]["rows"][0]["score"]["value"] == 0.25
    for content, part in (
        (json.dumps(evaluation(pair[1])), "made without these projections"),
        (
            json.dumps(evaluation(pair[0], model="other")),
            "made without these projections or with another model than tiny-llama",
        ),
        (json.dumps(evaluation(pair[0], artifact=None)), "made without these projections"),
        (json.dumps(evaluation(pair[0], rows=[{"method": "none"}])), "not a result of bpc eval"),
        (json.dumps(evaluation(pair[0], rows=[{"task": 1, "method": "bpc"}])), "not a result of bpc eval"),
        ('{"model": NaN}', "not a result of bpc eval"),
        ("[]", "not a result of bpc eval"),
        ("[" * 100_000, "not a result of bpc eval"),
        ("text", "not a result of bpc eval"),
    ):
        path.write_text(content)
        ran = bpc("inspect", pair[0], "--evaluation", path)
        assert (ran.code, ran.out) == (1, "")
        (line,) = ran.err.splitlines()
        assert f"{path}: " in line
        assert part in line
    ran = bpc("inspect", *pair, "--evaluation", path)
    assert ran.err == "Error: 1 --evaluation for 2 artifacts: give one for each, in their order\n"
    assert "cannot be read" in bpc("inspect", pair[0], "--evaluation", tmp_path / "none.json").err


def test_a_real_evaluation(bpc, pair, model_folder, tmp_path):
    ran = bpc(
        *("eval", "-m", model_folder, "-a", pair[0], "--tasks", "text", "--lengths", 64, "--budgets", "8"),
        *("--methods", "full,bpc", "--prompts", 2, "--forced", 8, "-q", "-o", tmp_path / "e.json"),
    )
    assert ran.code == 0, ran.err
    shown = bpc("inspect", pair[0], "--evaluation", tmp_path / "e.json", "--html", tmp_path / "a.html")
    assert shown.code == 0, shown.err
    assert ran.out in shown.out  # the same tables
    one = load(pair[0])
    layers = {index: replace(layer, residual=layer.residual / 2) for index, layer in one.layers.items()}
    save(ProjectionArtifact(layers, one.metadata), tmp_path / "other.safetensors")  # made in the same way
    other = bpc("inspect", tmp_path / "other.safetensors", "--evaluation", tmp_path / "e.json")
    assert (other.code, other.out) == (1, "")
    assert "e.json: was made without these projections or with another model than tiny-llama" in other.err
    row = next(each for each in json.loads((tmp_path / "e.json").read_text())["rows"] if each["method"] == "bpc")
    assert f"|{row['read']:.1%}|{row['loss_difference']['value']:.3f} ±" in Page((tmp_path / "a.html").read_text()).text


def test_a_page_needs_no_torch(pair, tmp_path):
    script = (
        "import sys\nfrom bpc_cli.main import app\n"
        f"try:\n    app(['inspect', {str(pair[0])!r}, '--html', {str(tmp_path / 'a.html')!r}])\n"
        "except SystemExit as done:\n    print(done.code, [m for m in ('torch', 'matplotlib') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "0 []"


@pytest.mark.slow  # starts a browser, which not every machine has; test_metadata_cannot_write reads the same pages
@pytest.mark.skipif(find_browser() is None, reason="no Chromium on the path (Debian: apt install chromium)")
def test_pages_in_a_browser(bpc, pair, tmp_path):
    many = tmp_path / "many.safetensors"
    rng = np.random.default_rng(0)
    layers = {
        i: LayerProjection(rng.standard_normal((8, 32, 8)).astype(np.float32), rng.random((8, 33)).astype(np.float32))
        for i in range(80)
    }
    model = {"model__num_layers": 80, "model__kv_heads": 8, "model__query_heads": 8, "model__id": HOSTILE * 4}
    metadata = test_artifact.metadata(**model, model__layer_types=["full_attention"] * 80)
    save(ProjectionArtifact(layers, metadata), many)
    for name, files in (("one", pair[:1]), ("two", pair), ("many", [many]), ("unlike", [pair[0], many])):
        assert bpc("inspect", *files, "--html", tmp_path / f"{name}.html").code == 0
    program = find_browser()
    assert program is not None
    with Browser(program, tmp_path / "profile") as browser:
        for name in ("one", "two", "many", "unlike"):
            for width in (320, 375, 768, 1280):
                grounds = set()
                for scheme in ("light", "dark"):
                    page = tmp_path / f"{name}.html"
                    browser.open(page, width=width, scheme=scheme)
                    ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
                    asked = [each["request"]["url"] for each in browser.of("Network.requestWillBeSent")]
                    assert asked == [page.resolve().as_uri()]
                    assert browser.of("Log.entryAdded") == browser.of("Runtime.consoleAPICalled") == []
                    assert browser.of("Runtime.exceptionThrown") == []
                    assert browser.evaluate("document.documentElement.scrollWidth") == width, (name, width)
                    grounds.add(ground)
                assert len(grounds) == 2
        browser.open(tmp_path / "one.html")
        assert browser.evaluate("document.compatMode") == "CSS1Compat"
        assert browser.evaluate("document.querySelectorAll('svg rect').length") == 2 * 3 * 2  # twice 3 layers, 2 heads
        assert browser.evaluate("[...document.querySelectorAll('svg')].every(e => e.getBBox().width > 100)")
        assert browser.picture().startswith(b"\x89PNG")
