"""The forecast of a calibration: what is counted is what is used."""

import pytest
import tiny
import torch
from torch.utils.flop_counter import FlopCounterMode

from bpc_calib import calibrate, describe, make_plan
from bpc_calib.bench.passes import pass_operations
from bpc_calib.calibration.forecast import costs
from bpc_cli.calibration_report import calibration_seconds

WITH_WEIGHTS = {torch.ops.aten.mm, torch.ops.aten.addmm}


def test_the_work_folder_takes_no_more_than_forecast(text_folder, tmp_path):
    config = tiny.config()
    with torch.device("meta"):
        model = tiny.transformers.AutoModelForCausalLM.from_config(config)
    plan = make_plan(describe(config), bits=32, sequence_length=128, samples=4, keys_per_head=300)
    calibrate(tiny.model(), tiny.tokenizer(), [f"notes={text_folder}"], plan, work_dir=tmp_path / "work")
    used = sum(file.stat().st_size for file in (tmp_path / "work").rglob("*") if file.is_file())
    assert 0 < used <= costs(plan, model, torch.device("cpu")).disk_bytes


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "olmo2"])
def test_the_products_with_weights_are_those_that_torch_counts(family):
    model, tokens = tiny.model(family), 64
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model.base_model(input_ids=torch.zeros(1, tokens, dtype=torch.int64), use_cache=False)
    products = sum(count for name, count in counter.get_flop_counts()["Global"].items() if name in WITH_WEIGHTS)
    weights, _ = pass_operations(model, describe(model.config), tokens)
    assert weights == pytest.approx(products, rel=0.02)  # the norms have weights, too


def test_the_operations_of_attention_grow_with_what_each_kind_of_layer_sees():
    model = tiny.model("gemma3_text")  # two full layers, and one with a window of 16 tokens
    description = describe(model.config)
    pairs = [2 * sum(range(tokens)) + sum(min(at, 16) for at in range(tokens)) for tokens in (64, 128)]
    for tokens, seen in zip((64, 128), pairs, strict=True):
        _, attention = pass_operations(model, description, tokens)
        assert attention == pytest.approx(4 * description.query_heads * description.head_dim * seen, rel=0.05)


def test_the_time_grows_with_the_samples_and_is_unknown_for_experts():
    cpu = torch.device("cpu")
    model = tiny.model()
    few, many = (make_plan(describe(model.config), sequence_length=128, samples=each) for each in (8, 80))
    assert calibration_seconds(many, model, cpu) == pytest.approx(10 * calibration_seconds(few, model, cpu))
    experts = tiny.model("mixtral", num_local_experts=2)
    assert calibration_seconds(make_plan(describe(experts.config), sequence_length=128), experts, cpu) is None
