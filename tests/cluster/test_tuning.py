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


def run(folder: Path, setting: DDPSetting, *, calibrates: bool = False) -> tuple[list[dict[str, Any]], list[str]]:
    """Train once with a setting: what is recorded of both models, and their sums."""
    script = folder / "train.py"
    script.write_text(TRAINING)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    runs = TuningRuns(folder, command, steps=100)
    trace = runs.run("run", Trial(setting=setting, calibrates=calibrates), lambda *_: None).trace
    (output,) = folder.glob(f"*/{OUTPUT_FILE}")
    models = list(trace.run["models"])
    assert len(models) == 2
    return models, output.read_text().split()[-2:]


CHANGED = DDPSetting(caps_mb=(1.0,), bucket_views=True)


@pytest.mark.slow
def test_both_classes_take_a_setting_and_links_are_measured(tmp_path: Path) -> None:
    models, _ = run(tmp_path, CHANGED, calibrates=True)
    for model in models:
        assert model["ddp_arguments"]["bucket_cap_mb"] == 1.0
        assert model["ddp_arguments"]["gradient_as_bucket_view"] is True
    (calibration,) = tmp_path.glob(f"*/{CALIBRATION_FILE}")
    assert read_calibration(calibration).world_size == 2


@pytest.mark.nightly
def test_a_setting_computes_the_same_unless_it_rounds_gradients(tmp_path_factory: pytest.TempPathFactory) -> None:
    models, own = run(tmp_path_factory.mktemp("own"), DDPSetting())
    for model in models:
        assert model["ddp_arguments"]["bucket_cap_mb"] == 0.05
        assert model["trial"] == {"given": ["bucket_cap_mb"]}
    _, changed = run(tmp_path_factory.mktemp("changed"), CHANGED)
    assert own == changed
    models, rounded = run(tmp_path_factory.mktemp("rounded"), DDPSetting(compression="fp16"))
    for model in models:
        assert model["comm_hook"] == "fp16_compress_hook"
    assert own != rounded
