"""Text appears as a model writes it, whatever the language, and none is lost."""

import os
import signal
import subprocess
import sys

import pytest
import tiny
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from bpc_calib.demo import DEMO_MODEL
from bpc_cli.streaming import TextPrinter

TEXTS = {
    "prose": "The old teacher, who 'd walked far , slept.\n\n  Then she woke.",
    "chinese": "長い文章には空白がありません。这也是一样的没有空格",
    "identifier": "aVGhpcyBpcyBiYXNlNjQgd2l0aG91dCBhbnkgc3BhY2U" * 3,
    "emoji": "👩‍👩‍👧 and 🏳️‍🌈!",
    "spaces": "«\u00a0oui\u00a0» \u3000全角\u3000می\u200cروم find\u00ading",
}


def pieces():
    """A tokenizer as Llama 2 has it: spaces are marks on the words behind them, and the first one is dropped."""
    words = ["▁The", "▁old", "▁", "teach", "er", ".", "長", "い", "s", "T"]
    vocabulary = {word: i for i, word in enumerate(["<unk>", *words])}
    raw = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>", continuing_subword_prefix=""))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>")


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize(
    "tokenizer", [tiny.tokenizer(bos=False), AutoTokenizer.from_pretrained(DEMO_MODEL)], ids=["bytes", "demo"]
)
def test_every_token_shows_its_text_at_once(tokenizer, text, capsys):
    printer, ids, printed = TextPrinter(tokenizer), tokenizer(text)["input_ids"], ""
    for count, token in enumerate(ids, 1):
        printer.put(token)
        printed += capsys.readouterr().out
        assert printed == tokenizer.decode(ids[:count], skip_special_tokens=True).rstrip("\ufffd")
    printer.end()
    assert capsys.readouterr().out == "\n"


def test_marked_spaces_are_kept(capsys):
    tokenizer, text = pieces(), "The old teacher. 長い teachers The"
    printer = TextPrinter(tokenizer)
    for token in tokenizer(text)["input_ids"]:
        printer.put(token)
    printer.end()
    assert capsys.readouterr().out == f"{text}\n"


def test_bytes_that_are_no_character_hold_nothing_back(capsys):
    tokenizer = tiny.tokenizer(bos=False)
    high, letter = tokenizer.convert_tokens_to_ids("ÿ"), tokenizer("a")["input_ids"][0]
    printer = TextPrinter(tokenizer)
    for token in (letter, high, high, letter, high):
        printer.put(token)
    assert capsys.readouterr().out == "a\ufffd\ufffda"
    printer.end()
    assert capsys.readouterr().out == "\ufffd\n"


def test_special_tokens_are_not_shown(capsys):
    tokenizer = tiny.tokenizer()
    printer = TextPrinter(tokenizer)
    for token in [
        tokenizer.bos_token_id,
        *tokenizer("ab", add_special_tokens=False)["input_ids"],
        tokenizer.eos_token_id,
    ]:
        printer.put(token)
    printer.end()
    assert capsys.readouterr().out == "ab\n"


def test_an_interrupt_loses_no_text(tmp_path):
    command = [sys.executable, "-m", "bpc_cli", "generate", "-m", "demo", "--prompt", "The", "--max-new-tokens", "3000"]
    with subprocess.Popen([*command, "--no-compile"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        came = os.read(run.stdout.fileno(), 1)
        run.send_signal(signal.SIGINT)
        came += run.stdout.read()
        message = run.stderr.read().decode()
    assert run.returncode == 130, message
    assert came.decode().endswith("\n")
    assert len(came) > 1
    assert message.splitlines()[-1] == "Interrupted."
