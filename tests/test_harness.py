"""Tasks of lm_eval that a cache decodes: likelihoods, generation, rolling likelihoods."""

import json
from pathlib import Path

import pytest
import tiny
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from bpc_calib import BPCCache, InputError, enable
from bpc_calib.evaluation.comparison import HARD, Comparison, make_cache

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from bpc_calib.evaluation import harness
from bpc_calib.evaluation.harness import harness_model, prepare

CONTEXT = "the old stone bridge over the river saw a small lantern and the garden"
ANSWER = " carried the coin"


@pytest.fixture(scope="module")
def model():
    made = tiny.model(max_position_embeddings=512)
    enable(made)
    return made


def adapter(model, method="full", budget=3):
    return harness_model(
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

    counted = harness_model(model, tiny.tokenizer(), lambda: Counting(model.config, budget=3, **HARD))
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


def test_the_command_runs_tasks_of_lm_eval(quick, bpc, model_folder, tasks):
    names = ",".join(f"lm_eval:{path}" for path in tasks)
    words = (
        "eval",
        "-m",
        model_folder,
        "--preset",
        "hard",
        "--methods",
        "full,bpc-online",
        "--budgets",
        "10",
        "--prompts",
        "3",
    )
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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no.yaml", "there is no such file"),
        ("no.yml", "no.yml: lm_eval reads a task only from a file whose name ends in .yaml"),
        # lm_eval reads all of its tasks.
        pytest.param("no_such_task", "lm_eval has no task 'no_such_task'", marks=pytest.mark.slow),
    ],
)
def test_unknown_tasks_of_lm_eval_are_refused(bpc, model_folder, name, message):
    ran = bpc("eval", "-m", model_folder, "--tasks", f"lm_eval:{name}")
    assert ran.code == 1
    assert ran.err.startswith("Error: ")
    assert message in ran.err
    assert len(ran.err.splitlines()) == 1


def test_a_file_with_another_name_than_its_task_is_refused(tasks):
    other = tasks[0].rename(tasks[0].with_name("other.yaml"))
    with pytest.raises(InputError, match=r"other\.yaml does not define a task named 'other': give the file the name"):
        harness.check([str(other)])


def test_git_is_not_asked_outside_a_repository(tasks, tmp_path, monkeypatch, capfd, model):
    monkeypatch.chdir(tmp_path)  # no repository
    [task] = prepare([str(tasks[0])], tiny.tokenizer(), [64], seed=0)
    capfd.readouterr()
    [row] = harness.run(model, tiny.tokenizer(), None, task, ["full"], Comparison(budgets=[4], prompts=1))
    assert row["prompts"] == 1
    assert "git" not in capfd.readouterr().err


RULER = Path(pytest.importorskip("lm_eval").__file__).parent / "tasks" / "ruler"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Listening:
    """A tokenizer that remembers the texts of prompts."""

    def __init__(self, tokenizer):
        self.tokenizer, self.heard = tokenizer, []

    def __call__(self, text, **more):
        self.heard.append(text)
        return self.tokenizer(text, **more)

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)


class Recorder(HFLM):
    """lm_eval's own model, which remembers the texts of prompts and answers nothing."""

    def generate_until(self, requests, disable_tqdm=False):
        self.heard = [request.args[0] for request in requests]
        return [""] * len(requests)


def prompts_of_lm_eval(model, tokenizer, folder, task, length, chat):
    """The prompts of lm_eval's own run, as `lm_eval --seed 5 --metadata ...` makes them."""
    tokenizer.save_pretrained(folder)
    path = Path(task)
    manager = TaskManager(
        include_path=str(path.parent) if path.suffix else None,
        include_defaults=not path.suffix,
        metadata={"tokenizer": str(folder), "max_seq_lengths": [length]},
    )
    recorder = Recorder(pretrained=model, tokenizer=tokenizer, backend="causal")
    seeds = {f"{name}_seed": 5 for name in ("random", "numpy_random", "torch_random", "fewshot_random")}
    simple_evaluate(
        recorder,
        tasks=[path.stem],
        task_manager=manager,
        limit=2,
        apply_chat_template=chat,
        bootstrap_iters=0,
        verbosity="ERROR",
        **seeds,
    )
    return recorder.heard


@pytest.fixture
def quick(monkeypatch):
    """lm_eval describes the machine after every run, which takes seconds."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


def words_tokenizer():
    """A tokenizer with one token per word: with one per byte, the examples of ruler_vt do not fit their 500 tokens."""
    raw = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", eos_token="</s>")


def check_prompts(model, folder, tokenizer, tasks, lengths, chat=False):
    tokenizer.chat_template = TEMPLATE if chat else None
    expected = [
        prompts_of_lm_eval(model, tokenizer, folder, task, length, chat) for task in tasks for length in lengths
    ]
    listening = Listening(tokenizer)
    for task, prompts in zip(prepare(tasks, listening, lengths, seed=5), expected, strict=True):
        listening.heard.clear()
        task.tasks[0].config.generation_kwargs["max_gen_toks"] = 2  # not 128: the prompts are what counts here
        comparison = Comparison(budgets=[0.1], prompts=2, seed=5, rules=HARD)
        rows = harness.run(model, listening, None, task, ["full", "bpc-online"], comparison)
        assert len(prompts) == 2
        assert listening.heard == prompts * 2  # the same for both methods
        assert [row["method"] for row in rows] == ["full", "bpc-online"]
        assert {(row["tokens"], row["prompts"]) for row in rows} == {(task.tokens, 2)}
        assert all(f"{task.tokens},none" in row["metrics"] for row in rows)
        assert all(value >= 0 for row in rows for value in row["metrics"].values())
    return expected


@pytest.mark.parametrize(
    ("names", "chat"),
    [
        # Two tasks more: `make test-slow`, because lm_eval makes 500 prompts of each.
        pytest.param(("niah_single_1", "niah_multikey_3"), False, id="raw", marks=pytest.mark.slow),
        pytest.param(("niah_multikey_2",), True, id="chat", marks=pytest.mark.slow),
    ],
)
def test_the_prompts_of_rulers_tasks_are_those_of_lm_eval(tmp_path, quick, names, chat):
    """By the paths of their files: lm_eval reads all of its tasks to find a name."""
    model = tiny.model(max_position_embeddings=1024)
    enable(model)
    tasks = [f"{RULER / name}.yaml" for name in names]
    for prompts in check_prompts(model, tmp_path, tiny.tokenizer(), tasks, [800], chat):
        assert all((prompt.startswith("<user>"), "<assistant>" in prompt) == (chat, chat) for prompt in prompts)
        assert all(400 < len(prompt) <= 800 for prompt in prompts)


@pytest.mark.slow  # lm_eval reads all of its tasks six times
@pytest.mark.rare
def test_the_prompts_of_rulers_other_tasks_without_a_network_are_those_of_lm_eval(tmp_path, quick):
    model = tiny.model(max_position_embeddings=4096)
    enable(model)
    check_prompts(model, tmp_path, words_tokenizer(), ["ruler_vt", "ruler_cwe", "ruler_fwe"], [1024])


def test_a_task_whose_data_cannot_be_loaded_is_one_line(tmp_path):
    (tmp_path / "broken.yaml").write_text(
        f"task: broken\ndataset_path: {tmp_path / 'none'}\noutput_type: generate_until\n"
    )
    with pytest.raises(InputError, match=r"^lm_eval:.*broken\.yaml: its data cannot be loaded: [^\n]+$"):
        prepare([str(tmp_path / "broken.yaml")], tiny.tokenizer(), [512], seed=0)
