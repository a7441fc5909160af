"""Problems, and prompts that hide them in text."""

import random
import re
from collections import Counter

import pytest
import tiny

from bpc_calib import InputError
from bpc_calib.evaluation.prompts import OPENING, draw_prompts, hide, largest, make_frame
from bpc_calib.evaluation.tasks import GROWING, RULER, TASKS, needle, score
from bpc_calib.text import made_text


def problems(task, count=50):
    return [TASKS[task](random.Random(f"{task}/{i}")) for i in range(count)]


@pytest.mark.parametrize("task", TASKS)
def test_the_statements_and_the_answer_contain_the_wanted_parts(task):
    for problem in problems(task):
        assert score(problem, problem.answer) == 1.0
        assert score(problem, "") == 0.0
        text = "".join(problem.statements)
        assert all(part in text for part in problem.wanted)
        if task not in ("tracking", "copying"):  # a variable may be part of a word, and prose has common words
            assert not any(part in problem.question + problem.start for part in problem.wanted)
    assert TASKS[task](random.Random(7)) == TASKS[task](random.Random(7))
    assert len({problem.answer for problem in problems(task)}) > 40


def test_half_of_the_wanted_parts_score_one_half():
    problem = problems("multi-value")[0]
    assert score(problem, " ".join(problem.wanted[:2])) == 0.5


def test_the_question_about_a_needle_has_its_name_and_attribute():
    for problem in problems("needle"):
        assert len(problem.statements) == 8
        answers = [s for s in problem.statements if s.startswith(problem.start)]
        assert answers == [problem.statements[0]]
        assert problem.question == problem.start.replace(" The", " What is the").removesuffix(" is") + "?"
        assert problem.statements[0].endswith(f"{problem.wanted[0]}.")


def test_generated_text_never_contains_a_name_of_a_problem():
    held_out = {
        name for problem in problems("needle") for name in re.findall(r" of (\w+ \w+) is", "".join(problem.statements))
    }
    assert held_out
    assert all(map(made_text.is_held_out, held_out))
    rng = random.Random(0)
    text = "".join(made_text.document(rng, style) for style in made_text.STYLES for _ in range(20))
    in_text = set(re.findall(r" of (\w+ \w+) is", text))
    assert len(in_text) > 100
    assert not any(map(made_text.is_held_out, in_text))
    share = sum(made_text.is_held_out(f"{a} {b}") for a in made_text.FIRST for b in made_text.SECOND) / 48**2
    assert 0.09 < share < 0.16


def test_the_names_of_multi_key_share_words():
    for problem in problems("multi-key"):
        names = re.findall(r" of (\w+) (\w+) is", "".join(problem.statements))
        assert len(set(names)) == 16
        assert max(Counter(first for first, _ in names).values()) > 1


def test_a_chain_of_variables_leads_to_the_value():
    for problem in problems("tracking"):
        values = dict(re.findall(r" VAR (\w+) = (?:VAR )?(\w+)\.", "".join(problem.statements)))
        value = re.search(r"\d{6}", problem.question)[0]

        def follow(name, values=values):
            return follow(values[name]) if name in values else name

        assert {name for name in values if follow(name) == value} == set(problem.wanted)
        seen = set()
        for statement in problem.statements:  # every variable has a value before its use
            name, source = re.match(r" VAR (\w+) = (?:VAR )?(\w+)\.", statement).groups()
            assert source in seen or source.isdecimal()
            seen.add(name)


@pytest.mark.parametrize(("task", "count"), [("common-words", 5), ("frequent-words", 3)])
def test_the_wanted_words_are_the_most_common(task, count):
    sizes = [GROWING[task] + step for step in (0, 1, 7, 60, 500)]
    grown = [TASKS[task](random.Random(size), size=size) for size in sizes]
    for problem in [*problems(task), *grown]:
        words = Counter(re.findall(r"\w+", "".join(problem.statements).replace("Words", "")))
        ranked = words.most_common()
        assert {word for word, _ in ranked[:count]} == set(problem.wanted)
        assert ranked[count - 1][1] > ranked[count][1]


def test_the_answer_of_a_haystack_is_the_value_of_one_key():
    for task in ("haystack", "uuids", "key-values"):
        for problem in problems(task):
            found = [each for each in problem.statements if each.startswith(problem.start)]
            assert len(found) == 1
            assert found[0].removeprefix(problem.start).startswith(problem.answer.rstrip("."))
    places = [
        problem.statements.index(next(s for s in problem.statements if s.startswith(problem.start))) // 16
        for problem in problems("haystack")
    ]
    assert set(places) == {0, 1, 2, 3}  # in every quarter


def test_a_haystack_has_at_most_all_pairs_of_names_and_attributes():
    problem = TASKS["haystack"](random.Random(0), size=20_000)
    assert len(set(problem.statements)) == len(problem.statements) == 48**2 * 6


def test_the_answer_of_a_question_about_passages_needs_two_of_them():
    for problem in problems("passages"):
        text = "".join(problem.statements)
        asked = re.search(r"friend of (\w+ \w+) live", problem.question)[1]
        assert made_text.is_held_out(asked)
        friend = re.search(rf"best friend of {asked} is (\w+ \w+)\.", text)[1]
        assert friend != asked
        assert re.search(rf"{friend} lives in the (\w+ \w+)\.", text)[1] == problem.wanted[0]
        about = [{name for name in (asked, friend) if f" {name} lives" in each} for each in problem.statements]
        assert max(map(len, about)) == 1


def test_a_copy_is_scored_by_the_words_at_their_places():
    problem = problems("copying")[0]
    assert (
        sum(each == problem.start.replace(" Passage", "\nPassage") + problem.answer for each in problem.statements) == 1
    )
    words = problem.answer.split()
    assert score(problem, " ".join(words[: len(words) // 2])) == len(words[: len(words) // 2]) / len(words)
    assert score(problem, " ".join(words[1:])) < 0.5
    assert score(problem, " ".join([*words, "more"])) == 1.0


@pytest.mark.parametrize("task", GROWING)
def test_a_growing_task_fills_the_prompt(task):
    tokenizer = tiny.tokenizer()
    counts = []
    for length in (2500, 5000):
        prompts = draw_prompts(task, tokenizer, length, 2, seed=0)
        assert {len(prompt.ids) + max(each.answer for each in prompts) for prompt in prompts} == {length}
        for prompt in prompts:
            statements = prompt.problem.statements
            filler = len(prompt.ids) - prompt.question - len("".join(statements))
            assert OPENING <= filler <= OPENING + max(length // 32, 2 * max(map(len, statements)))
        counts.append(len(prompts[0].problem.statements))
    assert counts[1] > 1.5 * counts[0]
    assert prompts == draw_prompts(task, tokenizer, length, 2, seed=0)


def test_a_growing_task_needs_room_for_its_smallest_size():
    assert largest(TASKS["copying"], "0", 1, tiny.tokenizer(), 100) == 1
    with pytest.raises(InputError, match=r"^task 'copying' at 100 tokens: the question"):
        draw_prompts("copying", tiny.tokenizer(), 100, 1, seed=0)


def test_generated_sums_are_correct():
    rng = random.Random(0)
    for _ in range(300):
        for a, b, c in re.findall(r"(\d+) \+ (\d+) = (\d+)", made_text.proof(rng)):
            assert int(a) + int(b) == int(c)


def test_ruler_names_the_tasks_that_follow_it():
    assert set(TASKS) - set(RULER) == {"needle", "key-values", "copying"}
    assert set(GROWING) < set(TASKS)


def test_documents_ask_only_about_earlier_facts():
    for style in made_text.STYLES:
        text = made_text.document(random.Random(1), style)
        assert text == made_text.document(random.Random(1), style)
        answers = re.findall(r"\? (The [\w ]+ is \d{6})\.", text)
        assert answers
        for sentence in answers:
            assert text.index(sentence) < text.index(f"? {sentence}")


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("bos", [True, False])
def test_a_prompt_has_the_exact_length_and_all_statements(task, bos):
    tokenizer = tiny.tokenizer(bos=bos)
    problem = TASKS[task](random.Random(1))
    for length in (4096, 4097):
        prompt = hide(problem, tokenizer, length, random.Random(2))
        assert len(prompt.ids) == length
        assert prompt.ids.count(257) == bos
        text = tokenizer.decode(prompt.ids, skip_special_tokens=True)
        assert text.endswith(problem.question + problem.start)
        places = [text.index(statement) for statement in dict.fromkeys(problem.statements)]
        assert places == sorted(places)
        assert tokenizer.decode(prompt.ids[-prompt.question :]) == problem.question + problem.start


def test_a_chat_template_stands_around_text_and_question():
    tokenizer = tiny.tokenizer()
    raw = make_frame(tokenizer)
    tokenizer.chat_template = "{{ bos_token }}<user>{{ messages[0].content | trim }}</user><assistant>"
    assert make_frame(tokenizer, raw=True) == raw
    for task in ("needle", "tracking", "frequent-words"):
        (prompt,) = draw_prompts(task, tokenizer, 3000, 1, 0, make_frame(tokenizer))
        assert len(prompt.ids) + prompt.answer == 3000
        assert prompt.ids.count(257) == 1
        problem, text = prompt.problem, tokenizer.decode(prompt.ids)
        assert text.startswith("<s><user>")
        end = f"{problem.question}</user><assistant>{problem.start.lstrip()}"
        assert text.endswith(end)
        assert tokenizer.decode(prompt.ids[-prompt.question :]) == end
        assert all(statement in text for statement in problem.statements)


@pytest.mark.parametrize(
    ("template", "message"),
    [("{{ raise_exception('no user') }}", "cannot be used: no user"), ("hello", "does not show the user's message")],
)
def test_a_chat_template_that_cannot_be_used_is_refused(template, message):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(InputError, match=f"^the model's chat template {message}.*--raw"):
        make_frame(tokenizer)


def test_a_prompt_has_the_exact_length_if_tokens_span_sentences():
    """Real tokenizers merge across sentences: the parts of a text have more tokens than the whole text."""
    tokenizer = tiny.merging_tokenizer()
    parts = ["\nif x:\n", "\nfor y:\n"]
    assert len(tokenizer("".join(parts))["input_ids"]) < sum(len(tokenizer(part)["input_ids"]) for part in parts)
    problem = needle(random.Random(1))
    prompt = hide(problem, tokenizer, 40_000, random.Random(2))
    assert len(prompt.ids) == 40_000
    text = tokenizer.decode(prompt.ids)
    assert all(statement in text for statement in problem.statements)
    assert text.endswith(problem.question + problem.start)


def test_depth_is_the_place_of_the_needle():
    problem = needle(random.Random(1))
    for depth in (0.0, 0.25, 0.5, 1.0):
        prompt = hide(problem, tiny.tokenizer(), 8000, random.Random(2), depth)
        text = tiny.tokenizer().decode(prompt.ids)
        assert text.index(problem.statements[0]) / len(text) == pytest.approx(depth, abs=0.03)


def test_too_little_room_for_the_question():
    with pytest.raises(InputError, match=r"^the question and its statements need \d+ more$"):
        hide(needle(random.Random(1)), tiny.tokenizer(), 100, random.Random(2))
