"""The thread that runs periodic tasks."""

from __future__ import annotations

import threading

from instrumented_ddp.recording.background import BackgroundScheduler

TIME_LIMIT_S = 20


class Counted:
    """A task that says how often it has run."""

    def __init__(self, pause_s: float, name: str = "counting") -> None:
        self.name = name
        self.runs = 0
        self.has_ended = False
        self._pause_s = pause_s
        self._has_run = threading.Condition()

    def run(self) -> float:
        with self._has_run:
            self.runs += 1
            self._has_run.notify_all()
        return self._pause_s

    def end(self) -> None:
        self.has_ended = True

    def had(self, runs: int) -> bool:
        with self._has_run:
            return self._has_run.wait_for(lambda: self.runs >= runs, TIME_LIMIT_S)


class Failing(Counted):
    def run(self) -> float:
        super().run()
        raise RuntimeError("lost")


def test_each_task_has_its_turn_when_it_is_due_and_ends_with_the_scheduler():
    scheduler = BackgroundScheduler(0)
    often, seldom = Counted(0.001), Counted(1000)
    scheduler.add(often)
    scheduler.add(seldom)
    assert seldom.had(1)
    assert often.had(20)
    scheduler.close(TIME_LIMIT_S)
    assert seldom.runs == 1
    assert often.has_ended
    assert seldom.has_ended


def test_a_task_that_is_woken_has_its_turn_at_once():
    scheduler = BackgroundScheduler(0)
    task = Counted(1000)
    scheduler.add(task)
    for runs in range(1, 5):
        assert task.had(runs)
        scheduler.wake(task)
    scheduler.close(TIME_LIMIT_S)


def test_a_task_that_fails_costs_one_line_and_the_others_nothing(caplog):
    scheduler = BackgroundScheduler(3)
    failing, other = Failing(0, "failing"), Counted(0.001)
    scheduler.add(failing)
    scheduler.add(other)
    assert other.had(20)
    scheduler.close(TIME_LIMIT_S)
    assert failing.runs == 1
    assert not scheduler.is_scheduled(failing)
    assert caplog.messages == ["rank 3: failing failed and is off: RuntimeError('lost')"]


def test_one_without_tasks_has_no_thread():
    before = threading.active_count()
    BackgroundScheduler(0).close(TIME_LIMIT_S)
    assert threading.active_count() == before
