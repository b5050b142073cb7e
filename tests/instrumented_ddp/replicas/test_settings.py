"""What optimizers are set to is written down when it changes, and compared where they update the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from instrumented_ddp.replicas.optimizer_settings import OptimizerSettings
from overlapscope.diagnosis.replica_drift import OptimizerHyperparameters, compare_hyperparameters, read_hyperparameters


def parameters(*sizes: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(size)) for size in sizes]


def written(folder: Path, optimizer: torch.optim.Optimizer, rates: list[float]) -> tuple[OptimizerHyperparameters, ...]:
    """After an update with each of these learning rates, in every second step."""
    folder.mkdir()
    settings = OptimizerSettings(folder)
    for update, rate in enumerate(rates):
        optimizer.param_groups[-1]["lr"] = rate
        settings.on_update_start(optimizer, 2 * update)
    settings.write()
    problems: list[object] = []
    found = read_hyperparameters(folder, problems)  # type: ignore[arg-type]
    assert not problems
    return found


def test_changes_are_kept_with_their_update_and_step(tmp_path: Path) -> None:
    (one,) = written(tmp_path / "a", torch.optim.AdamW(parameters(3, 4)), [0.1, 0.1, 0.1, 0.2, 0.2])
    assert [(change.update, change.step) for change in one.changes] == [(0, 0), (3, 6)]
    assert (one.class_name, one.updates) == ("AdamW", 5)
    assert [change.values[one.names.index("lr")] for change in one.changes] == [0.1, 0.2]
    assert one.changes[0].values[one.names.index("betas[1]")] == 0.999


def test_a_schedule_that_changes_every_step_stays_small(tmp_path: Path) -> None:
    (one,) = written(tmp_path / "a", torch.optim.SGD(parameters(3)), [0.1 / (1 + update) for update in range(5000)])
    assert len(one.changes) == 512
    assert one.changes[-1].update == 4999


def test_a_setting_that_is_no_number_any_more_ends_the_comparison(tmp_path: Path) -> None:
    rates: dict[int, list[Any]] = {0: [0.1, None, 0.1, 0.1], 1: [0.1, 0.1, 0.1, 0.2]}
    known = {rank: written(tmp_path / str(rank), torch.optim.SGD(parameters(3)), one) for rank, one in rates.items()}
    assert known[0][0].updates == 4
    assert compare_hyperparameters(known) == (False, ())


def test_the_first_update_with_another_setting_is_found(tmp_path: Path) -> None:
    rates = {0: [0.1] * 6, 1: [0.1] * 4 + [0.5] * 2, 2: [0.1] * 6}
    known = {rank: written(tmp_path / str(rank), torch.optim.SGD(parameters(3)), one) for rank, one in rates.items()}
    has_compared, (other,) = compare_hyperparameters(known)
    assert has_compared
    assert (other.name, other.step, other.is_since_then) == ("lr", 8, True)
    assert other.values == ((0.1, (0, 2)), (0.5, (1,)))


def test_of_a_difference_that_is_older_than_what_is_kept_the_beginning_is_not_claimed(tmp_path: Path) -> None:
    def schedule(factor: float) -> list[float]:
        return [factor / (1 + update) for update in range(2000)]

    known = {
        rank: written(tmp_path / str(rank), torch.optim.SGD(parameters(3)), schedule(1 + rank)) for rank in range(2)
    }
    _, (other,) = compare_hyperparameters(known)
    assert not other.is_since_then
    assert other.step > 2000


def test_schedules_that_are_the_same_do_not_differ(tmp_path: Path) -> None:
    known = {rank: written(tmp_path / str(rank), torch.optim.SGD(parameters(3)), [0.1, 0.2, 0.3]) for rank in range(2)}
    assert compare_hyperparameters(known) == (True, ())


def test_optimizers_of_other_parameters_are_not_compared(tmp_path: Path) -> None:
    """As those of ranks that share the work of an update."""
    known = {
        rank: written(tmp_path / str(rank), torch.optim.SGD(parameters(3 + rank)), [0.1 * (1 + rank)])
        for rank in range(2)
    }
    assert compare_hyperparameters(known) == (False, ())


def test_tensors_among_the_settings_are_not_read(tmp_path: Path) -> None:
    optimizer = torch.optim.Adam(parameters(3), lr=torch.tensor(0.1), capturable=False)
    settings = OptimizerSettings(tmp_path)
    settings.on_update_start(optimizer, 0)
    settings.write()
    (one,) = read_hyperparameters(tmp_path, [])
    assert "lr" not in one.names
