"""Keys and values in memory-mapped files: what is kept, what is given back, and what a full disk does."""

import copy
import mmap
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from test_chat import save
from test_runtime import SMALL, enabled, generate, ids

from bpc_calib import BPCCache, InputError, State, checked_decoding, exact_decoding, find, static_generate
from bpc_calib.compat import with_cache
from bpc_calib.method.state import alike
from bpc_calib.runtime.kv_device import kv_place
from bpc_calib.runtime.mapped import TAKEN_AT_ONCE, TokenFile, with_room
from bpc_cli import decoding

TESTS = Path(__file__).parent


def on_disk(model, folder, **rules):
    return BPCCache(model.config, **SMALL | rules, kv_device=f"disk:{folder}")


@pytest.mark.parametrize("kv_device", ["", "disk", "disk:", "gpu", "CPU", Path("/tmp")])
def test_what_names_no_folder_is_refused(kv_device):
    with pytest.raises(InputError, match=r"kv_device must be cpu, .* or disk:FOLDER, .*, not"):
        BPCCache(tiny.model().config, kv_device=kv_device)


def test_a_home_folder_may_be_named():
    assert kv_place("disk:~").folder == Path.home()


@pytest.mark.parametrize("folder", ["missing", "file", "/proc"])
def test_a_folder_that_cannot_hold_files_is_refused(folder, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"no file can be made there: \w+") as refused:
        BPCCache(tiny.model().config, kv_device=f"disk:{tmp_path / folder}")
    assert "\n" not in str(refused.value)


def test_keys_and_values_of_a_token_lie_side_by_side_in_a_file_without_a_name(tmp_path):
    model = enabled()
    cache = on_disk(model, tmp_path)
    generate(model, **with_cache(cache))
    keys, values = cache.layers[0].keys, cache.layers[0].values
    assert values.data_ptr() - keys.data_ptr() == keys.shape[-1] * keys.element_size()
    assert not keys.is_contiguous()
    assert cache.layers[0].buffers["codes"].is_contiguous()
    assert not list(tmp_path.iterdir())


def test_a_file_grows_without_a_copy_up_to_the_limit_and_by_copies_beyond(tmp_path):
    keys = torch.randn(2, 2, 3000, 4)
    file = with_room(None, tmp_path, keys[:, :, :10], 0, 2000)
    file.keys[:, :, :10] = file.values[:, :, :10] = keys[:, :, :10]
    assert with_room(file, tmp_path, keys[:, :, 10:2000], 10, 2000) is file
    assert file.taken == file.room == 2 * TAKEN_AT_ONCE
    larger = with_room(file, tmp_path, keys, 10, 2000)
    assert larger.room >= 2 * 3010
    assert larger.taken == 3 * TAKEN_AT_ONCE  # and not all that it has addresses for
    assert torch.equal(larger.values[:, :, :10], keys[:, :, :10])


def test_a_file_has_blocks_for_its_tokens_alone(tmp_path):
    file = TokenFile(tmp_path, (1, 2, 1 << 20, 64), torch.float32)
    file.take(5)
    held = os.fstat(file.file.fileno())
    assert held.st_size == 2 * (1 << 20) * file.token
    assert held.st_blocks * 512 < 2 * TAKEN_AT_ONCE * file.token * 1.1


def test_rows_that_are_not_in_memory_are_fetched(tmp_path):
    """Scattered ones, more than the kernel looks up at once, in pages that the system has dropped."""
    file = TokenFile(tmp_path, (1, 2, 80_000, 64), torch.float32)
    file.take(80_000)
    keys, values = torch.randn(2, 1, 2, 80_000, 64)
    file.keys[:, :, :80_000], file.values[:, :, :80_000] = keys, values
    chosen = torch.randperm(80_000)[:600].sort().values.expand(1, 2, -1)
    query, rows = torch.randn(1, 2, 4, 64), alike(keys, 600)
    kernels = find(query, State(keys, values))
    expected = kernels.attend(query, State(keys, values), rows, chosen)
    file.mapping.flush()
    file.mapping.madvise(mmap.MADV_DONTNEED)
    os.posix_fadvise(file.file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert torch.equal(kernels.attend(query, State(file.keys, file.values, mapped=True), rows, chosen), expected)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_cache_that_was_filled_in_inference_mode_goes_on_outside(mode, tmp_path):
    model = enabled()
    made = []
    for cache in (BPCCache(model.config, **SMALL), on_disk(model, tmp_path)):
        with mode():
            model(ids(), **with_cache(cache))
            model(ids(1), **with_cache(cache))
        buffer = cache.layers[0].buffers["keys"].data_ptr()
        made.append(generate(model, ids(50), **with_cache(cache))[0])
        if cache.layers[0].file is not None:
            assert cache.layers[0].buffers["keys"].data_ptr() == buffer
    assert torch.equal(*made)


def test_copies_are_independent_and_have_files_of_their_own(tmp_path):
    model = enabled()
    cache = on_disk(model, tmp_path)
    generate(model, **with_cache(cache), max_new_tokens=2, min_new_tokens=2)
    cache.crop(-1)
    once, again = copy.deepcopy(cache), copy.deepcopy(cache)
    pointers = {each.layers[0].file.mapping: each.layers[0].keys.data_ptr() for each in (cache, once, again)}
    assert len(set(pointers.values())) == 3
    first = generate(model, ids(50, seed=1), **with_cache(once))
    generate(model, ids(60, seed=2), **with_cache(cache))
    second = generate(model, ids(50, seed=1), **with_cache(again))
    assert all(map(torch.equal, first, second))
    assert once.layers[0].buffers["keys"].data_ptr() == once.layers[0].file.keys.data_ptr()


@pytest.mark.parametrize(
    "how", [{"custom_generate": exact_decoding, "draft": 3}, {"custom_generate": checked_decoding}]
)
def test_verified_decoding_is_that_of_memory(how, tmp_path):
    model = enabled()
    made = [
        generate(model, **with_cache(cache), **how, max_new_tokens=20, min_new_tokens=20)
        for cache in (BPCCache(model.config, **SMALL), on_disk(model, tmp_path))
    ]
    assert all(map(torch.equal, *made))


def test_rewinding_and_cropping_keep_the_file_and_an_empty_cache_has_none(tmp_path):
    model = enabled()
    made, files = [], []
    for cache in (BPCCache(model.config, **SMALL), on_disk(model, tmp_path)):
        found = [generate(model, **with_cache(cache))]
        files.append(cache.layers[0].file)
        cache.rewind(39)
        cache.crop(-1)
        found.append(generate(model, **with_cache(cache)))
        files.append(cache.layers[0].file)
        cache.crop(-45)
        assert cache.layers[0].file is None
        found.append(generate(model, ids(rows=2), **with_cache(cache)))
        made.append([tensor for pair in found for tensor in pair])
    assert files[0] is files[1] is None
    assert files[2] is files[3] is not None
    assert all(map(torch.equal, *made))


def test_static_steps_are_refused(tmp_path):
    model = enabled()
    with pytest.raises(InputError, match="static steps read keys and values where the model is: leave kv_device out"):
        static_generate(model, ids(), cache=on_disk(model, tmp_path), max_new_tokens=2)


SMALL_DISK = """
import os, sys, torch
from test_kv_device import SMALL, enabled, ids, on_disk
from bpc_calib import BPCCache, InputError
from bpc_calib.compat import with_cache

folder = sys.argv[1]
family = sys.argv[2]
model = enabled(family, max_position_embeddings=1 << 20)
disk, memory = on_disk(model, folder), BPCCache(model.config, **SMALL)
free = lambda: os.statvfs(folder).f_bfree

def step(cache, tokens):
    with torch.no_grad():
        return model(ids(tokens, seed=tokens), **with_cache(cache)).logits[:, -1]

before = free()
for cache in (disk, memory):
    step(cache, 40)
assert free() < before
held = free()
try:
    step(disk, 9000)
except InputError as fault:
    print(fault)
assert free() == held
assert torch.equal(step(disk, 1), step(memory, 1))
assert torch.equal(step(disk, 3), step(memory, 3))
disk.reset()
assert free() == before
print("as before")
"""


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_full_disk_is_one_line_and_the_cache_goes_on(family, tmp_path):
    """In a file system of two megabytes, which a user may mount in a name space of their own."""
    mount = f"mount -t tmpfs -o size=2m none {tmp_path}"
    inside = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if sys.platform != "linux" or subprocess.run([*inside, mount], capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount a file system")
    script = f"{mount} && exec {sys.executable} - {tmp_path} {family}"
    ran = subprocess.run([*inside, script], input=SMALL_DISK, cwd=TESTS, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    refused, last = ran.stdout.splitlines()
    assert "has no room for keys and values of 9,040 tokens (No space left on device): they need at least" in refused
    assert last == "as before"


def test_a_file_beyond_the_limit_of_the_process_is_one_line(tmp_path):
    script = f"import sys; sys.argv[1:] = [{str(tmp_path)!r}, 'llama']\n{SMALL_DISK}"

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=TESTS, preexec_fn=limited, capture_output=True, text=True, check=False
    )
    assert "no room for keys and values of" in ran.stderr.splitlines()[-1]
    assert "(File too large)" in ran.stderr.splitlines()[-1]


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_commands_take_the_folder(command, bpc, tmp_path, monkeypatch):
    monkeypatch.setattr(decoding, "CHUNK", 16)
    message = "the old stone bridge"
    words = [command, "-m", save(tmp_path / "chatty"), "--max-new-tokens", 5, "--min-context", 0]
    words += ["-p", message] if command == "generate" else []
    made = [
        bpc(*words, *more, stdin=f"{message}\nand a river\n/reset\n{message}\n")
        for more in ((), ("--kv-device", f"disk:{tmp_path}"), ("--kv-device", f"disk:{tmp_path}/missing"))
    ]
    assert [each.code for each in made] == [0, 0, 1], made
    assert made[0].out == made[1].out != ""
    assert made[2].err.count("\n") == 1
    assert "no file can be made there: No such file or directory" in made[2].err
