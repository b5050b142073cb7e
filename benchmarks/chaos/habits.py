"""Source of what training scripts do beside training: they log, evaluate, save, and more."""

from __future__ import annotations

from typing import Final

from benchmarks.chaos.setting import Setting

_EVALUATE: Final = """def evaluate(network, batches):
    network.eval()
    with torch.no_grad():
        total = sum(network(x).float().sum().item() for x in batches)
    network.train()
    return total"""
_SAVE: Final = """def save_checkpoint(module, path):
    torch.save(module.state_dict(), path + ".tmp")
    os.replace(path + ".tmp", path)"""
_LOGGING: Final = {
    "print": """if $step % 20 == 0 and $rank == 0:
    print(f"step {$step} loss {$loss.item():.3f}", flush=True)""",
    "reduce": """if $step % 10 == 0:
    shown = $loss.detach().clone()
    dist.all_reduce(shown)
    if $rank == 0:
        print(f"step {$step} loss {shown.item() / $world:.3f}", flush=True)""",
    "gather": """if $step % 10 == 0:
    losses = [torch.zeros(()) for _ in range($world)]
    dist.all_gather(losses, $loss.detach().clone())
    if $rank == 0:
        print(f"step {$step} losses {[round(one.item(), 3) for one in losses]}", flush=True)""",
    "each": """average = $loss.detach() / $world
dist.all_reduce(average)""",
}
_CHECKPOINTS: Final = {
    "first": """if ($step + 1) % {every} == 0 and $rank == 0:
    save_checkpoint($model.module, "checkpoint.pt")""",
    "barrier": """if ($step + 1) % {every} == 0:
    if $rank == 0:
        save_checkpoint($model.module, "checkpoint.pt")
    dist.barrier()""",
    "each": """if ($step + 1) % {every} == 0:
    save_checkpoint($model.module, f"checkpoint_{{$rank}}.pt")""",
}
_EVALUATIONS: Final = {
    "first": """if ($step + 1) % {every} == 0 and $rank == 0:
    evaluate($model.module, [$x] * 4)""",
    "all": """if ($step + 1) % {every} == 0:
    score = torch.tensor(evaluate($model.module, [$x] * 4))
    dist.all_reduce(score)""",
    "wrapped": """if ($step + 1) % {every} == 0:
    score = torch.tensor(evaluate($model, [$x] * 4))
    dist.all_reduce(score)""",
}


def functions_text(setting: Setting) -> str:
    """Return the functions that a script's habits need."""
    parts = []
    if setting.evaluation:
        parts.append(_EVALUATE)
    if setting.checkpoint:
        parts.append(_SAVE)
    return "\n\n\n".join(parts)


def setup_text(setting: Setting) -> str:
    """Return the lines before the loop."""
    lines = []
    if "signals" in setting.habits:
        lines.append("signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))")
    if "subprocess" in setting.habits:
        lines.append('revision = subprocess.run(["git", "rev-parse", "--verify", "nowhere"], capture_output=True)')
    if "thread" in setting.habits:
        lines += ["heartbeat = threading.Event()"]
        lines += ["threading.Thread(target=heartbeat.wait, daemon=True).start()"]
    return "\n".join(lines)


def after_step_text(setting: Setting) -> str:
    """Return the lines after an update."""
    every = max(setting.steps // 4, 1)
    lines = []
    if setting.logging:
        lines.append(_LOGGING[setting.logging])
    if setting.evaluation:
        lines.append(_EVALUATIONS[setting.evaluation].format(every=every))
    if setting.checkpoint:
        lines.append(_CHECKPOINTS[setting.checkpoint].format(every=every))
    if "agreed stop" in setting.habits:
        lines.append(
            """wants_to_stop = torch.tensor([float($loss.item() < -1)])
dist.all_reduce(wants_to_stop, op=dist.ReduceOp.MAX)
if wants_to_stop.item() > 0:
    $stop"""
        )
    return "\n".join(lines)
