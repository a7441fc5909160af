"""`bpc chat`: the kept cache, what is printed, Ctrl-C, and what is refused."""

import fcntl
import io
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import termios
from contextlib import ExitStack, suppress
from dataclasses import replace

import pytest
import tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

from bpc_calib import BPCCache, InputError, enable, exact_decoding
from bpc_calib.demo import DEMO_MODEL
from bpc_cli.chat import Conversation, _talk
from bpc_cli.console import note
from bpc_cli.decoding import decode, make_decoder
from bpc_cli.kept_cache import check_cache_file
from bpc_cli.keyboard import stopping_on_interrupt
from bpc_cli.prompt import message, template_tokens

TEMPLATE = "<s>{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
FORGETFUL = TEMPLATE.replace("m.content", "(m.content if m.role == 'user' else m.content[-3:])")
MESSAGES = ("the old stone bridge", "who saw the lantern?", "and over the river?")
GREEDY = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
# Only letters and blanks, so that an answer is written in the same tokens again.
OTHERS = [i for i in range(tiny.VOCAB) if i not in {*range(65, 91), 188}]
RULES = {"full": {"budget": 1.0}, "few": {"budget": 5, "min_tokens": 1, "dense_layers": ()}}


def save(folder, family="llama", template=TEMPLATE, **changes):
    tiny.save(folder, family, **({"max_position_embeddings": 512} | changes))
    return save_template(folder, template)


def save_template(folder, template=TEMPLATE):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model") / "chatty")


@pytest.fixture
def converse(folder):
    """A conversation of the model in a folder, the tiny Llama without one."""

    def make(where=folder, rules=RULES["full"], limit=512, system=None):
        model, tokenizer = AutoModelForCausalLM.from_pretrained(where), AutoTokenizer.from_pretrained(where)
        enable(model)
        opening = [] if system is None else [message("system", system)]
        decoder = make_decoder(model, tokenizer, GREEDY, seed=0)
        return Conversation(decoder, BPCCache(model.config, **rules), "chatty", limit, opening)

    return make


def fresh(conversation, messages, new, **more):
    """The tokens of a run over the whole conversation, with a cache of its own."""
    decoder = conversation.decoder
    ids = template_tokens(decoder.tokenizer, messages, "chatty")
    cache = BPCCache(decoder.model.config, budget=1.0)
    return decode(decoder, ids, cache, new, show=False, **more)["tokens"]


@pytest.mark.parametrize(
    ("family", "template", "kept"),
    [("llama", TEMPLATE, True), ("llama", FORGETFUL, True), ("gemma3_text", FORGETFUL, False)],
    ids=["all kept", "cropped", "begun anew"],
)
def test_turns_with_the_kept_cache_equal_fresh_runs(converse, tmp_path, family, template, kept):
    """Also where the template shortens earlier answers, and where a sliding window cannot be cropped."""
    conversation = converse(save(tmp_path / "chatty", family, template), system="be kind")
    for text in MESSAGES:
        messages = [*conversation.messages, message("user", text)]
        turn = conversation.ask(text, 20, show=False)
        assert turn["tokens"] == fresh(conversation, messages, 20)
        assert (turn["prefill_tokens"] < turn["prompt_tokens"]) is (kept and text != MESSAGES[0])
        assert conversation.cache.get_seq_length() == turn["prompt_tokens"] + len(turn["tokens"]) - 1
    assert [each["role"] for each in conversation.messages] == ["system", *["user", "assistant"] * 3]


def test_turns_in_static_steps_are_the_same(converse):
    """As on a GPU, where they are captured."""
    conversations = [converse(rules=RULES["few"]) for _ in range(2)]
    conversations[1].decoder = replace(conversations[1].decoder, static=True)
    for text in MESSAGES:
        one, other = (each.ask(text, 20, show=False) for each in conversations)
        for name in ("tokens", "prefill_tokens", "kv_bytes_share"):
            assert one[name] == other[name]


def test_exact_turns_equal_those_of_full_attention(converse):
    exact, full = converse(rules=RULES["few"]), converse(rules=RULES["full"])
    exact.decoder = replace(exact.decoder, verifying={"custom_generate": exact_decoding, "draft": 3})
    checked = 0
    for text in MESSAGES:
        one, other = (each.ask(text, 20, show=False) for each in (exact, full))
        for name in ("tokens", "text", "prefill_tokens", "prompt_tokens", "ended_by"):
            assert one[name] == other[name]
        assert one["agreement"]["checked"] > checked  # of the conversation
        checked = one["agreement"]["checked"]


def test_a_turn_feeds_only_what_is_new(converse):
    conversation = converse(rules=RULES["few"])
    fed = []
    conversation.decoder.model.register_forward_pre_hook(
        lambda module, words, named: fed.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    held = 0
    for text in MESSAGES:
        fed.clear()
        turn = conversation.ask(text, 20, show=False, suppress_tokens=OTHERS)
        assert fed == [turn["prefill_tokens"]] + [1] * 19
        assert turn["prefill_tokens"] == turn["prompt_tokens"] - held
        # The last token of the answer, "<user>", the text, and "<assistant>"; before them once "<s>".
        assert turn["prefill_tokens"] == 1 + len(f"<user>{text}<assistant>")
        assert turn["kv_bytes_share"] < 0.5
        held = turn["prompt_tokens"] + 19
    tokens = conversation.tokens
    conversation.reset()
    assert conversation.cache.get_seq_length() == 0
    again = conversation.ask(MESSAGES[0], 20, show=False, suppress_tokens=OTHERS)
    assert tokens[: len(conversation.tokens)] == conversation.tokens
    assert again["prefill_tokens"] == again["prompt_tokens"]


def at_step(conversation, step, act):
    """Call `act` in this forward pass of the model, counted from the prefill."""
    calls = []

    def hook(*_):
        calls.append(None)
        if len(calls) == step:
            act()

    return conversation.decoder.model.model.layers[1].register_forward_hook(hook)


def test_ctrl_c_stops_an_answer_and_keeps_the_conversation(converse):
    conversation = converse()
    before = signal.getsignal(signal.SIGINT)
    with stopping_on_interrupt() as criterion, at_step(conversation, 4, lambda: os.kill(os.getpid(), signal.SIGINT)):
        turn = conversation.ask(MESSAGES[0], 20, show=False, stopping_criteria=[criterion])
    assert signal.getsignal(signal.SIGINT) is before
    assert (turn["ended_by"], len(turn["tokens"])) == ("interrupt", 4)
    assert conversation.messages[-1] == message("assistant", turn["text"])
    messages = [*conversation.messages, message("user", MESSAGES[1])]
    assert conversation.ask(MESSAGES[1], 20, show=False)["tokens"] == fresh(conversation, messages, 20)


def test_a_second_ctrl_c_forgets_the_message(converse, tmp_path):
    conversation = converse()
    conversation.ask(MESSAGES[0], 20, show=False)
    messages = conversation.messages

    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with stopping_on_interrupt() as criterion, at_step(conversation, 4, twice), pytest.raises(KeyboardInterrupt):
        conversation.ask(MESSAGES[1], 20, show=False, stopping_criteria=[criterion])
    assert conversation.messages == messages
    conversation.save(tmp_path / "talk.cache", quiet=True)
    saved = converse()
    saved.resume(tmp_path / "talk.cache", check_cache_file(tmp_path / "talk.cache")["messages"])
    assert saved.messages == messages
    turn, again = (each.ask(MESSAGES[2], 20, show=False) for each in (conversation, saved))
    assert turn["tokens"] == again["tokens"]
    assert turn["tokens"] == fresh(conversation, [*messages, message("user", MESSAGES[2])], 20)
    assert turn["prefill_tokens"] < turn["prompt_tokens"]  # the cache kept the first turn


def test_the_limit_of_the_model(converse):
    conversation = converse(limit=60)
    turn = conversation.ask(MESSAGES[0], 40, show=False)
    assert (turn["prompt_tokens"], len(turn["tokens"]), turn["at_limit"]) == (38, 22, True)
    messages, held = conversation.messages, conversation.cache.get_seq_length()
    with pytest.raises(InputError, match=r"has \d+ tokens, and chatty takes 60: send a shorter one, or begin anew"):
        conversation.ask("x", 40, show=False)
    assert (conversation.messages, conversation.cache.get_seq_length()) == (messages, held)


def lines(ran):
    assert ran.code == 0, ran.err
    return [json.loads(line) for line in ran.out.splitlines()]


def test_each_line_of_a_pipe_is_a_message(bpc, folder, converse):
    words = ("chat", "-m", folder, "--max-new-tokens", "12", "--budget", "1.0")
    turns = lines(bpc(*words, "--json", stdin="\n".join(MESSAGES[:2]) + "\n\n/reset\n" + MESSAGES[0]))
    conversation = converse()
    expected = [conversation.ask(text, 12, show=False) for text in MESSAGES[:2]]
    assert [turn["tokens"] for turn in turns] == [turn["tokens"] for turn in (*expected, expected[0])]
    assert [turn["message"] for turn in turns] == [*MESSAGES[:2], MESSAGES[0]]
    assert turns[1]["prefill_tokens"] < turns[1]["prompt_tokens"]
    assert turns[2]["prefill_tokens"] == turns[2]["prompt_tokens"] == turns[0]["prompt_tokens"]
    assert turns[0]["kv_bytes_share"] == 1

    ran = bpc(*words, stdin=f"{MESSAGES[0]}\n/nothing\n/quit\n{MESSAGES[1]}\n")
    shown = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in turns[0]["text"]) + "\n"
    assert (ran.code, ran.out) == (0, shown)
    assert ran.err.count("12 tokens, ") == 1
    assert "100.0% of the KV bytes of full attention" in ran.err
    assert "/nothing is no command: /reset begins anew, /quit or Ctrl-D ends the chat" in ran.err
    assert "The answer stops after 12 tokens: --max-new-tokens allows more" in ran.err
    assert bpc(*words, "--quiet", stdin=MESSAGES[0]) == (0, shown, "")


def test_settings_reach_the_answers(bpc, folder, converse):
    words = ("chat", "-m", folder, "--max-new-tokens", "12", "--budget", "5", "--min-tokens", "1", "--json")
    few = lines(bpc(*words, "--dense-layers", "none", "--system", "be kind", stdin=MESSAGES[0]))
    expected = converse(rules=RULES["few"], system="be kind").ask(MESSAGES[0], 12, show=False)
    assert few[0]["tokens"] == expected["tokens"]
    assert few[0]["kv_bytes_parts"] == expected["kv_bytes_parts"]
    sampled = [
        lines(bpc(*words, "--temperature", "2", "--top-p", p, stdin=MESSAGES[0]))[0] for p in ("1e-9", "0.9", "0.9")
    ]
    assert sampled[0]["tokens"] != sampled[1]["tokens"] == sampled[2]["tokens"]


def test_a_conversation_begins_with_a_file(bpc, folder, tmp_path):
    """Its lines are one message, as they are not in a pipe."""
    (tmp_path / "long.txt").write_text("one\ntwo\n")
    words = ("chat", "-m", folder, "--max-new-tokens", "4", "--json", "--prompt-file", tmp_path / "long.txt")
    assert [turn["message"] for turn in lines(bpc(*words, stdin="three\n"))] == ["one\ntwo", "three"]
    ran = bpc("chat", "-m", folder, "--prompt-file", tmp_path / "none.txt")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == f"Error: {tmp_path / 'none.txt'}: the prompt cannot be read: No such file or directory\n"


@pytest.mark.parametrize(
    ("words", "stdin", "fault"),
    [
        (("-a", "nowhere.safetensors"), "hello", "nowhere.safetensors"),
        (("-q",), b"hello\n\xff\n", "line 2 of the messages is not UTF-8 text"),
        (("-q",), "x" * 500, "with this message the conversation has 518 tokens, and chatty takes 512"),
    ],
)
def test_what_is_refused_is_refused_in_one_line(bpc, folder, words, stdin, fault):
    ran = bpc("chat", "-m", folder, "--max-new-tokens", "2", *words, stdin=stdin)
    assert ran.code == 1
    assert ran.err.startswith("Error: ")
    assert ran.err.count("\n") == 1
    assert fault in ran.err


def test_a_model_without_a_template_cannot_chat(bpc, model_folder):
    ran = bpc("chat", "-m", model_folder, stdin="hello")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == "Error: tiny-llama has no chat template, so it cannot chat: bpc generate continues a text\n"


def test_a_conversation_on_a_terminal(converse, monkeypatch, capsys):
    """A message that is too long and Ctrl-C do not end it; Ctrl-D does."""
    conversation = converse(limit=80)
    keyboard, terminal = pty.openpty()
    with os.fdopen(terminal) as stdin, at_step(conversation, 3, lambda: os.kill(os.getpid(), signal.SIGINT)):
        monkeypatch.setattr(sys, "stdin", stdin)
        os.write(keyboard, b"hello\n\n" + b"x" * 90 + b"\nhello\n/reset\nhello\n\x04")
        _talk(conversation, [], 5, as_json=True, quiet=False)
    os.close(keyboard)
    shown = capsys.readouterr()
    turns = [json.loads(line) for line in shown.out.splitlines()]
    assert [turn["ended_by"] for turn in turns] == ["interrupt", "limit", "limit"]
    assert [len(turn["tokens"]) for turn in turns] == [3, 5, 5]
    assert turns[2]["tokens"][:3] == turns[0]["tokens"]
    assert "Chatting with chatty: /reset begins anew" in shown.err
    assert "Not sent: with this message the conversation has " in shown.err
    assert shown.err.count("Stopped: the conversation keeps the message and this part of the answer") == 1
    assert "> " in shown.err  # answers go to a file here


def test_the_line_after_an_answer_is_dim_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stderr, colour, text in (
        (Terminal(), "", "\x1b[2m4 tokens\ufffd\x1b[0m\n"),
        (Terminal(), "1", "4 tokens\ufffd\n"),
        (io.StringIO(), "", "4 tokens\ufffd\n"),
    ):
        monkeypatch.setattr(sys, "stderr", stderr)
        monkeypatch.setenv("NO_COLOR", colour)
        note("4 tokens\x1b", dim=True)
        assert stderr.getvalue() == text


class Keyboard:
    """`bpc chat` in a process whose terminal is `self.keyboard`."""

    def __init__(self, *words):
        self.keyboard, terminal = pty.openpty()

        def own_terminal():  # so that the key Ctrl-C sends a signal
            fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            [sys.executable, "-c", "from bpc_cli.main import main; main()", "chat", *map(str, words)],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=os.environ | {"TERM": "xterm"},
            start_new_session=True,
            preexec_fn=own_terminal,
        )
        os.close(terminal)
        self.seen = b""

    def type(self, keys):
        os.write(self.keyboard, keys)

    def read(self, otherwise=lambda: None):
        """Read what is shown; call `otherwise` after each second without a byte."""
        for _ in range(60):
            if select.select([self.keyboard], [], [], 1)[0]:
                self.seen += os.read(self.keyboard, 4096)
                return
            otherwise()
        pytest.fail(f"nothing follows {self.seen}")

    def until(self, text, otherwise=lambda: None):
        """Return what is shown before a text."""
        while text not in self.seen:
            self.read(otherwise)
        before, _, self.seen = self.seen.partition(text)
        return before

    def ends(self):
        """Read what is shown to the end; return the status of the process."""
        with suppress(OSError):  # the terminal is closed
            while True:
                self.read()
        return self.process.wait(60)

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.keyboard)


@pytest.fixture
def keyboard():
    """Start `bpc chat` on a terminal of its own, to which a test types."""
    with ExitStack() as stack:

        def start(*words):
            started = Keyboard(*words)
            stack.callback(started.close)
            return started

        yield start


@pytest.mark.slow  # another process, which imports everything anew
def test_keys_on_a_terminal(folder, keyboard):
    """Corrected and pasted text, Ctrl-C at the prompt, and Ctrl-D."""
    chat = keyboard("-m", folder, "--max-new-tokens", "4", "--json", "--quiet")
    chat.until(b"> ")
    chat.type(b"hellp\x7fo\n")
    chat.until(b'{"message": "hello", ')
    chat.until(b"> ")
    chat.type(b"\x1b[200~one\ntwo\x1b[201~\n")
    chat.until(b'{"message": "one\\ntwo", ')
    chat.until(b"> ")
    # `input` misses a signal that comes between its prompt and its wait for a key.
    chat.process.send_signal(signal.SIGINT)
    chat.until(b"Ctrl-D or /quit ends the chat", lambda: chat.process.send_signal(signal.SIGINT))
    chat.until(b"> ")
    chat.type(b"\x04")
    assert chat.ends() == 0


@pytest.mark.slow  # another process, which imports everything anew
def test_keys_while_an_answer_is_written(keyboard, tmp_path):
    """They are not shown within the answer; what Ctrl-C leaves of them is the next message, and no key is lost."""
    shutil.copytree(DEMO_MODEL, tmp_path / "chatty")
    folder = save_template(tmp_path / "chatty", "{% for m in messages %}{{ m.content }}\n{% endfor %}assistant: ")
    chat = keyboard("-m", folder, "--no-compile", "--max-new-tokens", "4000")
    chat.until(b"> ")
    chat.type(b"Tell me of the bridge.\n")
    chat.until(b"bridge.\r\n")
    while len(chat.seen.split()) < 5:  # the answer has begun
        chat.read()
    chat.type(b"UNSEEN\nHALX\x7fF")
    chat.type(b"\x03")
    answer = chat.until(b" tokens, ")
    assert not [keys for keys in (b"UNSEEN", b"HAL", b"^C") if keys in answer]
    chat.until(b"Stopped: the conversation keeps the message and this part of the answer")
    chat.until(b"> UNSEEN\r\n")  # a whole line is sent
    while len(chat.seen.split()) < 5:
        chat.read()
    chat.type(b"\x03")
    chat.until(b"Stopped: ")
    chat.until(b"> HALX\x08\x1b[KF")
    chat.type(b"\x15\x04")
    assert chat.ends() == 0


@pytest.mark.slow  # another process, which imports everything anew
def test_lines_pasted_while_an_answer_is_written_are_one_message(keyboard, tmp_path):
    shutil.copytree(DEMO_MODEL, tmp_path / "chatty")
    folder = save_template(tmp_path / "chatty", "{% for m in messages %}{{ m.content }}\n{% endfor %}assistant: ")
    chat = keyboard("-m", folder, "--no-compile", "--max-new-tokens", "200", "--json", "--quiet")
    chat.until(b"> ")
    chat.type(b"Tell me of the bridge.\n")
    chat.until(b"bridge.\r\n")
    chat.until(b"\x1b[?2004h")  # the answer has begun, and the terminal marks what is pasted
    chat.type(b"\x1b[200~one\rtwo\x1b[201~\r")
    chat.until(b'{"message": "Tell me of the bridge.", ')
    chat.until(b'{"message": "one\\ntwo", ')
    chat.until(b"\x1b[?2004h> ")  # the answer itself has "> "
    chat.type(b"\x04")
    assert chat.ends() == 0
