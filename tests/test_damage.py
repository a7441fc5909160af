"""Damaged files are refused in one line, or read: never a crash, little memory, and an end."""

import gzip
import io
import json
import random
import signal
from contextlib import contextmanager, redirect_stdout
from itertools import islice
from pathlib import Path

import damage
import pytest
import test_artifact
import test_hub
import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bpc_artifacts import ArtifactError, check_model, load, save, verdict
from bpc_artifacts.sealed import SEAL, metadata_sha256
from bpc_calib import CorpusError
from bpc_calib.text.corpora import documents, open_corpus

LONGEST = 20  # seconds for a file; a guard against one that never ends
ROOM = 1 << 30  # bytes

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits the memory as Linux does")


def often(number: int) -> settings:
    """The same examples in every run; a file in a fixture's folder is written anew for each."""
    return settings(
        max_examples=number,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
    )


@contextmanager
def bounded():
    """In the block, little memory and little time."""

    def late(number, frame):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LONGEST)
    try:
        with damage.little_memory(ROOM):
            yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def seal(metadata):
    """Make the hash of the metadata right, so that the checks behind it are reached."""
    if SEAL in metadata:
        metadata[SEAL] = metadata_sha256(metadata)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """Whole files, without and with everything that is optional."""
    path = tmp_path_factory.mktemp("whole") / "a.safetensors"
    found = []
    whole = test_artifact.artifact(metric=True, mean=True, metrics__held_out=test_artifact.held_out())
    for made in (test_artifact.artifact(), whole):
        save(made, path, overwrite=True)
        found.append(path.read_bytes())
    return found


def check_message(text: str) -> None:
    assert "\n" not in text
    assert len(text) < 2000


def read_or_refuse(path: Path) -> None:
    """What `bpc inspect` does with a file."""
    from bpc_cli.artifact_tables import print_artifact

    try:
        artifact = load(path)
        check_model(artifact, artifact.metadata["model"])
    except ArtifactError as fault:
        return check_message(str(fault))
    verdict(artifact)
    with redirect_stdout(io.StringIO()):
        print_artifact(artifact, str(path), None)
    json.dumps(dict(artifact.metadata))


def check_artifacts(artifacts, path, number):
    more = st.lists(damage.bytes_of_any_file, max_size=1)

    @often(number)
    @given(which=st.sampled_from(range(len(artifacts))), first=damage.of_an_artifact(seal), more=more)
    def check(which, first, more):
        blob = first(artifacts[which])
        for each in more:
            blob = each(blob)
        path.write_bytes(blob)
        with bounded():
            read_or_refuse(path)

    check()


def test_damaged_artifacts(artifacts, tmp_path):
    check_artifacts(artifacts, tmp_path / "a.safetensors", 150)


@pytest.mark.slow
@pytest.mark.parametrize("number", [3_000, pytest.param(10_000, marks=pytest.mark.rare)])
def test_many_damaged_artifacts(artifacts, tmp_path, number):
    check_artifacts(artifacts, tmp_path / "a.safetensors", number)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Whole files of every kind."""
    folder = tmp_path_factory.mktemp("corpora")
    texts = [tiny.prose(60, seed=i) for i in range(6)]
    (folder / "a.txt").write_text("\n".join(texts))
    test_hub.json_lines(folder / "a.jsonl", "text", texts)
    (folder / "a.json.gz").write_bytes(gzip.compress((folder / "a.jsonl").read_bytes()))
    test_hub.parquet(folder / "a.parquet", texts)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def check_corpora(corpora, folder, number):
    @often(number)
    @given(name=st.sampled_from(sorted(corpora)), damages=st.lists(damage.bytes_of_any_file, min_size=1, max_size=3))
    def check(name, damages):
        blob = corpora[name]
        for each in damages:
            blob = each(blob)
        (folder / name).write_bytes(blob)
        with bounded():
            try:
                for text in islice(documents(open_corpus(str(folder / name)), random.Random(0)), 1000):
                    assert text.strip()
                    assert "\0" not in text
            except CorpusError as fault:
                check_message(str(fault))

    check()


def test_damaged_corpora(corpora, tmp_path):
    check_corpora(corpora, tmp_path, 80)


@pytest.mark.slow
@pytest.mark.parametrize("number", [800, pytest.param(2_000, marks=pytest.mark.rare)])
def test_many_damaged_corpora(corpora, tmp_path, number):
    check_corpora(corpora, tmp_path, number)
