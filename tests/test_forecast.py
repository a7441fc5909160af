"""The forecast of a calibration: parts of every kind of model run, and what is counted is what is used."""

import pytest
import tiny
import torch

from bpc_calib import calibrate, describe, make_plan
from bpc_calib.calibration.forecast import forecast

CPU = torch.device("cpu")


def planned(config, **numbers):
    with torch.device("meta"):
        model = tiny.transformers.AutoModelForCausalLM.from_config(config)
    return make_plan(describe(config), bits=32, sequence_length=128, samples=4, **numbers), model


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_one_layer_of_each_kind_runs_for_every_family(family):
    plan, model = planned(tiny.config(family))
    found = forecast(plan, model, CPU)
    assert found.collect_seconds is not None
    assert found.collect_seconds > 0
    assert found.decompose_seconds > 0


def test_a_model_whose_layers_do_not_run_alone_has_no_time_for_its_samples():
    plan, model = planned(tiny.config())
    model.config.num_attention_heads = 3  # not a multiple of the KV heads
    found = forecast(plan, model, CPU)
    assert found.collect_seconds is None
    assert found.decompose_seconds > 0


def test_the_work_folder_takes_no_more_than_forecast(text_folder, tmp_path):
    plan, model = planned(tiny.config(), keys_per_head=300)
    calibrate(tiny.model(), tiny.tokenizer(), [f"notes={text_folder}"], plan, work_dir=tmp_path / "work")
    used = sum(file.stat().st_size for file in (tmp_path / "work").rglob("*") if file.is_file())
    assert 0 < used <= forecast(plan, model, CPU).disk_bytes
