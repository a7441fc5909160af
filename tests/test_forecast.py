"""The forecast of a calibration: what is counted is what is used."""

import tiny
import torch

from bpc_calib import calibrate, describe, make_plan
from bpc_calib.calibration.forecast import costs


def test_the_work_folder_takes_no_more_than_forecast(text_folder, tmp_path):
    config = tiny.config()
    with torch.device("meta"):
        model = tiny.transformers.AutoModelForCausalLM.from_config(config)
    plan = make_plan(describe(config), bits=32, sequence_length=128, samples=4, keys_per_head=300)
    calibrate(tiny.model(), tiny.tokenizer(), [f"notes={text_folder}"], plan, work_dir=tmp_path / "work")
    used = sum(file.stat().st_size for file in (tmp_path / "work").rglob("*") if file.is_file())
    assert 0 < used <= costs(plan, model, torch.device("cpu")).disk_bytes
