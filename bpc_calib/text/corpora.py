"""Read calibration text: corpora of the Hub, local files and folders, and generated text."""

import gzip
import json
import logging
import os
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bpc_artifacts.errors import why
from bpc_calib.errors import CorpusError, InputError, first_line, not_text
from bpc_calib.hub import explain, online
from bpc_calib.text import made_text
from bpc_calib.text.known_corpora import DEMO, DEMO_CORPORA, HUB_CORPORA, Corpus, expand

__all__ = ["check_corpora", "documents", "open_corpora", "open_corpus", "pin"]

log = logging.getLogger(__name__)

MAX_DOCUMENT = 64 << 20  # bytes of one text file or one line of JSON: a larger one is not a document
MAX_RATIO = 100  # the compression ratio of text is about 3 to 10, the ratio of a gzip bomb is 1,000
GRACE = 4 << 20  # bytes to unpack before the ratio counts

TEXT_SUFFIXES = frozenset(
    """
    .txt .text .md .rst .tex .py .pyi .c .h .cc .cpp .hpp .cs .java .kt .scala .js .jsx .ts .tsx .go .rs .rb .php
    .pl .r .jl .lua .swift .sh .sql .html .css .xml .yaml .yml .toml .cfg .ini .lean .v .ml .hs
    """.split()
)
JSON_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")


def open_corpus(spec: str, *, text_field: str = "text") -> Corpus:
    """Open a corpus: a name of `HUB_CORPORA` or `DEMO_CORPORA`, `PATH` or `NAME=PATH`. Find its files or its commit.

    Raises:
        CorpusError: the name is unknown, the path holds no text, or the Hub is not reachable.
    """
    if spec in HUB_CORPORA:
        return pin(HUB_CORPORA[spec])
    if spec in DEMO_CORPORA:
        return DEMO_CORPORA[spec]
    name, separator, location = spec.partition("=")
    if not separator or not name or os.path.exists(spec):
        name, location = "", spec
    path = Path(os.path.expanduser(location))
    if not location or not os.path.exists(path):
        if os.path.islink(path):
            raise CorpusError(f"corpus {spec!r}: no such file or folder: it is a link to {os.readlink(path)}")
        names = ", ".join([*HUB_CORPORA, DEMO])
        raise CorpusError(f"unknown corpus {spec!r}: there is no such file or folder, and the names are {names}")
    files = _find_files(path)
    base = path.resolve().name
    return Corpus(name or base, base, text_field, files=tuple(files))


def open_corpora(
    specs: Sequence[str | os.PathLike[str] | Corpus], *, text_field: str = "text", hub: bool = True
) -> list[Corpus]:
    """Open corpora, each as `open_corpus` does; `demo` is short for several.

    Without `hub`, corpora of the Hub stay without a commit until `pin`, and no network is needed.

    Raises:
        CorpusError: a corpus cannot be opened.
        InputError: there is none, or two have the same name or share a file.
    """
    if not specs or isinstance(specs, str):
        raise InputError(f"corpora must be a list of at least one corpus, not {specs!r}")
    opened = [
        spec if isinstance(spec, Corpus) else open_corpus(os.fspath(spec), text_field=text_field)
        for spec in (expand(specs) if hub else [HUB_CORPORA.get(spec, spec) for spec in expand(specs)])
    ]
    check_corpora(opened)
    return opened


def check_corpora(corpora: Sequence[Corpus], samples: int | None = None) -> None:
    """Raise `InputError` if two corpora have the same name or share a file, or one gets none of the `samples`.

    A text that is read twice would count twice, and a corpus without samples would be left out without a word.
    """
    names: set[str] = set()
    readers: dict[Path, str] = {}
    for corpus in corpora:
        if corpus.name in names:
            raise InputError(f"corpus {corpus.name} is given twice: leave one out, or name another text with NAME=PATH")
        names.add(corpus.name)
        for file in {file.resolve() for file in corpus.files}:
            if file in readers:
                raise InputError(
                    f"corpora {readers[file]} and {corpus.name} both read {file.name}: give each text once"
                )
            readers[file] = corpus.name
    if samples is not None and samples < len(corpora):
        raise InputError(
            f"{len(corpora)} corpora ({', '.join(c.name for c in corpora)}) need at least {len(corpora)} samples, not "
            f"{samples}: raise the samples, or name fewer corpora"
        )


def documents(corpus: Corpus, rng: random.Random) -> Iterator[str]:
    """Yield the texts of a corpus, with files or shards in seeded order. Generated text never ends.

    No text is empty or binary. Bad files of a folder and bad rows after the first row are skipped; one warning
    counts them.

    Raises:
        CorpusError: the only file, or the first row of a Hub corpus, is bad.
    """
    if corpus.style:
        while True:
            yield made_text.document(rng, corpus.style)
    if corpus.repo:
        places = [(corpus.path, _hub_rows(corpus, rng.randrange(1 << 32)))]
    else:
        places = [(str(file), _file_rows(file, corpus.field)) for file in corpus.files]
        rng.shuffle(places)
    bad, first = 0, None  # the bad files and rows: there may be millions
    try:
        for where, rows in places:
            try:
                for number, row in enumerate(rows):
                    if isinstance(row, str) and "\0" in row:
                        row = CorpusError("binary, not text (it contains NUL)")
                    if isinstance(row, CorpusError):
                        if number == 0:  # then the other rows are bad too
                            raise row
                        bad, first = bad + 1, first or f"{where}: {row}"
                    elif row and not row.isspace():
                        # JSON can contain a lone surrogate, which has no UTF-8 encoding and no token.
                        yield row.encode("utf-8", "replace").decode("utf-8")
            except CorpusError as fault:
                if len(places) == 1:
                    raise CorpusError(f"{where}: {fault}") from fault.__cause__
                bad, first = bad + 1, first or f"{where}: {fault}"
    finally:  # also when the reader stops early
        if bad:
            log.warning("corpus %s: skipped %d bad files or rows; the first: %s", corpus.name, bad, first)


def pin(corpus: Corpus) -> Corpus:
    """Return a corpus of the Hub at its current commit, so that the artifact records the text that is read.

    Raises:
        CorpusError: the Hub cannot be reached, or has no such corpus.
    """
    from huggingface_hub import HfApi

    try:
        if not online():
            raise ConnectionError
        if corpus.revision is None:
            corpus = replace(corpus, revision=HfApi().dataset_info(corpus.repo or "").sha)
    except Exception as fault:
        raise CorpusError(_hub_fault(corpus, fault)) from fault
    return corpus


def _hub_fault(corpus: Corpus, fault: Exception) -> str:
    return f"{explain(fault, f'corpus {corpus.name} ({corpus.repo})')}; local text: --corpus NAME=PATH"


def _hub_rows(corpus: Corpus, seed: int) -> Iterator[str | CorpusError]:
    import datasets

    try:
        if corpus.data_file:
            url = f"hf://datasets/{corpus.repo}@{corpus.revision}/{corpus.data_file}"
            rows = datasets.load_dataset("json", data_files=url, split=corpus.split, streaming=True)
        else:
            rows = datasets.load_dataset(corpus.repo, split=corpus.split, streaming=True, revision=corpus.revision)
        # Shuffles only the shards: documents are mixed later, when they are cut into pieces.
        for number, row in enumerate(rows.shuffle(seed=seed, buffer_size=1), start=1):
            yield _field(row, corpus.field, f"row {number}")
    except Exception as fault:
        raise CorpusError(_hub_fault(corpus, fault)) from fault


def _find_files(path: Path) -> list[Path]:
    if os.path.isfile(path):
        return [path]  # any suffix: the reader refuses a file that is not UTF-8 text
    if not os.path.isdir(path):
        raise CorpusError(f"{path}: neither a file nor a folder")
    found = []
    for folder, subfolders, names in os.walk(path):  # does not follow links to folders, so no loops
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in sorted(names):
            # a .json file in a folder is seldom a corpus; given by its own path it is read as JSON Lines
            if not name.startswith(".") and not name.endswith(".json") and _is_text(name):
                file = Path(folder, name)
                if os.path.isfile(file):  # False for a broken link or a link to itself
                    found.append(file)
    if not found:
        raise CorpusError(f"{path}: contains no text files (.txt, .md, code files, .jsonl, .json.gz, .parquet)")
    return found


def _is_text(name: str) -> bool:
    """Return True if the suffix of a file is that of text. LICENSE and GPL-3.0 have no suffix and count as text."""
    name = name.lower()
    suffix = Path(name).suffix
    return name.endswith((*JSON_SUFFIXES, ".parquet")) or suffix in TEXT_SUFFIXES or suffix.strip(".0123456789") == ""


def _file_rows(file: Path, field: str) -> Iterator[str | CorpusError]:
    try:
        if file.name.lower().endswith(".parquet"):
            yield from _parquet_rows(file, field)
        elif file.name.lower().endswith(JSON_SUFFIXES):
            yield from _json_rows(file, field)
        else:
            if (size := file.stat().st_size) > MAX_DOCUMENT:
                raise CorpusError(_too_long(size))
            yield file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        raise CorpusError(not_text(fault)) from fault
    except (OSError, EOFError, zlib.error) as fault:
        reason = why(fault) if isinstance(fault, OSError) else fault
        raise CorpusError(f"cannot be read: {reason}") from fault


def _json_rows(file: Path, field: str) -> Iterator[str | CorpusError]:
    compressed = file.name.lower().endswith(".gz")
    total = 0
    with open(file, "rb") as raw, gzip.open(raw) if compressed else raw as lines:
        for number in range(1, 1 << 62):
            line = lines.readline(MAX_DOCUMENT + 1)  # limits the memory for a bomb or a line of a gigabyte
            total += len(line)
            if compressed and total > GRACE and total > MAX_RATIO * raw.tell():
                raise CorpusError(f"unpacks to more than {MAX_RATIO} times its size: not text")
            if len(line) > MAX_DOCUMENT:
                raise CorpusError(f"line {number}: {_too_long(len(line))}")
            if not line:
                return
            if line.isspace():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                yield CorpusError(f"line {number} is not JSON: expected one object per line")
            else:
                yield _field(row, field, f"line {number}")


def _parquet_rows(file: Path, field: str) -> Iterator[str | CorpusError]:
    # Does not use `datasets`, which treats a path as a pattern and has no limit for the unpacked size.
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            if field not in names:
                raise CorpusError(_no_field(field, names))
            for group in map(table.metadata.row_group, range(table.num_row_groups)):
                packed = sum(group.column(i).total_compressed_size for i in range(group.num_columns))
                if group.total_byte_size > GRACE and group.total_byte_size > MAX_RATIO * packed:
                    raise CorpusError(f"unpacks to more than {MAX_RATIO} times its size: not text")
            row = 0
            for batch in table.iter_batches(batch_size=16, columns=[field]):
                for value in batch.column(0):
                    row += 1
                    yield _field({field: value.as_py()}, field, f"row {row}")
    except pyarrow.ArrowException as fault:
        raise CorpusError(f"not a readable parquet file: {first_line(fault)}") from fault


def _field(row: Any, field: str, where: str) -> str | CorpusError:
    """Return the text of a row, or the error."""
    if not isinstance(row, dict):
        return CorpusError(f"{where}: expected an object with a field {field!r}, found {type(row).__name__}")
    if field not in row:
        return CorpusError(f"{where}: {_no_field(field, list(row))}")
    value = row[field]
    if not isinstance(value, str):
        return CorpusError(f"{where}: field {field!r} is {type(value).__name__}, not text")
    return value if len(value) <= MAX_DOCUMENT else CorpusError(f"{where}: {_too_long(len(value))}")


def _no_field(field: str, names: list[str]) -> str:
    return f"no field {field!r} (fields: {', '.join(map(repr, names[:8])) or 'none'}); choose one with --text-field"


def _too_long(size: int) -> str:
    return f"one document has at least {size:,} bytes, expected at most {MAX_DOCUMENT:,}: split it"
