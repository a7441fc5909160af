"""Local text: which files are read, in which order, and which are refused. test_hub.py tests Hub corpora."""

import gzip
import json
import os
import random
import resource
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import tiny

from bpc_calib import CorpusError
from bpc_calib.text.corpora import MAX_DOCUMENT, documents, open_corpus


def read(path, seed=0, **arguments) -> list[str]:
    return list(documents(open_corpus(str(path), **arguments), random.Random(seed)))


def lines(*rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_reads_every_kind_of_file_in_a_folder(tmp_path):
    (tmp_path / "sub" / ".hidden").mkdir(parents=True)
    (tmp_path / "a.txt").write_text("plain é")
    (tmp_path / "b.md").write_text("# marked")
    (tmp_path / "LICENSE").write_text("without suffix")
    (tmp_path / "GPL-3.0").write_text("a version, no suffix")
    (tmp_path / "sub" / "c.py").write_text("code = 1")
    (tmp_path / "sub" / "d.jsonl").write_text(lines({"text": "json one"}, {"text": "json two"}) + "\n")
    with gzip.open(tmp_path / "e.json.gz", "wt") as file:
        file.write(lines({"text": "packed"}))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["table one", "table two"]}), tmp_path / "f.parquet")
    for other in ("g.bin", "package.json", ".secret.txt", "sub/.hidden/h.txt"):
        (tmp_path / other).write_text("not wanted")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.txt").write_text(" \n ")
    wanted = {
        "without suffix",
        "a version, no suffix",
        "plain é",
        "# marked",
        "code = 1",
        "json one",
        "json two",
        "packed",
        "table one",
        "table two",
    }
    found = read(tmp_path)
    assert set(found) == wanted
    assert len(found) == len(wanted)
    assert read(tmp_path) == found
    assert any(read(tmp_path, seed=seed) != found for seed in range(1, 4))


def test_a_single_file_may_have_any_suffix(tmp_path):
    (tmp_path / "a.log").write_text("text")
    assert read(tmp_path / "a.log") == ["text"]
    with pytest.raises(CorpusError, match="contains no text files"):
        open_corpus(str(tmp_path))


def test_names_and_fields(tmp_path):
    file = tmp_path / "a.json"
    file.write_text(lines({"content": "x"}))
    corpus = open_corpus(f"mine={file}", text_field="content")
    assert (corpus.name, corpus.path, corpus.revision) == ("mine", "a.json", None)
    assert open_corpus(str(file)).name == "a.json"
    assert read(file, text_field="content") == ["x"]
    odd = tmp_path / "a=b.txt"  # a path may contain "="
    odd.write_text("x")
    assert open_corpus(str(odd)).name == "a=b.txt"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            '{"body": "x"}\n',
            r"a.jsonl: line 1: no field 'text' \(fields: 'body'\); choose one with --text-field",
        ),
        ("a.jsonl", '{"text": 3}\n', "a.jsonl: line 1: field 'text' is int, not text"),
        ("a.jsonl", "not json\n", "a.jsonl: line 1 is not JSON"),
        ("a.jsonl", '["x"]\n', "a.jsonl: line 1: expected an object with a field 'text', found list"),
        ("a.jsonl", "[" * 100_000, "a.jsonl: line 1 is not JSON"),
        ("a.txt", b"\xff\xfe\x00", r"a.txt: not UTF-8 text \(byte 0\)"),
        ("a.txt", b"abc\0def", r"a.txt: binary, not text \(it contains NUL\)"),
        ("a.jsonl", '{"text": "a\\u0000b"}\n', "binary, not text"),
        ("a.json.gz", b"not gzip", "a.json.gz: cannot be read: Not a gzipped file"),
        ("a.json.gz", gzip.compress(b'{"text": "x"}\n' * 999, mtime=0)[:40], "a.json.gz: cannot be read"),
        ("a.parquet", b"PAR1 but no more", "a.parquet: not a readable parquet file"),
        ("a.exe", b"MZ\0\x90", r"a.exe: not UTF-8 text \("),
        ("a.pdf", b"%PDF-1.7\n%\xe2\xe3", "a.pdf: not UTF-8 text but a document: save its text to a file first"),
    ],
)
def test_bad_files_are_one_clear_error(tmp_path, name, content, message):
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CorpusError, match=message):
        read(file)


def test_a_missing_column_is_named(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(CorpusError, match=r"no field 'text' \(fields: 'body'\)"):
        read(tmp_path / "a.parquet")


def test_a_lone_surrogate_becomes_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}\n')
    assert read(tmp_path / "a.jsonl") == ["a?b"]


def test_unknown_names_and_places_without_text_are_refused(tmp_path):
    with pytest.raises(CorpusError, match="unknown corpus 'pg20': there is no such file or folder, and the names are"):
        open_corpus("pg20")
    for spec in ("", "name=", "name=/no/such/path", "x" * 5000, "~nobody-of-that-name/x"):
        with pytest.raises(CorpusError, match="unknown corpus"):
            open_corpus(spec)
    with pytest.raises(CorpusError, match="contains no text files"):
        open_corpus(str(tmp_path))
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(CorpusError, match="neither a file nor a folder"):
        open_corpus(str(tmp_path / "pipe.txt"))
    with pytest.raises(CorpusError, match="contains no text files"):  # a read from a pipe would never end
        open_corpus(str(tmp_path))


def test_broken_and_circular_links_are_skipped(tmp_path):
    (tmp_path / "a.txt").write_text("real")
    (tmp_path / "round").symlink_to(tmp_path)
    (tmp_path / "self.txt").symlink_to(tmp_path / "self.txt")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "linked.txt").symlink_to(tmp_path / "a.txt")
    assert read(tmp_path) == ["real", "real"]


def test_bad_files_among_good_ones_are_skipped_with_one_warning(tmp_path, caplog):
    (tmp_path / "good.txt").write_text("good")
    for i in range(3):
        (tmp_path / f"bad{i}.txt").write_bytes(b"\xff")
    assert read(tmp_path) == ["good"]
    (record,) = caplog.records
    assert f"corpus {tmp_path.name}: skipped 3 bad files or rows; the first: " in record.getMessage()


def test_bad_rows_after_a_good_one_are_skipped_with_one_warning(tmp_path, caplog):
    rows = [
        '{"text": "one"}',
        "not json",
        '{"text": null}',
        '{"body": "x"}',
        '{"text": "a\\u0000b"}',
        '{"text": "two"}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    assert read(tmp_path / "a.jsonl") == ["one", "two"]
    (record,) = caplog.records
    assert "skipped 4 bad files or rows; the first: " in record.getMessage()
    assert record.getMessage().endswith("a.jsonl: line 2 is not JSON: expected one object per line")


def test_a_byte_order_mark_is_not_part_of_the_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabc")
    assert read(tmp_path / "a.txt") == ["abc"]


def test_a_path_is_not_a_pattern(tmp_path):
    for name in ("a1", "a[1]", "b*", "x::y"):
        pyarrow.parquet.write_table(pyarrow.table({"text": [name]}), tmp_path / f"{name}.parquet")
    for name in ("a[1]", "b*", "x::y"):
        assert read(tmp_path / f"{name}.parquet") == [name]


def test_a_parquet_bomb_is_refused(tmp_path):
    table = pyarrow.table({"text": ["x" * (100 << 20)]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < 100_000
    with pytest.raises(CorpusError, match=r"a.parquet: unpacks to more than 100 times its size"):
        read(tmp_path / "a.parquet")


def test_one_long_document_is_refused(tmp_path):
    for name in ("a.txt", "a.jsonl"):
        file = tmp_path / name
        with open(file, "wb") as sparse:
            sparse.truncate(MAX_DOCUMENT + 10)
        with pytest.raises(CorpusError, match=f"{name}.*one document has at least 67,108,8.. bytes.*split it"):
            read(file)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("unit", [b"x", b'{"text": "x"}\n', b"\n"], ids=["one line", "many lines", "empty lines"])
def test_a_gzip_bomb_stops_in_bounded_memory(tmp_path, unit):
    """The file unpacks to 128 MB, but the reader stops long before."""
    block = unit * ((1 << 20) // len(unit))
    with gzip.open(tmp_path / "bomb.json.gz", "wb", compresslevel=6) as file:
        for _ in range(128):
            file.write(block)
    script = (
        "import random, sys\n"
        "from bpc_calib.text.corpora import documents, open_corpus\n"
        "try:\n    n = sum(1 for _ in documents(open_corpus(sys.argv[1]), random.Random(0)))\n"
        "except Exception as fault:\n    print(type(fault).__name__, fault)\n"
        # not ru_maxrss, which a child process inherits from its parent
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "bomb.json.gz"], capture_output=True, text=True, check=True
    )
    message, peak = ran.stdout.splitlines()
    expected = "unpacks to more than 100 times its size: not text"
    assert message.startswith("CorpusError")
    assert expected in message
    assert int(peak) * 1024 < 500e6


def test_an_unreadable_file_is_an_error(tmp_path):
    if os.geteuid() == 0:
        file = Path("/proc/self/mem")  # its mode allows reading, but a read fails
        link = tmp_path / "mem.txt"
        link.symlink_to(file)
    else:
        link = tmp_path / "a.txt"
        link.write_text("x")
        link.chmod(0)
    with pytest.raises(CorpusError, match=r"(mem|a)\.txt: cannot be read"):
        read(link)


def test_few_files_are_open_at_a_time(tmp_path):
    """A folder may have more files than a process may open."""
    for i in range(50):
        (tmp_path / f"{i}.txt").write_text("x")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, hard))
    try:
        assert len(read(tmp_path)) == 50
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.skipif(sys.platform == "darwin", reason="file names are UTF-8 there")
def test_a_file_whose_name_is_not_utf_8_is_read(tmp_path):
    path = tmp_path / os.fsdecode(b"caf\xe9.txt")
    path.write_text("words " * 400)
    model = tiny.model()
    tiny.calibrated(model, tiny.tokenizer(), corpora=[str(path)], samples=2)
