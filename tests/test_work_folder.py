"""The work folder: a stopped calibration goes on with what is finished, to the same bytes, and notices every change."""

import contextlib
import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
import torch

from bpc_artifacts import save
from bpc_calib import WorkError, describe, make_plan
from bpc_calib.calibration.calibrate import calibrate
from bpc_calib.calibration.durable import write_file
from bpc_calib.calibration.stored import DamagedError, read_tensors, write_tensors
from bpc_calib.calibration.work_folder import remove_work
from bpc_calib.text.known_corpora import HUB_CORPORA

SETTINGS = {"samples": 5, "bits": 32, "keys_per_head": 200}


class StoppedError(Exception):
    pass


@pytest.fixture
def run(text_folder, tmp_path):
    """Calibrate in the work folder `work` and return the file's bytes and the steps; stop before a step."""

    def run(work="work", *, stop=None, at=lambda *step: None, model=None, corpus=text_folder, **changes):
        seen = []

        def progress(stage, done, total):
            seen.append((stage, done))
            at(stage, done)
            if (stage, done) == stop:
                raise StoppedError

        model = model or tiny.model()
        plan = make_plan(describe(model.config), **(SETTINGS | changes))
        folder = None if work is None else tmp_path / work
        made = calibrate(model, tiny.tokenizer(), [f"notes={corpus}"], plan, work_dir=folder, progress=progress)
        save(made, tmp_path / "made.safetensors", overwrite=True)
        return (tmp_path / "made.safetensors").read_bytes(), seen

    return run


def test_a_run_that_is_stopped_anywhere_ends_in_the_same_bytes(run, tmp_path):
    expected, steps = run(None)
    stages = (("text", 0, 5), ("keys", 0, 5), ("decompose", 0, 3))
    assert steps == [(stage, i) for stage, first, last in stages for i in range(first, last + 1)]
    for stop in [("text", 3), ("keys", 1), ("keys", 3), ("keys", 5), ("decompose", 1), ("decompose", 3)]:
        with pytest.raises(StoppedError):
            run(stop=stop)
        assert (tmp_path / "work").exists() == (stop[0] != "text")  # nothing was finished
        made, steps = run()
        assert made == expected
        stage, done = stop
        if stage == "keys":
            assert [i for name, i in steps if name == "keys"] == list(range(done, 6))[done == 5 :]
        if stage == "decompose":
            assert "keys" not in dict(steps)
            assert [i for name, i in steps if name == "decompose"] == list(range(done, 4))
        again, steps = run()
        assert again == expected
        assert [name for name, _ in steps] == ["text"] * 6 + ["decompose"]
        shutil.rmtree(tmp_path / "work")


def test_other_settings_model_text_and_versions_are_refused(run, tmp_path, text_folder, monkeypatch):
    with pytest.raises(StoppedError):
        run(stop=("keys", 2))
    other = tmp_path / "notes"
    shutil.copytree(text_folder, other)
    (other / "code.py").write_text("def g(y):\n    return y - 1\n" * 40)
    narrow = tiny.model(intermediate_size=40)
    for changes, message in (
        ({"samples": 4}, "samples: 5 in the work folder, 4 now"),
        ({"seed": 1}, "seed: 0 in the work folder, 1 now"),
        ({"seed": 1, "bits": 64}, "bits: 32 in the work folder, 64 now; seed"),
        ({"method": "paper"}, "method.name: score-aware in the work folder, paper now; .* and 5 more"),
        ({"model": narrow}, "model.config_sha256: .* in the work folder, .* now"),
        ({"model": tiny.model(seed=1)}, "weights.sha256: .* in the work folder, .* now"),
        ({"model": tiny.model().double()}, "weights.dtype: float32 in the work folder, float64 now"),
        (
            {"corpus": other},
            "work of another text: corpus notes has changed since; restore it, choose another --work-dir",
        ),
    ):
        with pytest.raises(WorkError, match=message):
            run(**changes)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        with pytest.raises(
            WorkError, match=rf"threads: {threads}\) in the work folder, .* threads: {threads + 1}\) now"
        ):
            run()
    finally:
        torch.set_num_threads(threads)
    with monkeypatch.context() as patch:
        patch.setattr("bpc_calib.calibration.work_folder.version", lambda name: "99")
        with pytest.raises(WorkError, match=r"versions\.torch: .* in the work folder, 99 now"):
            run()
    made, steps = run()
    assert made == run(None)[0]
    assert ("keys", 1) not in steps


@pytest.mark.parametrize("changes", [{"bits": 64}, {"method": "paper", "position_shift": True}])
def test_kept_keys_are_fitted_in_another_way_to_the_same_bytes(run, changes):
    with pytest.raises(StoppedError):
        run(stop=("decompose", 1))
    made, steps = run(**changes)
    assert ("keys", 1) not in steps
    assert made == run(None, **changes)[0]


def test_keys_whose_queries_were_not_summed_are_collected_again(run):
    with pytest.raises(StoppedError):
        run(stop=("decompose", 1), method="paper", position_shift=True)
    made, steps = run()
    assert ("keys", 1) in steps
    assert made == run(None)[0]


def test_another_fit_does_not_replace_the_file_of_the_first(bpc, model_folder, text_folder, tmp_path):
    words = ["calibrate", "-m", model_folder, "--corpus", text_folder, "--samples", "4", "-q", "--keep-work"]
    target = tmp_path / "a.safetensors"
    assert bpc(*words, "-o", target).code == 0
    before = target.read_bytes()
    ran = bpc(*words, "-o", target, "--bits", 32)
    assert (ran.code, ran.err) == (
        1,
        f"Error: {target}: exists; pass --force (overwrite=True in Python) to replace it\n",
    )
    assert target.read_bytes() == before
    ran = bpc(*words, "-o", tmp_path / "b.safetensors", "--work-dir", f"{target}.work", "--bits", 32, "--json")
    assert json.loads(ran.out)["reused"] == {"samples": 4, "layers": 0}


def flip(path, place):
    blob = bytearray(path.read_bytes())
    blob[place] ^= 1 << 3
    path.write_bytes(blob)


@pytest.mark.parametrize("place", [3, 40, -5])
@pytest.mark.parametrize(
    ("stop", "name", "kept"),
    [
        (("keys", 4), "samples/000001.safetensors", ("keys", 3)),
        (("keys", 4), "moments/000000.safetensors", ("keys", 1)),  # the group again, but for sample 2, held out
        (("decompose", 1), "moments/000001.safetensors", ("keys", 4)),
        (("decompose", 2), "layers/000001.safetensors", ("decompose", 1)),
        (("decompose", 2), "samples/000004.safetensors", ("decompose", 2)),
    ],
)
def test_a_flipped_byte_is_noticed_and_its_file_is_made_again(run, tmp_path, caplog, stop, name, kept, place):
    with pytest.raises(StoppedError):
        run(stop=stop)
    flip(tmp_path / "work" / name, place)
    with caplog.at_level(logging.WARNING):
        made, steps = run()
    assert made == run(None)[0]
    (record,) = caplog.records
    assert record.getMessage().endswith(f"1 damaged and made again; the first: {Path(name).name}")
    assert next(step for step in steps if step[0] == kept[0]) == kept


def test_all_damaged_sums_are_made_from_the_start(run, tmp_path):
    with pytest.raises(StoppedError):
        run(stop=("decompose", 1))
    names = sorted(path.name for path in (tmp_path / "work" / "moments").iterdir())
    assert names == ["000000.safetensors", "000001.safetensors"]
    for name in names:
        flip(tmp_path / "work" / "moments" / name, -9)
    made, steps = run()
    assert made == run(None)[0]
    assert [i for stage, i in steps if stage == "keys"] == [1, 2, 3, 4, 5]  # sample 2 is held out: it has no sums


def test_a_damaged_journal_is_refused_and_left_alone(run, tmp_path):
    with pytest.raises(StoppedError):
        run(stop=("keys", 4))
    whole = (tmp_path / "work" / "journal.json").read_bytes()
    for damaged in (whole[:100], whole.replace(b'"samples": 5', b'"samples": 6'), b""):
        (tmp_path / "work" / "journal.json").write_bytes(damaged)
        with pytest.raises(
            WorkError, match=r"journal\.json: damaged, so its work cannot be used: delete .*work to begin"
        ):
            run()
    (tmp_path / "work" / "journal.json").write_bytes(whole)
    assert ("keys", 4) in run()[1]


def test_a_byte_that_flips_during_a_run_is_one_error_and_the_next_run_goes_on(run, tmp_path):
    def damage(stage, done):
        if (stage, done) == ("decompose", 2):
            flip(tmp_path / "work" / "samples" / "000003.safetensors", -5)

    with pytest.raises(WorkError, match=r"000003\.safetensors: damaged since it was written: run the same command"):
        run(at=damage)
    made, steps = run()
    assert made == run(None)[0]
    assert [step for step in steps if step[0] != "text"] == [
        ("keys", 4),
        ("keys", 5),
        ("decompose", 2),
        ("decompose", 3),
    ]


def test_a_folder_with_other_files_is_refused_and_left_alone(run, tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.txt").write_text("mine")
    with pytest.raises(WorkError, match=r"work: holds other files \(thesis\.txt\): give a new or an empty folder"):
        run()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(WorkError, match="file: is not a folder that can be read"):
        run("file")
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"text/book.txt": "words", "samples/table.csv": "1,2"}, r"samples"),
        ({"artifact.safetensors": "mine"}, r"artifact\.safetensors"),
        ({"journal.json": "[1]", "text/book.txt": "words"}, r"journal\.json"),
    ],
)
def test_a_folder_whose_names_are_those_of_a_work_folder_is_left_alone(run, tmp_path, files, named):
    """Such names are common, and what is in them may be the user's own."""
    for name, text in files.items():
        (tmp_path / "work" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "work" / name).write_text(text)
    with pytest.raises(WorkError, match=rf"work: holds other files \({named}\)"):
        run()
    assert {name: (tmp_path / "work" / name).read_text() for name in files} == files


def test_only_files_of_the_calibration_are_removed_with_its_folder(run, tmp_path):
    with pytest.raises(StoppedError):
        run(stop=("keys", 3))
    (tmp_path / "work" / "samples" / "notes.csv").write_text("mine")
    expected, _ = run(None)
    assert run()[0] == expected
    remove_work(tmp_path / "work")
    assert [path.name for path in (tmp_path / "work").rglob("*") if path.is_file()] == ["notes.csv"]


def test_a_folder_that_vanishes_during_a_run_is_one_error(tmp_path):
    with pytest.raises(WorkError, match=r"cannot be written: No such file or directory; make room"):
        write_file(tmp_path / "gone" / "file", b"a")


def test_an_output_in_the_work_folder_is_refused(bpc, model_folder, text_folder, tmp_path):
    """It would be removed with the folder, after a line that says that it was written."""
    (tmp_path / "work").mkdir()
    ran = bpc(
        "calibrate", "-m", model_folder, "--corpus", text_folder, "--samples", 5, "--sequence-length", 128,
        "--keys-per-head", 200, "-o", tmp_path / "work" / "a.safetensors", "--work-dir", tmp_path / "work",
    )  # fmt: skip
    assert ran.code == 1
    assert "a.safetensors is in the work folder" in ran.err


def test_a_refused_fit_leaves_the_work_of_the_first(bpc, model_folder, text_folder, tmp_path):
    words = [
        "calibrate", "-m", model_folder, "--corpus", text_folder, "--samples", 5, "--sequence-length", 128,
        "--keys-per-head", 400, "--keep-work", "-q", "-o", tmp_path / "a.safetensors",
    ]  # fmt: skip
    assert bpc(*words).code == 0
    files = {path: path.read_bytes() for path in (tmp_path / "a.safetensors.work").rglob("*") if path.is_file()}
    ran = bpc(*words, "--bits", 32)
    assert (ran.code, "exists; pass --force" in ran.err) == (1, True)
    assert {path: path.read_bytes() for path in files} == files
    assert bpc(*words).code == 0  # nothing is left to do


def test_a_layer_of_a_version_that_kept_no_lengths_is_fitted_again(run, tmp_path, caplog):
    expected = run()[0]
    file = min((tmp_path / "work" / "layers").iterdir())
    tensors = read_tensors(file)
    del tensors["lengths"]
    write_tensors(file, tensors)
    assert run()[0] == expected
    assert f"1 damaged and made again; the first: {file.name}" in caplog.text


def test_a_second_run_in_the_same_folder_is_refused(run):
    def second(stage, done):
        if (stage, done) == ("keys", 2):
            with pytest.raises(WorkError, match="work: another run is using this work folder: wait for it"):
                run()

    assert run(at=second)[0] == run(None)[0]


def test_the_text_of_the_hub_is_not_read_twice(tmp_path, monkeypatch):
    from bpc_calib.calibration import run_text
    from bpc_calib.calibration.work_folder import open_work_folder
    from bpc_calib.text.known_corpora import Corpus

    plan = make_plan(describe(tiny.config()), samples=2)
    corpus = Corpus("pg19", "emozilla/pg19", "text", repo="emozilla/pg19", revision="a" * 40, split="train")
    drawn = []

    def draw(*arguments, **settings):  # the Hub's part; a server that speaks its protocol serves tests/test_hub.py
        drawn.append(arguments)
        return torch.arange(256, dtype=torch.int32).view(2, 128) % 250

    monkeypatch.setattr(run_text, "draw_corpus", draw)
    quiet = lambda *step: None  # noqa: E731
    texts = []
    for opened in (corpus, HUB_CORPORA["pg19"], HUB_CORPORA["pg19"]):  # the last two without a commit
        with open_work_folder(tmp_path / "work", plan, torch.device("cpu")) as work:
            texts.append(run_text.read_text([opened], tiny.tokenizer(), work, quiet))
            assert work.journal.sources[0]["revision"] == "a" * 40
        if len(texts) == 2:
            flip(tmp_path / "work" / "text" / "0.safetensors", -3)
    assert len(drawn) == 2  # at first, and for the damaged file
    assert all(torch.equal(text, texts[0]) for text in texts)


def test_a_tensor_of_one_number_with_another_stride_is_stored(tmp_path):
    """A view with a dimension of size 1, such as the residual of the only head, counts as contiguous."""
    view = torch.arange(65.0, dtype=torch.float64).view(1, 65)[:, -1]
    assert view.stride() == (65,)
    write_tensors(tmp_path / "a.safetensors", {"a": view})
    assert torch.equal(read_tensors(tmp_path / "a.safetensors")["a"], view)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_every_flipped_bit_of_a_file_is_noticed(tmp_path, dtype):
    tensors = {"0": torch.arange(12.0).view(2, 2, 3).to(dtype), "empty": torch.empty(2, 0, 3, dtype=dtype)}
    path = tmp_path / "a.safetensors"
    write_tensors(path, tensors)
    for name, found in read_tensors(path).items():
        assert torch.equal(found, tensors[name])
        assert found.dtype == dtype
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        with pytest.raises(DamagedError):
            read_tensors(path)
    for content in (b"", whole[:-1], whole[:50], whole + b"\0"):
        path.write_bytes(content)
        with pytest.raises(DamagedError):
            read_tensors(path)


@contextlib.contextmanager
def small_disk(folder: Path, size: str):
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_one_error_and_the_next_run_goes_on(run, tmp_path):
    with small_disk(tmp_path / "disk", "500k") as disk:
        with pytest.raises(
            WorkError, match=r"disk/work: the work needs .* bytes and .* are free: free .* bytes, or choose"
        ):
            run("disk/work", samples=30, keys_per_head=3000)
        assert list(disk.iterdir()) == []

        def fill(stage, done):
            if (stage, done) == ("keys", 2):
                with contextlib.suppress(OSError), open(disk / "full", "wb", buffering=0) as file:
                    while file.write(b"x" * 512):
                        pass

        with pytest.raises(
            WorkError, match=r"cannot be written: No space left on device \(.* bytes are needed and"
        ) as fault:
            run("disk/work", at=fill)
        assert "\n" not in str(fault.value)
        (disk / "full").unlink()
        made, steps = run("disk/work")
        assert made == run(None)[0]
        assert ("keys", 1) not in steps


# Real processes, killed. A server process imports the libraries once and forks for each run.
SPAWN = multiprocessing.get_context("forkserver")
SPAWN.set_forkserver_preload(["bpc_calib.calibration.calibrate", "transformers.models.llama.modeling_llama", "tiny"])


def command(words, folder, printed):
    """Run `bpc` in a new process, in a folder, with its output in two files."""
    from bpc_cli.main import main

    os.chdir(folder)
    for number, name in ((1, f"{printed}.out"), (2, f"{printed}.err")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv = ["bpc", *words]
    main()


@pytest.fixture
def bpc_killed(model_folder, text_folder, tmp_path):
    """Run `bpc calibrate` in a process, killed as soon as a function says so; return its status and its output."""

    def start(name, *words, kill=None):
        fixed = ["calibrate", "-m", str(model_folder), "--corpus", str(text_folder), "--samples", "6", "--bits", "32"]
        process = SPAWN.Process(target=command, args=([*fixed, "-o", name, "--json", *words], tmp_path, "printed"))
        process.start()
        while process.is_alive():
            if kill is not None and kill():
                process.kill()
                break
            time.sleep(0.001)
        process.join()
        return process.exitcode, (tmp_path / "printed.out").read_text(), (tmp_path / "printed.err").read_text()

    return start


def check_goes_on(start, folder, name):
    """Check that the killed run goes on: finished work is used, and the bytes are those of `whole.safetensors`."""
    work = folder / f"{name}.work"
    layers = len(list(work.glob("layers/*.safetensors")))
    samples = len(list(work.glob("samples/*.safetensors")))
    if (folder / name).exists() and (work / "artifact.safetensors").exists():  # was removing its work
        layers, samples = 3, 6
    code, out, err = start(name)
    assert code == 0, err
    reused = json.loads(out)["reused"]
    assert reused["layers"] == layers
    assert samples - 1 <= reused["samples"] <= samples  # a sample is finished when its sums are written, too
    assert (folder / name).read_bytes() == (folder / "whole.safetensors").read_bytes()
    assert {path.name for path in folder.iterdir()} == {"whole.safetensors", name, "printed.out", "printed.err"}
    if any(reused.values()):
        assert f"Going on with {name}.work: {reused['samples']} of 6 samples and {layers} of 3 layers" in err
    return reused


def is_unfinished(folder, name):
    """Whether the same command has something left to do: a run may be killed after its last step, too."""
    return not (folder / name).exists() or any((folder / f"{name}.work").glob("*.safetensors"))


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("samples/*0*", 2),
        ("layers/*0*", 1),
        # Stops between all stages are tested in one process; here it counts that a process dies at all.
        pytest.param("journal.json", 1, marks=pytest.mark.slow),
        pytest.param("artifact.safetensors", 1, marks=pytest.mark.slow),
    ],
)
def test_a_killed_process_goes_on(bpc_killed, bpc, model_folder, text_folder, tmp_path, pattern, count):
    words = ["calibrate", "-m", model_folder, "--corpus", text_folder, "--samples", 6, "--bits", 32]
    assert bpc(*words, "-o", tmp_path / "whole.safetensors").code == 0
    work = tmp_path / "a.safetensors.work"
    code, _, _ = bpc_killed("a.safetensors", kill=lambda: len(list(work.glob(pattern))) >= count)
    assert code in (-9, 0)
    if is_unfinished(tmp_path, "a.safetensors"):
        check_goes_on(bpc_killed, tmp_path, "a.safetensors")


@pytest.mark.slow  # the same at 8 moments of the clock
def test_a_process_killed_at_any_moment_goes_on(bpc_killed, tmp_path):
    began = time.monotonic()
    assert bpc_killed("whole.safetensors")[0] == 0
    whole, draws = time.monotonic() - began, random.Random(0)
    for i in range(8):
        until = time.monotonic() + whole * (i + draws.random()) / 8
        bpc_killed("a.safetensors", kill=lambda: time.monotonic() > until)  # noqa: B023
        if is_unfinished(tmp_path, "a.safetensors"):
            check_goes_on(bpc_killed, tmp_path, "a.safetensors")
        shutil.rmtree(tmp_path / "a.safetensors.work", ignore_errors=True)
        (tmp_path / "a.safetensors").unlink()


def test_a_second_run_to_the_same_file_or_folder_is_refused(bpc_killed, bpc, model_folder, text_folder, tmp_path):
    work = tmp_path / "a.safetensors.work"
    fixed = ["calibrate", "-m", model_folder, "--corpus", text_folder, "--samples", 6, "--bits", 32]

    def second():
        if not (work / "journal.json").exists():
            return False
        (first,) = multiprocessing.active_children()
        os.kill(first.pid, signal.SIGSTOP)  # it holds its locks until the kill
        for words, message in (
            (("-o", tmp_path / "a.safetensors"), "a.safetensors: another run is writing this file: wait for it"),
            (("-o", tmp_path / "b.safetensors", "--work-dir", work), "another run is using this work folder"),
        ):
            ran = bpc(*fixed, *words)
            assert ran.code == 1
            assert message in ran.err
            assert ran.err.count("\n") == 1
        return True

    assert bpc_killed("a.safetensors", kill=second)[0] == -9
    shutil.rmtree(work)
    assert [file.name for file in tmp_path.glob(".*")] == [".a.safetensors.lock"]  # without a lock, until the next run
    assert bpc_killed("a.safetensors")[0] == 0
    assert not work.exists()
    assert not list(tmp_path.glob(".*"))


def test_a_work_folder_inside_a_corpus_is_no_text(run, text_folder, tmp_path):
    shutil.copytree(text_folder, tmp_path / "notes")
    expected = run(None, corpus=tmp_path / "notes")[0]
    with pytest.raises(StoppedError):
        run("notes/work", corpus=tmp_path / "notes", stop=("decompose", 1))
    (tmp_path / "notes" / "work" / ".lock").touch()  # as a killed run leaves it
    assert run("notes/work", corpus=tmp_path / "notes")[0] == expected


def test_the_folder_is_kept_if_asked(bpc, model_folder, text_folder, tmp_path):
    words = ["-m", model_folder, "--corpus", text_folder, "--samples", 4, "--bits", 32, "--keep-work", "--json"]
    for reused in ({"samples": 0, "layers": 0}, {"samples": 4, "layers": 3}):
        ran = bpc("calibrate", *words, "-o", tmp_path / "a.safetensors", "--work-dir", tmp_path / "w")
        assert json.loads(ran.out)["reused"] == reused
    assert (tmp_path / "w" / "artifact.safetensors").read_bytes() == (tmp_path / "a.safetensors").read_bytes()
    assert bpc("calibrate", *words, "-o", tmp_path / "b.safetensors", "--work-dir", tmp_path / "w").code == 0
    assert (tmp_path / "b.safetensors").read_bytes() == (tmp_path / "a.safetensors").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"a.safetensors", "b.safetensors", "w"}
    shutil.copytree(text_folder, tmp_path / "notes")
    (tmp_path / "notes" / "more.txt").write_text(tiny.prose(600, seed=9))
    words[3] = tmp_path / "notes"
    ran = bpc("calibrate", *words, "-o", tmp_path / "a.safetensors", "--work-dir", tmp_path / "w")
    assert "corpus notes has changed since" in ran.err
