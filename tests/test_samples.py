"""Samples of text: full, without padding, from many documents, and the same for the same seed."""

import random

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bpc_calib import CorpusError, ModelError
from bpc_calib.text.corpora import open_corpus
from bpc_calib.text.samples import draw_corpus, draw_samples, pack, pieces, spread

BOS, EOS, PAD = 257, 258, 256


@settings(max_examples=50, deadline=None)
@given(
    texts=st.lists(st.text(alphabet="abc", min_size=1, max_size=30), max_size=20),
    length=st.integers(2, 25),
    bos=st.booleans(),
)
def test_packing_keeps_every_token_in_order(texts, length, bos):
    tokenizer = tiny.tokenizer(bos=bos)
    samples = list(pack(texts, tokenizer, length))
    assert all(len(sample) == length for sample in samples)
    if bos:
        assert all(sample[0] == BOS for sample in samples)
        samples = [sample[1:] for sample in samples]
    stream = []
    for text in texts:
        stream += [EOS] * bool(stream) + tokenizer(text, add_special_tokens=False)["input_ids"]
    packed = [token for sample in samples for token in sample]
    room = length - bos
    # EOS joins two texts unless a sample ended exactly between them.
    without = [t for t in packed if t != EOS]
    assert without == [t for t in stream if t != EOS][: len(without)]
    assert len(stream) - len(packed) < room + len(texts)
    assert BOS not in packed


def test_text_with_the_name_of_the_padding_token_adds_no_padding():
    (sample,) = pack(["ab<pad>cd<pad>"], tiny.tokenizer(bos=False), 4)
    assert PAD not in sample
    assert tiny.tokenizer().decode(sample) == "abcd"


def test_too_little_text_is_dropped_and_never_padded():
    assert list(pack(["abc"], tiny.tokenizer(), 5)) == []
    with pytest.raises(CorpusError, match="samples of 1 tokens have no room"):
        next(pack(["abc"], tiny.tokenizer(), 1))


@settings(max_examples=50, deadline=None)
@given(
    texts=st.lists(st.text(alphabet="abcd", min_size=1, max_size=30), max_size=15),
    length=st.integers(1, 10),
    mix=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_pieces_cover_the_text_and_begin_with_one_of_each_document(texts, length, mix, seed):
    texts = [f"{i:02}{text}" for i, text in enumerate(texts)]
    found = list(pieces(texts, length + 2, random.Random(seed), mix=mix))
    assert all(len(piece) <= length + 2 for piece in found)
    cut = [text[i : i + length + 2] for text in texts for i in range(0, len(text), length + 2)]
    assert sorted(found) == sorted(cut)
    first = found[: len(texts)]
    for text in texts:
        pieces_of_text = {text[i : i + length + 2] for i in range(0, len(text), length + 2)}
        assert pieces_of_text & set(first)
    assert found == list(pieces(texts, length + 2, random.Random(seed), mix=mix))


def test_few_samples_come_from_many_documents():
    books = [f"{chr(97 + i)}" * 10_000 for i in range(20)]
    found = list(pack(pieces(books, 60, random.Random(0), mix=40), tiny.tokenizer(bos=False), 50))[:15]
    assert len({token for sample in found for token in sample} - {EOS}) >= 12  # 750 characters in pieces of 60


def test_a_text_of_several_samples_fills_one_before_others_do(tmp_path):
    texts, tokenizer = ["a" * 250, "b" * 199, "c" * 640, ""], tiny.tokenizer(bos=False)
    found = list(spread(texts, tokenizer, 100, random.Random(0)))
    assert found[:4] == ["a" * 126, "b" * 199, "c" * 107, ""]
    assert sorted(found[4:]) == ["a" * 124, "c" * 105, *["c" * 107] * 4]

    letters = "".join(chr(97 + i) * 600 for i in range(20))  # a token each, so a piece of 600 fills six samples
    (tmp_path / "book.txt").write_text(letters)
    corpus = open_corpus(str(tmp_path / "book.txt"))
    samples = draw_corpus(corpus, tokenizer, samples=6, sequence_length=100, seed=0)
    assert len(set(samples.flatten().tolist()) - {EOS}) == 6


def draw(folder, samples=9, length=50, seed=0, vocab=tiny.VOCAB, corpora=3):
    opened = [open_corpus(f"part{i}={folder}") for i in range(corpora)]
    return draw_samples(opened, tiny.tokenizer(), samples=samples, sequence_length=length, seed=seed, vocab_size=vocab)


def test_samples_are_shared_evenly_and_recorded(text_folder):
    tokens, sources = draw(text_folder, samples=8)
    assert tokens.shape == (8, 50)
    assert tokens.dtype == torch.int64
    assert (tokens != PAD).all()
    assert [source["samples"] for source in sources] == [3, 3, 2]
    assert [source["tokens"] for source in sources] == [150, 150, 100]
    assert {source["path"] for source in sources} == {"notes"}
    again, same = draw(text_folder, samples=8)
    assert torch.equal(again, tokens)
    assert same == sources
    other, different = draw(text_folder, samples=8, seed=1)
    assert not torch.equal(other, tokens)
    assert {s["sha256"] for s in sources}.isdisjoint(s["sha256"] for s in different)


def test_fewer_samples_than_corpora_use_the_first_corpora(text_folder):
    tokens, sources = draw(text_folder, samples=2)
    assert tokens.shape == (2, 50)
    assert [source["name"] for source in sources] == ["part0", "part1"]


def test_too_little_text_is_an_error_with_the_number_of_samples(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 120)
    with pytest.raises(
        CorpusError,
        match="part0 has text for 2 of 3 samples of 50 tokens: use fewer",
    ):
        draw(tmp_path)


def test_a_tokenizer_of_another_model_is_refused(text_folder):
    with pytest.raises(ModelError, match=r"the tokenizer returns token 258, but the model has only 100 tokens"):
        draw(text_folder, vocab=100)
