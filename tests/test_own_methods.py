"""A method of one's own in `bpc eval`, and what methods learn from text before they choose."""

import json
import sys

import pytest
import tiny
import torch

from bpc_calib import InputError, enable
from bpc_calib.evaluation.comparison import HARD, Comparison, learn_methods, learners, make_cache
from bpc_calib.evaluation.evaluate import evaluate
from bpc_calib.evaluation.learning import REPEATED, collect, draw_lessons, learn
from bpc_calib.evaluation.methods import METHODS, in_order, method_of
from bpc_calib.text.corpora import open_corpora

OWN = '''
import torch

from bpc_calib.evaluation.baselines.scoring import ScoringLayer


class Lengths(ScoringLayer):
    """The longest keys first."""

    def score(self, query):
        lengths = self.of_keys("lengths", lambda keys: keys.float().norm(dim=-1))
        return lengths.unsqueeze(2).expand(*query.shape[:3], -1)

    def ranking_bytes(self, length):
        return 4 * length * self.keys.shape[1]


class Towards(Lengths):
    """The keys first that lie as the mean of those of other texts."""

    @staticmethod
    def learn(text, seed):
        return {"mean": text.keys.float().mean((0, 2)) + seed}

    def score(self, query):
        products = self.keys.float() @ self.learned[self.index]["mean"].unsqueeze(-1)
        return products.mT.expand(-1, -1, query.shape[2], -1)


class Nothing:
    pass
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_methods.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("own_methods", None)


def model_of_tests():
    model = tiny.model(max_position_embeddings=1024)
    enable(model)
    return model


def test_the_command_takes_methods_of_this_folder(own, bpc, tmp_path):
    folder = tiny.save(tmp_path / "tiny-llama", max_position_embeddings=1024)
    words = ("eval", "-m", folder, "--tasks", "text", "--lengths", "300", "--prompts", "1", "--budgets", "10%", "-q")
    methods = "own_methods:Towards,random,own_methods:Lengths"
    ran = bpc(*words, "--methods", methods, "--preset", "hard", "--json")
    assert ran.code == 0, ran.err
    result = json.loads(ran.out)
    rows = {row["method"]: row for row in result["rows"]}
    assert list(rows) == methods.split(",")
    # A tenth of the tokens, and 4 of the 32 * 2 bytes of each token's key and value for every rank.
    assert rows["own_methods:Lengths"]["read"] > rows["random"]["read"]
    assert list(result["learned"]["seconds"]) == ["own_methods:Towards"]
    shown = bpc(*words, "--methods", methods, "--preset", "hard").out
    assert "Towards" in shown
    assert "Learned beforehand, from 16 texts of 1,024 tokens: Towards in" in shown


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own_methods:Missing", "AttributeError: module 'own_methods' has no attribute 'Missing'"),
        ("no_such:Layer", "ModuleNotFoundError: No module named 'no_such'"),
        ("own_methods:Nothing", "must be a complete subclass of bpc_calib.runtime.layers.SparseLayer"),
        ("bpc_calib.evaluation.baselines.scoring:ScoringLayer", "must be a complete subclass"),
        ("own methods:Lengths", "unknown method 'own methods:Lengths': the methods are full, oracle, "),
        (":Lengths", "unknown method ':Lengths'"),
    ],
)
def test_what_is_no_method_is_refused(own, name, said):
    sys.path.insert(0, str(own))
    with pytest.raises(InputError, match=r"^(method|unknown)") as caught:
        make_cache(name, tiny.config(), None, 8)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_known_methods_come_before_ones_own():
    assert in_order(["b:C", "random", "a:B", "full", "b:C"]) == ["full", "random", "b:C", "a:B"]
    assert method_of("a.b:C").label == "C"


def test_lessons_end_in_a_repetition_that_the_layers_saw():
    model = model_of_tests()
    ids = torch.randint(250, (2, 400), generator=torch.Generator().manual_seed(0))
    texts = collect(model, ids, [1, 2])
    assert list(texts) == [1, 2]
    for layer, text in texts.items():
        assert text.keys.shape == text.values.shape == (2, 2, 400, 8)
        assert text.places[-REPEATED:].tolist() == list(range(336, 400))
        assert text.passage == 168
        with torch.no_grad():
            repeated = torch.cat([ids[1, :336], ids[1, 168:232]]).unsqueeze(0)
            expected = model(repeated, use_cache=True).past_key_values.layers[layer].keys
        torch.testing.assert_close(text.keys[1:], expected, rtol=1e-4, atol=1e-4)


def test_learning_goes_on_where_it_stopped():
    model, finished, taught = model_of_tests(), {}, []
    ids = torch.randint(250, (2, 300), generator=torch.Generator().manual_seed(0))

    def teach(text, seed):
        if len(taught) == 2:
            raise KeyboardInterrupt
        taught.append(seed)
        return {"mean": text.keys.mean((0, 2))}

    with pytest.raises(KeyboardInterrupt):
        learn(model, ids, {"mine": teach}, [0, 1, 2], finished, seed=3)
    assert len(json.loads(json.dumps(finished))) == 2  # as a work folder keeps it
    shares = []
    again = {"mine": lambda text, seed: {"mean": text.keys.mean((0, 2)) + 1}}
    learned, seconds = learn(
        model, ids, again, [0, 1, 2], finished, seed=3, progress=lambda share, what: shares.append((share, what))
    )
    assert shares == [(1.0, "mine, layer 2")]
    texts = collect(model, ids, [0, 1, 2])
    for layer in range(3):
        assert torch.equal(learned["mine"][layer]["mean"], texts[layer].keys.mean((0, 2)) + (layer == 2)), layer
    assert seconds["mine"] == sum(part["seconds"] for part in finished.values()) > 0
    other = learn(model, ids, again, [0], finished, seed=4)[0]["mine"][0]["mean"]
    assert torch.equal(other, texts[0].keys.mean((0, 2)) + 1)  # another seed learns anew


def test_methods_that_learn_are_asked_for_by_name():
    learning = [name for name, method in METHODS.items() if method.learns]
    assert learning == ["spotlight", "hata", "compresskv"]
    assert list(learners(METHODS)) == learning  # the table says what the classes have
    model = model_of_tests()
    corpora = open_corpora(["demo"])
    comparison = Comparison(["text"], [256], [0.1], ["compresskv", "random"], 1, corpora, rules=HARD)
    with pytest.raises(InputError, match="method 'compresskv' learns from text: pass what "):
        evaluate(model, tiny.tokenizer(), None, comparison)
    lessons = draw_lessons(model.config, tiny.tokenizer(), corpora, 0)
    assert lessons.shape == (16, 1024)
    learned, seconds = learn_methods(model, lessons[:1, :256], ["compresskv", "random"], comparison)
    rows = evaluate(model, tiny.tokenizer(), None, comparison, learned=learned)
    assert [row["method"] for row in rows] == ["compresskv", "random"]
    assert list(seconds) == ["compresskv"]
    with pytest.raises(InputError, match="learn from texts of at least 256 tokens: the model's limit is 128"):
        draw_lessons(tiny.config(max_position_embeddings=128), tiny.tokenizer(), corpora, 0)


def test_nothing_is_kept_of_a_method_that_has_changed(own):
    from bpc_cli.eval_work import made_with

    sys.path.insert(0, str(own))
    model, methods = model_of_tests(), ("random", "own_methods:Lengths")
    before = made_with(model, "tiny", None, {}, methods)
    assert made_with(model, "tiny", None, {}, methods) == before
    assert made_with(model, "tiny", None, {}, ["random"])["own"] == {}
    (own / "own_methods.py").write_text(OWN.replace("longest", "shortest"))
    assert made_with(model, "tiny", None, {}, methods) != before
