"""Tasks of lm_eval that a cache decodes: likelihoods, generation, rolling likelihoods."""

import json

import pytest
import tiny
import torch

from bpc_calib import BPCCache, InputError, enable
from bpc_calib.evaluation.compared_cache import make_cache
from bpc_calib.evaluation.comparison import HARD

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance

from bpc_calib.evaluation import harness

CONTEXT = "the old stone bridge over the river saw a small lantern and the garden"
ANSWER = " carried the coin"


@pytest.fixture(scope="module")
def model():
    made = tiny.model(max_position_embeddings=512)
    enable(made)
    return made


def adapter(model, method="full", budget=3):
    return harness.harness_model(
        model, tiny.tokenizer(), lambda: make_cache(method, model.config, None, budget, seed=0, **HARD)
    )


def ask(kind, *arguments):
    return [Instance(request_type=kind, doc={}, arguments=arguments, idx=0)]


def by_hand(model, text, answer):
    """Return the log-likelihood of the answer in one pass, and whether each of its tokens was the most likely."""
    tokenizer = tiny.tokenizer()
    ids = tokenizer(text + answer, return_tensors="pt")["input_ids"]
    count = len(answer.encode())
    with torch.inference_mode():
        logits = model(ids).logits[0, -count - 1 : -1].log_softmax(-1)
    wanted = ids[0, -count:]
    return float(logits.gather(-1, wanted[:, None]).sum()), bool((logits.argmax(-1) == wanted).all())


def test_likelihoods(model):
    [(found, greedy)] = adapter(model).loglikelihood(ask("loglikelihood", CONTEXT, ANSWER))
    expected, all_likeliest = by_hand(model, CONTEXT, ANSWER)
    assert found == pytest.approx(expected, abs=1e-3)
    assert greedy == all_likeliest
    [(alone, _)] = adapter(model).loglikelihood(ask("loglikelihood", "", ANSWER))
    assert alone == pytest.approx(by_hand(model, "", ANSWER)[0], abs=1e-3)


@pytest.mark.parametrize("method", ["bpc-online", "snapkv", "pyramidkv", "quest"])
def test_short_contexts(model, method):
    """With one or two tokens of context there is almost no prefill, and everything is decoded."""
    for context in ("", "a"):
        [(found, _)] = adapter(model, method).loglikelihood(ask("loglikelihood", context, ANSWER))
        assert found < 0
    assert adapter(model, method)._loglikelihood_tokens([("", [257], [])]) == [(0.0, True)]


def test_generation_ends_before_a_stop_string(model):
    tokenizer = tiny.tokenizer()
    ids = tokenizer(CONTEXT, return_tensors="pt")["input_ids"]
    made = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=256)[0, ids.shape[1] :]
    expected = tokenizer.decode(made, skip_special_tokens=True)
    [answer] = adapter(model).generate_until(ask("generate_until", CONTEXT, {"until": [], "max_gen_toks": 12}))
    assert answer == expected
    stop = expected[5]
    [answer] = adapter(model).generate_until(ask("generate_until", CONTEXT, {"until": [stop], "max_gen_toks": 12}))
    assert answer == expected[: expected.index(stop)]
    with pytest.raises(InputError, match="samples its answers"):
        adapter(model).generate_until(ask("generate_until", CONTEXT, {"do_sample": True, "temperature": 0.7}))


def test_rolling_likelihoods(model):
    text = CONTEXT * 10  # longer than the model's limit: two windows
    [found] = adapter(model).loglikelihood_rolling(ask("loglikelihood_rolling", text))
    tokens = tiny.tokenizer()(text)["input_ids"]
    with torch.inference_mode():
        # The first window scores the 512 tokens after BOS; the last window is full and scores only its rest.
        first = model(torch.tensor([tokens[:512]])).logits[0].log_softmax(-1)
        second = model(torch.tensor([tokens[-513:-1]])).logits[0].log_softmax(-1)
    wanted = torch.tensor(tokens[1:])
    rest = len(wanted) - 512
    expected = first.gather(-1, wanted[:512, None]).sum() + second[-rest:].gather(-1, wanted[-rest:, None]).sum()
    assert found == pytest.approx(float(expected), rel=1e-3)
    [short] = adapter(model).loglikelihood_rolling(ask("loglikelihood_rolling", CONTEXT))
    assert short == pytest.approx(by_hand(model, "", CONTEXT)[0], abs=1e-2)


def test_every_answer_is_decoded(model):
    """Attending to only three tokens must change the likelihood, and generation feeds one token per step."""
    [(full, _)] = adapter(model).loglikelihood(ask("loglikelihood", CONTEXT, ANSWER))
    [(few, _)] = adapter(model, "bpc-online").loglikelihood(ask("loglikelihood", CONTEXT, ANSWER))
    assert abs(full - few) > 0.1
    steps = []

    class Counting(BPCCache):
        def update(self, key_states, *arguments, **more):
            steps.append(key_states.shape[2])
            return super().update(key_states, *arguments, **more)

    counted = harness.harness_model(model, tiny.tokenizer(), lambda: Counting(model.config, budget=3, **HARD))
    counted.generate_until(ask("generate_until", CONTEXT, {"until": [], "max_gen_toks": 5}))
    prefix = len(CONTEXT.encode())  # with BOS, without the last byte
    assert steps == [prefix] * 3 + [1] * 15


@pytest.fixture
def tasks(tmp_path):
    """Write a multiple-choice task and a generation task as YAML files, with a JSON file of documents."""
    documents = [{"question": f"{CONTEXT} {i}", "choices": [" yes", " no"], "answer": i % 2} for i in range(4)]
    data = tmp_path / "documents.json"
    data.write_text("\n".join(map(json.dumps, documents)))
    common = f"dataset_path: json\ndataset_kwargs:\n  data_files: {data}\ntest_split: train\ndoc_to_text: question\n"
    choice = tmp_path / "tiny_choice.yaml"
    choice.write_text(
        f"task: tiny_choice\n{common}output_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: answer\n"
        "metric_list:\n  - metric: acc\n"
    )
    answer = tmp_path / "tiny_answer.yaml"
    answer.write_text(
        f'task: tiny_answer\n{common}output_type: generate_until\ndoc_to_target: "{{{{choices[answer]}}}}"\n'
        "generation_kwargs:\n  until: ['.']\n  max_gen_toks: 4\nmetric_list:\n  - metric: exact_match\n"
    )
    return choice, answer


def test_the_command_runs_tasks_of_lm_eval(bpc, model_folder, tasks):
    names = ",".join(f"lm_eval:{path}" for path in tasks)
    words = ("eval", "-m", model_folder, "--methods", "full,bpc-online", "--budgets", "10", "--prompts", "3")
    ran = bpc(*words, "--tasks", names, "--json")
    assert ran.code == 0, ran.err
    rows = json.loads(ran.out)["rows"]
    assert [(row["task"], row["method"], row["prompts"], min(row["metrics"])) for row in rows] == [
        ("lm_eval:tiny_choice", "full", 3, "acc,none"),
        ("lm_eval:tiny_choice", "bpc-online", 3, "acc,none"),
        ("lm_eval:tiny_answer", "full", 3, "exact_match,none"),
        ("lm_eval:tiny_answer", "bpc-online", 3, "exact_match,none"),
    ]
    output = tasks[0].parent / "result.json"
    ran = bpc(*words, "--tasks", names, "-o", output)
    assert "lm_eval:tiny_choice, 3 documents" in ran.out
    assert json.loads(output.read_text())["rows"] == rows


def test_unknown_tasks_of_lm_eval_are_refused(bpc, model_folder):
    for name, message in (("no_such_task", "lm_eval has no task 'no_such_task'"), ("no.yaml", "there is no such file")):
        ran = bpc("eval", "-m", model_folder, "--tasks", f"lm_eval:{name}")
        assert ran.code == 1
        assert ran.err.startswith("Error: ")
        assert message in ran.err
        assert len(ran.err.splitlines()) == 1
