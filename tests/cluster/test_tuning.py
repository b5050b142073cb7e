"""What real trainings do with the settings that ``overlapscope tune`` tries: they take them, and compute the same."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from overlapscope.bucket_model.calibration import read_calibration
from overlapscope.cli.tuning_runs import OUTPUT_FILE, TuningRuns
from overlapscope.trace.ddp_trial import DDPSetting, Trial
from overlapscope.trace.schema import CALIBRATION_FILE

TRAINING = """
import torch, torch.distributed as dist
import instrumented_ddp
torch.set_num_threads(1)
dist.init_process_group("gloo")
for wrapper in (torch.nn.parallel.DistributedDataParallel, instrumented_ddp.DistributedDataParallel):
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    model = wrapper(model, bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(8):
        loss = model(torch.randn(8, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(sum(parameter.double().sum() for parameter in model.parameters()).item())
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_both_classes_take_a_setting_and_compute_the_same(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    runs = TuningRuns(tmp_path, command, steps=100)

    def run(name: str, setting: DDPSetting, *, calibrates: bool = False) -> list[dict[str, Any]]:
        models = runs.run(name, Trial(setting=setting, calibrates=calibrates), lambda *_: None).trace.run["models"]
        assert len(models) == 2
        return list(models)

    for model in run("own", DDPSetting(), calibrates=True):
        assert model["ddp_arguments"]["bucket_cap_mb"] == 0.05
        assert model["trial"] == {"given": ["bucket_cap_mb"]}
    assert read_calibration(tmp_path / "1_own" / CALIBRATION_FILE).world_size == 2
    for model in run("changed", DDPSetting(caps_mb=(1.0,), bucket_views=True)):
        assert model["ddp_arguments"]["bucket_cap_mb"] == 1.0
        assert model["ddp_arguments"]["gradient_as_bucket_view"] is True
    for model in run("rounded", DDPSetting(compression="fp16")):
        assert model["comm_hook"] == "fp16_compress_hook"
    own, changed, rounded = ((tmp_path / name / OUTPUT_FILE).read_text().split()[-2:] for name in runs_of(tmp_path))
    assert own == changed
    assert own != rounded


def runs_of(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir() if each.is_dir())
