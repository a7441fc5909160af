"""`bpc bench`: byte floors by hand, baselines compared with float64, ratios computed from medians."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch

from bpc_calib import BPCError, InputError
from bpc_calib.backends import dispatch
from bpc_calib.backends.dispatch import backend
from bpc_calib.bench import decode, inputs, timing
from bpc_calib.bench import dense as dense_forms
from bpc_calib.bench.crossover import compared, find_crossover
from bpc_calib.bench.decode import (
    baseline,
    check_memory,
    decode_rows,
    fill,
    fitting_layers,
    step,
    total_bytes,
    weight_bytes_read,
)  # fmt: skip
from bpc_calib.bench.inputs import ONE, LayerShape, make, working_sets
from bpc_calib.bench.layer import layer_rows, right_forms
from bpc_calib.bench.machine import _left_in_groups as left_in_groups
from bpc_calib.bench.machine import cache_bytes, machine
from bpc_calib.bench.measure import Subject, check, run
from bpc_calib.bench.random_models import random_artifact, random_model, shape_config
from bpc_calib.bench.settings import SHAPES, Settings
from bpc_calib.bench.stages import stages_of
from bpc_calib.method import step as oracle
from bpc_calib.method.rules import Rules
from bpc_calib.method.scoring import quantize_query
from bpc_calib.runtime.cache import BPCCache
from bpc_cli.bench_tables import print_benchmark

CPU = torch.device("cpu")
MOST_BYTES = inputs.MOST_BYTES["cpu"]
SMALL = LayerShape(batch=2, kv_heads=2, group=3, dim=16, tokens=300, dtype=torch.float32)


@pytest.fixture(scope="module", autouse=True)
def few_working_sets():
    """Limit the working sets; whether caches are cold does not matter to these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(inputs.MOST_BYTES, "cpu", 1 << 20)
        yield


def softmax_attention(query, keys, values):
    """Compute attention in float64, one query at a time."""
    out = torch.empty(query.shape, dtype=torch.float64)
    for b, h, g in torch.cartesian_prod(*(torch.arange(size) for size in query.shape[:3])).tolist():
        logits = [
            sum(x * y for x, y in zip(query[b, h, g].tolist(), key, strict=True)) / math.sqrt(query.shape[-1])
            for key in keys[b, h].tolist()
        ]
        weights = [math.exp(logit - max(logits)) for logit in logits]
        mixed = sum(w * value for w, value in zip(weights, values[b, h].double(), strict=True))
        out[b, h, g] = mixed / sum(weights)
    return out


@pytest.fixture(scope="module")
def layer_result():
    """The rows of one shape at two budgets."""
    return layer_rows(SMALL, [0.7, 200], 1e9, 2, CPU)


def test_floors_are_the_bytes_of_the_definition():
    # 8 KV heads, 1,024 tokens, D=128, keys and values, 2 bytes per number: 8 * 1024 * 128 * 2 * 2.
    shape = LayerShape(batch=2, kv_heads=4, group=3, dim=128, tokens=1024, dtype=torch.bfloat16)
    assert inputs.dense_bytes(shape, 1024) == 4_194_304
    assert inputs.code_bytes(shape, 1024) == 8 * 1024 * 9
    assert inputs.stage_bytes(shape, 20) == {"score": 73_728, "attend": 81_920, "step": 155_648}
    assert inputs.least_microseconds(2_000_000, 1e9) == pytest.approx(2000)


def test_rows_have_the_floors_of_their_shape(layer_result):
    by_stage = {(row["budget"], row["stage"]): row for row in layer_result if row["method"] == "BPC"}
    # 4 rows, float32: codes of 300 * 9 bytes and 210 tokens of 16 * 2 * 4 bytes, at 1,000 bytes per microsecond.
    assert by_stage[0.7, "score"]["floor"] == 10.8
    assert by_stage[0.7, "attend"]["floor"] == 107.52
    assert by_stage[0.7, "step"]["floor"] == 118.32
    assert by_stage[200, "attend"]["floor"] == 102.4
    assert by_stage[200, "step"]["attended"] == 200
    assert "floor" not in by_stage[0.7, "select"]
    assert {row["floor"] for row in layer_result if row["method"] == "dense"} == {153.6}


def test_ratios_and_shares_are_computed_from_medians(layer_result):
    steps = [row for row in layer_result if row["method"] == "BPC" and row["stage"] == "step"]
    assert [row["budget"] for row in steps] == [0.7, 200]
    dense = [row for row in layer_result if row["method"] == "dense"]
    best = min(dense, key=lambda row: row["median"])
    assert [row for row in dense if row["best"]] == [best]
    for ours in steps:
        assert ours["times_dense"] == pytest.approx(best["median"] / ours["median"], abs=1e-3)
        assert ours["floor_share"] == pytest.approx(ours["floor"] / ours["median"], abs=1e-4)
    for row in layer_result:
        assert row["spread"][0] <= row["median"] <= row["spread"][1]


def test_all_stages_are_present_in_order(layer_result):
    stages = [row["stage"] for row in layer_result if row["method"] == "BPC" and row["budget"] == 200]
    assert stages == ["encode", "project", "score", "select", "attend", "step"]


def test_dense_baselines_are_softmax_attention():
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(2, 2, n, 8, generator=generator) for n in (3, 21, 21))
    expected = softmax_attention(query, keys, values)
    torch.testing.assert_close(dense_forms.exact(query, keys, values).double(), expected, rtol=1e-6, atol=1e-6)
    forms, missing = dense_forms.forms(CPU)
    assert (len(forms), missing) == (3, {})
    for form in forms.values():
        torch.testing.assert_close(form(query, keys, values).double(), expected, rtol=1e-5, atol=1e-5)


def test_a_form_that_computes_something_else_is_not_timed(monkeypatch):
    forms = {"right": dense_forms.folded, "wrong": lambda q, k, v: q, "broken": lambda q, k, v: 1 / 0}
    monkeypatch.setattr(dense_forms, "forms", lambda device: (forms, {"none": "absent"}))
    given = make(SMALL, ONE, CPU)
    found, notes = right_forms(given, CPU)
    assert {name for name in found if name.startswith("dense")} == {"dense/right"}
    assert notes["dense/none"] == "absent"
    assert "off by" in notes["dense/wrong"]
    assert "ZeroDivisionError" in notes["dense/broken"]


def test_a_wrong_step_of_bpc_stops_the_run(monkeypatch):
    monkeypatch.setattr("bpc_calib.bench.layer.step", lambda inputs, *others: inputs.query)
    with pytest.raises(BPCError, match=r"is off by .*: nothing was timed"):
        layer_rows(SMALL, [0.5], 1e9, 1, CPU)


@pytest.mark.parametrize("name", dispatch.BACKENDS)
def test_stages_end_in_what_a_cache_chooses(name, monkeypatch):
    if name == "triton" and (sys.platform != "linux" or torch.cuda.is_available()):
        pytest.skip("Triton is for Linux, and compiled kernels take no tensors on the CPU")
    monkeypatch.setenv("BPC_BACKEND", name)
    given = make(SMALL, ONE, CPU)
    (state,), rows, rules = given.states, given.rows(30), Rules(scaling=0.5)
    expected = oracle.best(quantize_query(given.query, given.codebook.projection), state, rows, rules, 16)
    stages, attend = stages_of(given.query, given.codebook, rows, rules)
    assert list(stages) == ["project", "score", "select"]
    stages["project"](state), stages["score"](state)
    found = stages["select"](state)
    assert torch.equal(found, expected)
    plain = oracle.attend(given.query, state, rows, expected, rules.scaling)
    torch.testing.assert_close(attend(state, found), plain, rtol=1e-5, atol=1e-5)


def test_timed_returns_microseconds_per_call_or_the_fault():
    calls: list[int] = []
    found = timing.timed({"three": [lambda: calls.append(1)] * 3, "bad": [lambda: 1 / 0]}, 4, CPU)
    assert len(found["three"]) == 4
    assert found["bad"].startswith("not measured: ZeroDivisionError")
    assert len(calls) == 1 + 3 + 4 * 3  # a first call, a first round, the repeats
    assert timing.summary([3.0, 1.0, 2.0]) == {"median": 2.0, "spread": [1.0, 3.0]}


@pytest.mark.parametrize("tokens", [256, 2048])
def test_working_sets_are_larger_than_the_caches(monkeypatch, tokens):
    monkeypatch.setitem(inputs.MOST_BYTES, "cpu", MOST_BYTES)
    monkeypatch.setattr(inputs, "cache_bytes", lambda device: 32 << 20)
    monkeypatch.setattr(inputs, "available_memory", lambda device: 16 << 30)
    shape = LayerShape(1, 8, 4, 128, tokens, torch.bfloat16)
    sets = working_sets(shape, 128, CPU)
    codes, token = 8 * tokens * 9, 8 * 128 * 2 * 2
    assert sets.codes * codes >= 128 << 20
    assert sets.keys * 128 * token >= 128 << 20
    assert sets.dense * tokens * token >= 128 << 20
    assert sets.steps * (codes + 128 * token) >= 128 << 20
    assert sets.cold
    held = inputs.room(tokens) * 8
    assert sets.codes * held * 9 + sets.keys * held * 128 * 4 <= MOST_BYTES
    monkeypatch.setitem(inputs.MOST_BYTES, "cpu", 100 << 20)
    assert not working_sets(shape, 128, CPU).cold


def test_calls_use_all_sets_in_turn():
    states = make(SMALL, inputs.Sets(5, 2, 1, 5), CPU).states
    taken = [{getattr(state, name).data_ptr() for state in states} for name in ("codes", "gain", "keys", "values")]
    assert [len(places) for places in taken] == [5, 5, 2, 2]
    assert len(states) == 5


def test_a_layer_that_does_not_fit_is_refused():
    with pytest.raises(InputError, match=r"4,000,000 tokens of 8000 KV heads need .* GB per layer"):
        working_sets(LayerShape(1000, 8, 4, 128, 4_000_000, torch.bfloat16), 128, CPU)


def test_the_last_caches_of_all_processors_are_counted(monkeypatch, tmp_path):
    for cpu, sharing in ((0, "0-1"), (1, "0-1"), (2, "2-3"), (3, "2-3")):
        for index, level, size, who in ((2, 2, "1024K", str(cpu)), (3, 3, "16384K", sharing)):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, text in (("level", str(level)), ("size", size), ("shared_cpu_list", who)):
                (folder / name).write_text(text + "\n")
    monkeypatch.setattr("bpc_calib.bench.machine.SYSTEM", tmp_path)
    for cpus, megabytes in (({0, 1, 2}, 32), ({0, 1}, 16), ({9}, 32)):  # the last set has no known cache
        monkeypatch.setattr("os.sched_getaffinity", lambda process, cpus=cpus: cpus, raising=False)
        assert cache_bytes(CPU) == megabytes << 20


def walk(wins_from, longest):
    measured = []

    def measure(tokens):
        measured.append(tokens)
        return {"tokens": tokens, "sparse_wins": tokens >= wins_from}

    return find_crossover(measure, longest), measured


def test_crossover_bisects_the_length_from_which_sparse_wins():
    found, measured = walk(3000, 1 << 17)
    assert measured == [256, 512, 1024, 2048, 4096, 8192, 3072, 2560]
    assert found["min_context"] == 3072
    assert [row["tokens"] for row in found["rows"]] == sorted(measured)
    assert walk(0, 4096)[0]["min_context"] == 0
    assert walk(10_000, 4096)[0]["min_context"] is None
    assert walk(4096, 4096)[0]["min_context"] == 4096


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_models_that_bpc_serves(name):
    from bpc_calib import describe

    described = describe(shape_config(name))
    assert described.id == name
    assert described.num_layers == SHAPES[name]["num_hidden_layers"]
    assert len(described.full_layers) == described.num_layers


def test_a_shape_may_have_fewer_layers_and_nothing_else_changes():
    config = shape_config("llama-3.1-8b", 4)
    assert config.to_dict() | {"num_hidden_layers": 32} == shape_config("llama-3.1-8b").to_dict()
    for arguments, fault in (
        (("llama-9",), "unknown shape 'llama-9': the shapes are llama-3.2-1b, "),
        (("qwen3-8b", 37), "layers must be 1 to 36 for qwen3-8b, not 37"),
        (("qwen3-8b", 0), "layers must be 1 to 36"),
        (("0x128x4",), "shape 0x128x4: takes 1 to 1,024 KV heads"),
        (("8x129x4",), "an even head dimension of 8 to 256"),
        (("8x128x17",), "1 to 16 query heads per KV head"),
    ):
        with pytest.raises(InputError) as refused:
            shape_config(*arguments)
        assert fault in str(refused.value)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "granite", "gemma3_text"])
def test_the_baseline_of_a_model_is_its_own_attention(family):
    model = tiny.model(family)
    cache = BPCCache(model.config, random_artifact(model.config), budget=1.0, dense_layers=())
    fill(cache, model.config, 2, 50, torch.float32, CPU)
    ids = torch.tensor([[3], [4]])
    with baseline(model, dense_forms.matmul):
        found = step(model, ids, cache)
    from bpc_calib import disable, enable

    plain = BPCCache(model.config, budget=1.0, dense_layers=())
    fill(plain, model.config, 2, 50, torch.float32, CPU)
    enable(model)
    expected = step(model, ids, plain)
    disable(model)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert model.config._attn_implementation == "sdpa"


def rows_of(artifact=None, model=None, layers=3, tokens=300, **settings):
    """Time decoding after some tokens with a tiny model."""
    model = tiny.model() if model is None else model
    settings = Settings(**{"budgets": (0.5,), "dense_layers": (), "repeats": 2, "compiled": False} | settings)
    return decode_rows(model, artifact or random_artifact(model.config), 1, tokens, settings, layers, 1e9)


def test_a_model_cut_to_fewer_layers_has_the_bytes_and_times_of_all(monkeypatch):
    (whole,) = rows_of(model=tiny.model(num_hidden_layers=6), layers=6, tokens=600)
    monkeypatch.setattr(decode, "clock", lambda run, device: 0.001)
    (cut,) = rows_of(model=tiny.model(num_hidden_layers=2), layers=6, tokens=600)
    for side in ("transformers", "full", "bpc"):
        assert cut[side]["floor"] == pytest.approx(whole[side]["floor"], abs=2e-3)
        assert cut[side]["milliseconds"] == 1


def test_times_grow_by_layer():
    # 2 of 6 layers: 4 ms without them, 6 ms for the 2, 18 ms for the 6.
    assert decode._of_all_layers([10.0, 7.0], [4.0, 1.0], 3) == [22.0, 19.0]


@torch.no_grad()
def test_variants_share_weights_keys_and_values():
    model, seen = tiny.model(), []
    timed = decode._timed_variants

    def look(ids, variants, repeats):
        seen.append((ids, variants))
        return timed(ids, variants, repeats)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "_timed_variants", look)
        rows_of(model=model, layers=5)
    ids, variants = seen[0]
    assert set(variants) >= {"transformers", "0.5", "rest", "rest of transformers"}
    held = {each.data_ptr() for each in model.parameters()}
    for variant in variants.values():
        assert {each.data_ptr() for each in variant.model.parameters()} <= held
    own, ours = variants["transformers"].cache, variants["0.5"].cache
    for one, other in zip(own.layers, ours.layers, strict=True):
        assert one.keys.data_ptr() == other.keys.data_ptr()
        assert one.keys.shape == other.keys.shape == (1, 2, 300, 8)
    hidden = model.model.norm(model.model.embed_tokens(ids))
    torch.testing.assert_close(step(variants["rest of transformers"].model, ids, own), model.lm_head(hidden))
    assert len(model.model.layers) == 3


def test_as_many_layers_as_memory_holds(monkeypatch):
    def layers(free, tokens=100_000, batch=1):
        monkeypatch.setattr(decode, "available_memory", lambda device: free)
        return fitting_layers(lambda count: shape_config("llama-3.2-1b", count), 16, batch, tokens, torch.bfloat16)

    assert layers(64 << 30) == 16
    assert layers(1 << 30) == 1
    some = layers(6 << 30)
    assert 1 < some < 16
    config = shape_config("llama-3.2-1b", some)
    check_memory(config, total_bytes(config, torch.bfloat16), 1, 100_000, torch.bfloat16, CPU)
    assert layers(6 << 30, batch=8) < some < layers(6 << 30, tokens=1000)


def test_weights_that_a_step_reads():
    for tied in (True, False):
        model = tiny.model(tie_word_embeddings=tied)
        everything = sum(each.numel() for each in model.parameters()) * 4
        assert weight_bytes_read(model) == everything - (0 if tied else 260 * 32 * 4)


def test_random_models_have_the_dtype_and_memory_is_checked_first():
    config = tiny.config()
    model = random_model(config, torch.bfloat16, CPU)
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    with pytest.raises(InputError, match=r"decoding 64 x 4,000,000 tokens with llama needs about .* GB"):
        check_memory(config, 0, 64, 4_000_000, torch.bfloat16, CPU)


def test_a_shape_of_ones_own_has_the_proportions_of_llama():
    ours, llama = shape_config("8x128x4"), shape_config("llama-3.1-8b")
    assert ours.name_or_path == "8x128x4"
    assert ours.to_diff_dict() == llama.to_diff_dict()
    config = shape_config("2x64x3", 4)
    assert (config.num_key_value_heads, config.head_dim, config.num_attention_heads) == (2, 64, 6)
    assert (config.hidden_size, config.num_hidden_layers) == (384, 4)


@pytest.mark.parametrize(
    ("membership", "groups", "left"),
    [
        # Version 2: the least of the group and of what holds it; "max" is no limit.
        ("0::/a/b", {"a/b": (900, 300, "inactive_file 50"), "a": (500, 400, "anon 1\ninactive_file 20")}, [650, 120]),
        ("0::/a", {"a": ("max", 300, "")}, []),
        ("0::/", {"": (900, 1000, "")}, [0]),  # in a container, which used more than it may
        # Version 1, beside the others; the path of a container's host is not visible in it.
        ("5:cpu:/a\n4:memory:/docker/x\n0::/", {"memory": (900, 300, "total_inactive_file 7")}, [607]),
        ("4:memory:/a", {"memory/a": (900, 300, ""), "memory": (2**63 - 4096, 5000, "")}, [600, 2**63 - 9096]),
        ("5:cpu:/a", {"memory/a": (900, 300, "")}, []),
    ],
)
def test_memory_that_a_container_may_not_take_is_not_free(tmp_path, membership, groups, left):
    (tmp_path / "cgroup").write_text(membership)
    for folder, (limit, used, stat) in groups.items():
        first = folder.startswith("memory")
        group = tmp_path / "fs" / folder
        group.mkdir(parents=True, exist_ok=True)
        (group / ("memory.limit_in_bytes" if first else "memory.max")).write_text(f"{limit}\n")
        (group / ("memory.usage_in_bytes" if first else "memory.current")).write_text(f"{used}\n")
        (group / "memory.stat").write_text(stat)
    assert left_in_groups(str(tmp_path / "cgroup"), tmp_path / "fs") == left


def test_machine_facts_name_no_folder():
    facts = machine()
    assert set(facts["versions"]) == {"bpc-calib", "torch", "transformers", "triton"}
    assert str(Path.home()) not in json.dumps(facts)


@pytest.fixture(scope="module")
def result():
    """A whole run on the tiny model."""
    config = tiny.config()
    settings = Settings(
        lengths=(300, 400), batch_sizes=(1, 2), budgets=(0.5,), prefill_tokens=60, repeats=2, compiled=False
    )
    shares = []
    subject = Subject(config, tiny.model, torch.float32, CPU)
    made = run(settings, subject, lambda share, what: shares.append(share))
    assert shares == sorted(shares)
    assert shares[-1] == 1
    return made


def test_result_schema(result):
    assert json.loads(json.dumps(result)) is not None
    assert set(result) >= {"device", "backend", "machine", "settings", "memory_bandwidth", "layer", "decode", "prefill"}
    assert result["device"] == "cpu"
    assert result["backend"] == backend(CPU)
    assert result["memory_bandwidth"]["bytes_per_second"] > 1e8
    assert result["settings"]["kv_heads"] == 2
    assert result["settings"]["dtype"] == "float32"
    shapes = {(row["batch"], row["group"], row["tokens"]) for row in result["layer"]}
    assert shapes == {(batch, group, tokens) for batch in (1, 2) for group in (2,) for tokens in (300, 400)}
    assert result["decode"]["projections"] == "random"
    assert result["decode"]["positions_beyond_limit"] is True
    assert [row["tokens"] for row in result["prefill"]["rows"]] == [60, 60, 300, 400]


def test_decoding_rows_are_consistent(result):
    model = tiny.model()
    rows = result["decode"]["rows"]
    assert [(row["batch"], row["tokens"]) for row in rows] == [(1, 300), (1, 400), (2, 300), (2, 400)]
    rate = result["memory_bandwidth"]["bytes_per_second"]
    for row in rows:
        length = row["tokens"] + 1
        assert row["attended"] == max(192, length // 2)
        forms = row["dense_forms"]
        assert set(forms) == {"SDPA, group folded", "matmul, softmax, matmul", "every token in native (ours)"}
        assert row["full"]["milliseconds"] == min(each["milliseconds"] for each in forms.values())
        assert forms[row["full"]["form"]]["times_bpc"] == row["times_full"]
        for side in ("bpc", "full", "transformers"):
            assert row[side]["tokens_per_second"] == pytest.approx(
                1e3 * row["batch"] / row[side]["milliseconds"], rel=0.01
            )
            assert row[side]["peak_bytes"] > 1e6
        token = 2 * 2 * 8 * 4  # bytes per layer
        weights = weight_bytes_read(model)
        for side, cached in (
            ("full", 3 * length * token),
            ("transformers", 3 * length * token),
            ("bpc", 3 * (row["attended"] * token + length * 2 * 9)),
        ):
            expected = 1e3 * (weights + row["batch"] * cached) / rate
            assert row[side]["floor"] == pytest.approx(expected, abs=1e-3)
        assert row["times_full"] == pytest.approx(row["full"]["milliseconds"] / row["bpc"]["milliseconds"], abs=1e-3)
        limit = row["full"]["floor"] / row["bpc"]["floor"]
        assert (row["limit_times_full"], row["limit_reached"]) == pytest.approx(
            (limit, row["times_full"] / limit), abs=2e-3
        )
        assert row["compiled"] is False
        verify, batch = row["verify"], row["batch"]
        assert verify["tokens_per_second"] == pytest.approx(5e3 * batch / verify["milliseconds"], rel=0.01)
        right = 0.9**batch  # in every sequence
        kept = batch * sum(right**place for place in range(5))
        seconds = (4 * row["bpc"]["milliseconds"] + verify["milliseconds"]) / 1e3
        assert row["exact"]["tokens_per_second"] == pytest.approx(kept / seconds, rel=0.01)


def test_prefill_share_is_that_of_hashing(result):
    row = result["prefill"]["rows"][0]
    assert row["hashing_share"] == pytest.approx(row["hashing"]["median"] / row["bpc"]["median"], abs=0.01)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"parts": ("layer", "speed")}, "unknown part 'speed': the parts are layer, decode, prefill"),
        ({"parts": ()}, "--parts: give at least one"),
        ({"lengths": (8,)}, "--lengths must be 16 to 4,194,303, not 8"),
        ({"lengths": (5_000_000,)}, "--lengths must be 16 to 4,194,303, not 5,000,000"),
        ({"lengths": ()}, "--lengths: give at least one"),
        ({"batch_sizes": (0,)}, "--batch-sizes must be 1 to 4,096, not 0"),
        ({"prefill_tokens": 0}, "--prefill-tokens must be 16 to"),
        ({"repeats": 0}, "--repeats must be 1 to 1,000, not 0"),
        ({"budgets": ()}, "--budgets: give at least one"),
        ({"budgets": (1.5,)}, "budget must be a share in (0, 1]"),
        ({"dense_layers": (7,)}, "dense_layers: 7 is not a layer of llama"),
        ({"dense_layers": (0, 1, 2)}, "leave BPC no layer"),
        ({"crossover": True, "lengths": (100,)}, "--crossover starts at 256 tokens"),
    ],
)
def test_bad_settings_are_refused_before_any_work(changes, fault):
    with pytest.raises(InputError) as refused:
        check(Settings(**changes), tiny.config(), None)
    assert fault in str(refused.value)


TINY = ("--lengths", "200", "--repeats", "2", "--dtype", "float32", "--no-compile")


def test_the_command_prints_tables_and_writes_files(bpc, model_folder, tmp_path):
    output = tmp_path / "bench.json"
    words = ("bench", "-m", model_folder, *TINY, "--prefill-tokens", "40", "--budgets", "80%,150", "-q")
    ran = bpc(*words, "-o", output)
    assert ran.code == 0, ran.err
    assert ran.err == ""
    for part in (
        f"backend {backend(CPU)}",
        "Memory bandwidth",
        "BPC by stage, us: 2 KV heads, 2 queries each, D=8, float32, batch 1",
        "A whole step, beside the fastest dense form",
        "Tokens per second of tiny-llama (3 layers, MLP 48, vocabulary 260), dense layers none, batch 1",
        "Prefill with tiny-llama",
        "Random projections: which tokens are chosen means nothing",
        "stock: transformers as it is; full: full attention in its fastest form (",
    ):
        assert part in ran.out
    written = json.loads(output.read_text())
    assert {row["budget"] for row in written["layer"] if row["method"] == "BPC"} == {0.8, 150}
    assert str(tmp_path) not in output.read_text()
    assert str(model_folder.parent) not in output.read_text()
    ran = bpc(*words, "-o", output)
    assert (ran.code, ran.out) == (1, "")
    assert "bench.json: exists; pass --force" in ran.err


def test_json_is_the_only_output(bpc):
    words = ("bench", "--shape", "2x16x4", *TINY, "--batch-sizes", "2")
    ran = bpc(*words, "--parts", "layer,decode", "--json")
    assert ran.code == 0, ran.err
    made = json.loads(ran.out)
    assert "prefill" not in made
    assert (made["decode"]["layers"], made["decode"]["whole_layers"]) == (32, 32)
    assert made["decode"]["rows"][0]["batch"] == 2
    assert made["settings"]["group_size"] == 4


def test_crossover_says_what_to_pass(bpc, capsys):
    words = ("bench", "--crossover", "--shape", "2x16x4", "--lengths", "512", *TINY[2:], "-q")
    ran = bpc(*words, "--json")
    assert ran.code == 0, ran.err
    made = json.loads(ran.out)
    found = made["crossover"][0]
    # What a model runs below `min_context`: never BPC's kernel.
    assert {row["form"] for row in found["rows"]} <= {"SDPA, group folded", "matmul, softmax, matmul"}
    assert [row["tokens"] for row in found["rows"]][:2] == [256, 512]
    for row in found["rows"]:
        assert row["sparse_wins"] == (row["sparse"]["median"] < row["dense"]["median"])
        assert row["times_dense"] == pytest.approx(row["dense"]["median"] / row["sparse"]["median"], abs=1e-3)
    lines = {
        0: "BPC was faster at every length: min_context=0",
        512: "BPCCache(min_context=512), bpc generate --min-context 512",
        None: "Dense was still faster at",
    }
    for value, line in lines.items():
        made["crossover"] = [found | {"min_context": value}]
        print_benchmark(made)
        assert line in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("-m", "./nowhere"), "./nowhere: no such model folder"),
        (("-a", "none.safetensors"), "none.safetensors"),
        (("-o", "no/such.json"), "no/such.json: there is no folder no"),
        (("--device", "cuda:99"), "device cuda:99 cannot be used"),
    ],
)
def test_what_cannot_be_opened_is_one_line_and_writes_nothing(bpc, tmp_path, monkeypatch, words, part):
    monkeypatch.chdir(tmp_path)
    ran = bpc("bench", *words)
    assert (ran.code, ran.out, ran.err.count("\n")) == (1, "", 1)
    assert ran.err.startswith("Error: ")
    assert part in ran.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--shape", "llama-9"), "unknown shape 'llama-9'"),
        (("--lengths", "many"), "many: expected numbers, like 2048,8192"),
        (("--lengths", "5"), "--lengths must be 16 to 4,194,303, not 5"),
        (("--batch-sizes", "0"), "--batch-sizes must be 1 to 4,096, not 0"),
        (("--crossover", "--parts", "layer"), "--crossover takes the place of the parts: leave out --parts"),
        (("--parts", "all"), "unknown part 'all'"),
        (("--budgets", "2x"), "2x: expected a share of the tokens"),
        (("--dense-layers", "one"), "one: expected layers"),
        (("-m", "demo", "--shape", "2x16x4"), "--shape is for random weights: leave out --model"),
        (("--device", "toaster"), "device toaster is not known"),
    ],
)
def test_what_cannot_be_measured_is_wrong_usage(bpc, words, part):
    ran = bpc("bench", *words)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert part in ran.err


def test_decoding_sorts_the_safeguards_list_once(monkeypatch):
    from bpc_calib.runtime import hashed_layer

    config = tiny.config()
    calibrated = random_artifact(config)
    algorithm = calibrated.metadata["algorithm"] | {"name": "paper"}
    calibrated = replace(calibrated, metadata=calibrated.metadata | {"algorithm": algorithm})
    assert BPCCache(config, calibrated).layers[2].rules.safeguard == 0.1
    sorted_lists = []
    before = hashed_layer.worst_first
    monkeypatch.setattr(hashed_layer, "worst_first", lambda error: sorted_lists.append(error) or before(error))
    rows_of(calibrated, budgets=(0.5, 150), repeats=3)
    assert len(sorted_lists) == 3  # one per layer


def test_a_failing_dense_form_is_noted_and_no_form_is_an_error(monkeypatch):
    forms = {"right": dense_forms.folded, "broken": lambda q, k, v: 1 / 0}
    monkeypatch.setattr(dense_forms, "forms", lambda device: (forms, {"none": "absent"}))
    (row,) = rows_of()
    assert row["full"]["form"] == "right"
    assert row["dense_forms"]["none"]["note"] == "absent"
    assert "ZeroDivisionError" in row["dense_forms"]["broken"]["note"]
    del forms["right"]
    with pytest.raises(BPCError, match=r"no dense attention is correct on this machine \(broken: not measured: Zero"):
        rows_of()
    with pytest.raises(BPCError, match=r"no dense form can be timed \(.*broken"):
        compared(SMALL, 300, 0.5, 1e9, 1, CPU)


def test_a_variant_that_fails_in_the_model_does_not_stop_the_others(monkeypatch):
    def failing(*given, **more):
        raise RuntimeError("no choice")

    monkeypatch.setattr("bpc_calib.runtime.hashed_layer.BPCLayer.decode", failing)
    (row,) = rows_of()
    assert (row["bpc"]["milliseconds"], row["times_full"]) == (None, None)
    assert "no choice" in row["bpc"]["note"]
    assert row["full"]["milliseconds"] > 0
    assert (row["transformers"]["milliseconds"] > 0, row["limit_times_full"]) == (True, None)


def test_a_failing_part_does_not_stop_the_others_and_finished_parts_are_written(
    bpc, model_folder, tmp_path, monkeypatch
):
    output = tmp_path / "a.json"

    def failing(*given):
        assert json.loads(output.read_text())["layer"]
        raise RuntimeError("no decoding")

    monkeypatch.setattr("bpc_calib.bench.decode.decode_rows", failing)
    ran = bpc("bench", "-m", model_folder, *TINY, "--prefill-tokens", "40", "-o", output, "-q")
    assert ran.code == 0, ran.err
    assert "decode, 200 tokens: not measured: RuntimeError: no decoding" in ran.out
    made = json.loads(output.read_text())
    assert made["left_out"] == [{"what": "decode, 200 tokens", "note": "not measured: RuntimeError: no decoding"}]
    assert made["prefill"]["rows"]
    ran = bpc("bench", "-m", model_folder, *TINY, "--parts", "decode", "-q")
    assert (ran.code, ran.out) == (1, "")


def test_settings_follow_the_papers_projections_and_memory_is_checked_before_any_work(monkeypatch):
    config = tiny.config()
    given = random_artifact(config)
    given = replace(given, metadata=given.metadata | {"algorithm": given.metadata["algorithm"] | {"name": "paper"}})
    settings = Settings(parts=("layer",), lengths=(200,), repeats=1)
    made = run(settings, Subject(config, tiny.model, torch.float32, CPU, given))["settings"]
    assert (made["group"], made["gain"], made["safeguard"], made["recent"]) == ("max", False, 0.1, 1)
    assert total_bytes(config, torch.float32) == sum(each.nbytes for each in tiny.model().parameters())
    monkeypatch.setattr("bpc_calib.bench.measure.layer_rows", lambda *given: pytest.fail("measured"))
    monkeypatch.setattr("bpc_calib.bench.decode.available_memory", lambda device: 1 << 29)
    with pytest.raises(InputError, match="decoding 1 x 200 tokens with llama needs about"):
        run(replace(settings, parts=("layer", "decode")), Subject(config, tiny.model, torch.float32, CPU))
