"""What is said when ranks hold different parameters."""

from __future__ import annotations

from instrumented_ddp.reduction.agreement import describe_disagreement

A = ("a.weight", (2, 3), "float32")
B = ("b.weight", (2, 3), "float32")
HALF = ("a.weight", (2, 3), "float16")
DEEP = ("layers.0.weight", (2, 3), "float32")


def test_what_differs_is_said_with_both_sides_and_only_a_minority_is_blamed(golden):
    said = {
        "two ranks": describe_disagreement([[A, B], [B, A]]),
        "a minority": describe_disagreement([[A, B], [A, B], [B, A], [A, B]]),
        "two against two": describe_disagreement([[A, B], [A, B], [B, A], [B, A]]),
        "one is missing": describe_disagreement([[A, B], [A]]),
        "another dtype": describe_disagreement([[A], [HALF]]),
        "with modules": describe_disagreement([[DEEP, A], [A, DEEP]], [["Linear", "Conv1d"], ["Conv1d", "Linear"]]),
    }
    golden("refused/disagreement", "\n".join(f"{case}: {message}" for case, message in said.items()))
