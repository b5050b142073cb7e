"""What a random training is like: everything that is drawn before a line of it is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final

MODELS: Final = {"mlp": 6, "batchnorm": 8, "conv": 25, "embedding": 8, "transformer": 25, "gan": 12, "wgan": 9}
"""Each kind of model, with its milliseconds per step as a rule of thumb."""
LAST_STEP: Final = -1
"""Wanted as ``step``: the last one."""
_TRAINS_FOR_S: Final = 5.0
_LOADERS: Final = ("sampler", "sampler", "iterable", "generator", "list")
_SLEEPS_MS: Final = (0, 0, 0, 3, 15, 50)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One training."""

    ranks: int
    is_ours: bool
    """Whether DDP is imported from ``instrumented_ddp``; else the script is one of plain torch."""
    launcher: str
    """``torchrun`` or ``spawn``."""
    style: str
    """``flat``, ``main`` or ``trainer``."""
    ending: str
    """What becomes of an exception: ``none``, ``exit``, ``raise``, ``finally``, ``swallow`` or ``os exit``."""
    wrapper: str
    """``DDP``, ``fsdp``, or ``none`` for the module itself, whose gradients or parameters are averaged by hand."""
    model: str
    width: int
    has_branch: bool
    loader: str
    workers: int
    loop: str
    """``for`` or ``while`` with ``next``."""
    epochs: int
    batches: int
    """Of an epoch."""
    batch_size: int
    sleep_ms: int
    """How long it takes to read a batch, beside computing."""
    accumulation: int
    amp: str
    ddp_options: tuple[str, ...]
    clips: bool
    has_scheduler: bool
    zero_grad: str
    optimizer: str
    logging: str
    evaluation: str
    checkpoint: str
    habits: tuple[str, ...]
    timeout_s: int | None
    seeds_by_rank: bool
    leaves_group: bool
    on_incident: str
    end_signal: str
    """How a job that hangs is ended by who runs it."""
    names: Mapping[str, str]
    """What variables are called here."""
    rank: int
    """The one at fault, if there is a fault."""
    step: int
    """The index in the loop at which it happens, from 0."""

    @property
    def steps(self) -> int:
        """Return how often the loop goes round."""
        return self.epochs * self.batches

    @property
    def update(self) -> int:
        """Return the optimizer step to which ``step`` belongs."""
        return self.step // self.accumulation

    @property
    def when(self) -> str:
        """Return the condition of the fault, as source."""
        return f"$rank == {self.rank} and $step == {self.step}"

    @property
    def is_adversarial(self) -> bool:
        """Return whether two models with an optimizer each are trained in turn."""
        return self.model in ("gan", "wgan")

    @property
    def has_buffers(self) -> bool:
        """Return whether DDP broadcasts buffers in each forward."""
        return self.model in ("batchnorm", "conv")


def draw(random: Random, wants: Mapping[str, Any]) -> Setting:
    """Draw a random training.

    Args:
        wants: what must be so, by field, for a fault to be possible.
    """
    pick = random.choice
    ranks = pick((2, 2, 2, 3, 3, 3, 3, 4))
    model = pick(tuple(MODELS))
    is_spawned = random.random() < 0.2
    style = pick(("flat", "main", "main", "trainer", "trainer"))
    accumulation = pick((1, 1, 1, 2, 4))
    options = []
    if random.random() < 0.25:
        options.append("gradient_as_bucket_view=True")
    if random.random() < 0.4:
        options.append(f"bucket_cap_mb={pick((0.05, 0.2, 1, 100))}")
    mode = random.random()
    if mode < 0.15:
        options.append("find_unused_parameters=True")
    elif mode < 0.25 and accumulation == 1:
        options.append("static_graph=True")
    sleep_ms = pick(_SLEEPS_MS)
    epochs = pick((1, 1, 1, 2, 3))
    drawn = Setting(
        ranks=ranks,
        is_ours=random.random() < 0.5,
        launcher="spawn" if is_spawned else "torchrun",
        style="main" if is_spawned else style,
        ending="none" if style == "flat" and not is_spawned else pick(("none", "none", "exit", "raise", "finally")),
        wrapper="DDP",
        model=model,
        width=pick((64, 128, 256)),
        has_branch=random.random() < 0.3,
        loader=pick(_LOADERS),
        workers=pick((0, 0, 1)),
        loop=pick(("for", "for", "while")),
        epochs=epochs,
        batches=0,
        batch_size=pick((8, 16, 32)),
        sleep_ms=sleep_ms,
        accumulation=accumulation,
        amp=pick(("", "", "", "bf16", "scaler")),
        ddp_options=tuple(options),
        clips=random.random() < 0.3,
        has_scheduler=random.random() < 0.3,
        zero_grad=pick(("()", "()", "(set_to_none=False)", "(set_to_none=True)")),
        optimizer=pick(("SGD", "SGD", "Adam", "AdamW")),
        logging=pick(("", "print", "reduce", "reduce", "gather", "each")),
        evaluation=pick(("", "", "first", "all", "wrapped")),
        checkpoint=pick(("", "", "barrier", "first", "each")),
        habits=tuple(habit for habit in ("signals", "subprocess", "thread", "agreed stop") if random.random() < 0.15),
        timeout_s=pick((None, None, None, None, None, 12, 600)),
        seeds_by_rank=random.random() < 0.5,
        leaves_group=random.random() < 0.9,
        on_incident="raise" if random.random() < 0.2 else "report",
        end_signal=pick(("SIGINT", "SIGTERM")),
        names=_names(random),
        rank=random.randrange(ranks),
        step=0,
    )
    drawn = replace(drawn, **wants)
    drawn = replace(drawn, rank=min(drawn.rank, drawn.ranks - 1))
    if drawn.is_adversarial:
        style = "main" if drawn.style == "trainer" else drawn.style  # batches of the trainer know one model
        drawn = replace(drawn, accumulation=1, amp="", has_branch=False, ddp_options=(), style=style)
        drawn = replace(drawn, evaluation=pick(("", "first")))
    if drawn.style == "flat":
        drawn = replace(drawn, ending="none")
    if drawn.loader == "list":
        drawn = replace(drawn, sleep_ms=0)
    return _with_steps(drawn, random, wants)


def _with_steps(drawn: Setting, random: Random, wants: Mapping[str, Any]) -> Setting:
    """Choose how many steps there are, and where the fault is."""
    step_ms = MODELS[drawn.model] * drawn.ranks / 2 + drawn.sleep_ms + 3
    steps = min(max(round(1000 * _TRAINS_FOR_S / step_ms), 30), 400)
    group = drawn.accumulation
    batches = max(steps // drawn.epochs // group, 6) * group
    if "step" in wants:
        return replace(drawn, batches=batches, step=drawn.step % (drawn.epochs * batches))
    updates = batches // group
    update = random.randrange(3) if random.random() < 0.15 else random.randrange(3, updates - 2)
    return replace(drawn, batches=batches, step=update * group + group - 1)


def _names(random: Random) -> dict[str, str]:
    pick = random.choice
    x, y = pick((("x", "y"), ("inputs", "targets"), ("data", "target"), ("features", "labels")))
    return {
        "rank": pick(("rank", "rank", "local_rank", "global_rank")),
        "world": pick(("world_size", "world_size", "n_ranks")),
        "step": pick(("step", "step", "global_step", "it")),
        "model": pick(("model", "model", "ddp_model", "net")),
        "optimizer": pick(("optimizer", "optimizer", "opt", "optim")),
        "loss": pick(("loss", "loss", "batch_loss")),
        "x": x,
        "y": y,
    }
