"""BPC's backend for GPUs inside vLLM on a CPU: plain torch stands in for FlashAttention, the rest is what a GPU runs.

Needs vLLM (`make test-vllm`).
"""

import copy
import dataclasses
from types import SimpleNamespace

import pytest
import tiny
import torch

pytest.importorskip("vllm")

import serving_engine  # noqa: F401 (the first that imports from vLLM)
from flash_on_cpu import Backend, attend, cache
from serving_engine import N_GRAMS, PAGE, Engine, ids, made_artifact
from vllm.config import set_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadataBuilder

from bpc_calib import BPCError
from bpc_calib.backends.triton import backend as triton
from bpc_calib.demo import DEMO_MODEL
from bpc_calib.method.budget import attended
from bpc_calib.serving.attention import GPUAttention, GPUBackend, GPUBuilder
from bpc_calib.serving.code_cache import CodeCache, Kept

BACKEND = f"{Backend.__module__}.{Backend.__qualname__}"


@pytest.fixture(scope="module", autouse=True)
def flash_attention():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlashAttentionImpl, "forward", attend)
        patch.setattr(FlashAttentionImpl, "do_kv_cache_update", cache)
        yield


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    return made_artifact(DEMO_MODEL, tmp_path_factory.mktemp("artifact") / "demo.safetensors", needs=True)


@pytest.fixture(scope="module")
def engine(artifact):
    made = Engine(DEMO_MODEL, artifact, backend=BACKEND, num_gpu_blocks_override=40)
    assert {type(layer.impl) for layer in made.attention()} == {GPUAttention}
    return made


@pytest.fixture(scope="module")
def drafting(artifact):
    options = {"speculative_config": N_GRAMS, "disable_log_stats": False}
    return Engine(DEMO_MODEL, artifact, backend=BACKEND, num_gpu_blocks_override=40, **options)


def test_without_options_vllm_is_stock(engine):
    without = dataclasses.replace(engine.config, additional_config={})
    with set_current_vllm_config(without):
        assert GPUBackend.get_impl_cls() is FlashAttentionImpl
    stock = FlashAttentionMetadataBuilder.get_cudagraph_support(without, None)
    assert GPUBuilder.get_cudagraph_support(without, None) is stock
    asked = GPUBuilder.get_cudagraph_support(engine.config, None)
    assert asked is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    codes = CodeCache(1, Kept(1)).get_attn_backend().get_builder_cls()
    assert codes.get_cudagraph_support(engine.config, None) is AttentionCGSupport.ALWAYS


def test_five_requests_at_once_choose_what_the_layer_chooses(engine, monkeypatch):
    """Prompts go in by chunks of at most 256 tokens, so decoding steps and chunks share passes."""
    prompts = [ids(length, seed=length) for length in (900, 140, 1500, 300, 650)]
    with engine.checked(monkeypatch) as counted:
        engine.generate(*prompts)
    assert counted.together == 5
    assert counted.rows == 5 * 11 * 4  # the first token comes from the prefill


def test_tokens_behind_rejected_drafts_get_their_own_codes(drafting, monkeypatch):
    """A pass that verifies drafts hashes them; those that are rejected leave their slots to other tokens."""
    with drafting.checked(monkeypatch) as counted:
        drafting.generate(*(ids(length, seed=length) for length in (900, 140, 300)), new=20)
    drafts, offered, accepted = drafting.drafts()
    assert 0 < accepted < offered
    assert counted.together > 1
    least = 4 * (3 * 19 - drafts - accepted)  # all but what verification wrote; the end of an answer may cut 3 tokens
    assert 0 < least <= counted.rows <= least + 4 * 3 * 3


def test_the_sparse_path_over_all_tokens_is_dense(engine, monkeypatch):
    """A short request, too, attends to its tokens through a list."""
    prompts, build = [ids(length, seed=length) for length in (900, 140, 1500, 5)], GPUBuilder.build

    def everything(builder, *arguments):
        if builder.counts is not None:
            monkeypatch.setattr(builder, "counts", torch.arange(len(builder.counts)))
            for width in ("width", "spread_width"):
                monkeypatch.setattr(builder, width, len(builder.counts) - 1)
        return build(builder, *arguments)

    monkeypatch.setattr(GPUBuilder, "build", FlashAttentionMetadataBuilder.build)
    dense, _ = engine.generate(*prompts)
    engine.use()
    monkeypatch.setattr(GPUBuilder, "build", everything)
    assert engine.generate(*prompts)[0] == dense


def test_a_cached_prompt_keeps_its_codes(engine, monkeypatch):
    prompt = ids(900)
    with engine.checked(monkeypatch) as counted:
        (first,), (none,) = engine.generate(prompt)
        (second,), (cached,) = engine.generate(prompt)
    assert (none, cached) == (0, 900 // PAGE * PAGE)
    assert first == second
    assert counted.rows == 2 * 11 * 4


def test_the_kernels_serve(engine, monkeypatch):
    """Triton's, interpreted: the first answers' tokens of two requests, and what every step chooses."""
    prompts = [ids(PAGE + 4), ids(20, seed=1)]
    plain, _ = engine.generate(*prompts, new=3)
    engine.use()
    for layer in engine.attention():
        if layer.impl.codebook:
            monkeypatch.setattr(layer.impl, "backend", triton)
    with engine.checked(monkeypatch) as counted:
        kernels, _ = engine.generate(*prompts, new=3)
    assert counted.rows == 2 * 2 * 4
    assert kernels == plain


def test_weights_loaded_again_leave_the_tensors_where_they_are(engine):
    layer = next(each for each in engine.attention() if each.impl.codebook)
    impl = layer.impl
    held, cache = impl.codebook, impl.cache
    tensors = (held.projection, held.matrix, held.gram, held.metric, held.mean)
    before = [each.clone() for each in tensors]
    with torch.inference_mode():
        for each in tensors:
            each.zero_()
    impl.process_weights_after_loading(torch.float32)
    assert impl.codebook is held
    assert impl.cache is cache
    assert all(map(torch.equal, tensors, before))


@pytest.mark.parametrize("a_model_drafts", [True, False])
def test_a_model_that_drafts_is_stock(engine, a_model_drafts):
    served = engine.config.model_config
    config = copy.copy(engine.config)
    config.speculative_config = SimpleNamespace(
        draft_model_config=served, target_model_config=None if a_model_drafts else served
    )
    with set_current_vllm_config(config):
        assert GPUBackend.get_impl_cls() is (FlashAttentionImpl if a_model_drafts else GPUAttention)


def test_keys_of_8_bits_are_hashed_as_they_come(engine):
    """Before they are rounded; queries that vLLM rounded, too, get their dtype back."""
    layer = next(each for each in engine.attention() if each.impl.codebook)
    impl, found = layer.impl, []
    kv_cache = torch.zeros(4, impl.num_kv_heads, PAGE, 2 * impl.head_size)
    keys, slots = torch.randn(3, impl.num_kv_heads, impl.head_size), torch.tensor([5, -1, 2 * PAGE])
    scaled = SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor(0.25), _q_scale=torch.tensor(0.125))
    for dtype in ("auto", "fp8"):
        own = copy.copy(impl)
        own.kv_cache_dtype, own.cache = dtype, CodeCache(impl.num_kv_heads, Kept(1))
        own.cache.kv_cache = torch.zeros(4, impl.num_kv_heads, PAGE, 9, dtype=torch.uint8)
        content = kv_cache if dtype == "auto" else kv_cache.to(torch.uint8)
        own.do_kv_cache_update(scaled, keys, keys, content, slots)
        found.append((own, content, own.cache.kv_cache))
    assert torch.equal(found[0][2], found[1][2])
    assert found[0][2].any()
    own, content, _ = found[1]
    state = own.state(scaled, content)
    assert state.keys.dtype == state.values.dtype == torch.float8_e4m3fn
    assert state.scales == (scaled._k_scale, scaled._v_scale)
    scaled._k_scale = torch.ones(impl.num_kv_heads)
    with pytest.raises(BPCError, match="one scale per layer"):
        own.state(scaled, content)


@torch.inference_mode()
def test_metadata_of_a_captured_batch_and_of_other_block_tables(engine, monkeypatch):
    """As vLLM builds them: for a graph of decoding steps, and for layers whose pages lie elsewhere."""
    build, seen = GPUBuilder.build, []

    def recorded(builder, common_prefix_len, common, *fast):
        made = build(builder, common_prefix_len, common, *fast)
        if hasattr(made, "bpc"):
            seen.append((builder, copy.deepcopy(common), made.bpc.others is not None))
        return made

    monkeypatch.setattr(GPUBuilder, "build", recorded)
    engine.generate(ids(300), ids(1200, seed=1), new=6)
    monkeypatch.undo()
    builder, common, _ = next(each for each in seen if each[2])
    made = builder.build(0, common)
    rows, others, tokens = made.bpc.rows, made.bpc.others, common.num_actual_tokens
    assert (made.bpc.tokens, made.bpc.other_tokens) == (slice(0, 1), slice(1, None))
    assert rows.lengths.tolist() == common.seq_lens[:1].tolist()
    assert rows.k.tolist() == [[attended(int(common.seq_lens[0]), 0.02, 8)]]
    assert (rows.longest, rows.width) == (2048, attended(2048, 0.02, 8))  # of any step: a CUDA graph holds them
    assert others.query_start_loc.tolist() == [0, tokens - 1]
    assert others.seq_lens.tolist() == common.seq_lens[1:].tolist()
    table, slots = common.block_table_tensor + 1, common.slot_mapping + PAGE
    moved = builder.update_block_table(made, table, slots)
    assert torch.equal(moved.bpc.rows.block_table, table[:1])
    assert torch.equal(moved.bpc.others.block_table, table[1:])
    assert torch.equal(moved.bpc.others.slot_mapping, slots[1:])
    assert torch.equal(made.bpc.rows.block_table, common.block_table_tensor[:1])

    builder, common, _ = next(each for each in seen if not each[2])
    lengths, captured = common.seq_lens.clone(), builder.build_for_cudagraph_capture(common).bpc.rows
    assert captured.k.data_ptr() == builder.k.data_ptr()
    assert captured.lengths.tolist() == captured.k.flatten().tolist() == [1] * len(lengths)
    assert (captured.longest, captured.width) == (rows.longest, rows.width)
    common.seq_lens.copy_(lengths)
    replayed = builder.build(0, common).bpc.rows  # writes what the captured batch reads
    wanted = [[attended(n, 0.02, 8)] for n in lengths.tolist()]
    assert captured.k.tolist() == replayed.k.tolist() == wanted
    assert captured.lengths.tolist() == lengths.tolist()


@pytest.mark.parametrize("options", [{}, {"disable_hybrid_kv_cache_manager": True}], ids=["managed", "unified"])
def test_a_model_with_sliding_layers_keeps_codes_behind_its_pages(options, tmp_path, monkeypatch):
    folder = tiny.save(tmp_path / "model", "gemma3_text", head_dim=64, sliding_window=256, max_position_embeddings=2048)
    artifact = made_artifact(folder, tmp_path / "gemma.safetensors", samples=6)
    engine = Engine(folder, artifact, backend=BACKEND, **options)
    with engine.checked(monkeypatch) as counted:
        first, _ = engine.generate(ids(900, vocabulary=250), ids(400, 1, vocabulary=250))
        second, cached = engine.generate(ids(900, vocabulary=250))
    assert counted.rows == 3 * 11  # layer 0 slides, layer 1 is dense by default
    assert cached[0] > 0
    assert second[0] == first[0]
