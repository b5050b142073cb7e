"""What is said when ranks hold different parameters."""

from __future__ import annotations

from instrumented_ddp.reduction.agreement import describe_disagreement

A = ("a.weight", (2, 3), "float32")
B = ("b.weight", (2, 3), "float32")


def test_two_ranks_are_both_shown_and_nobody_is_blamed():
    message = describe_disagreement([[A, B], [B, A]])
    assert "rank 0 and rank 1" in message
    assert "parameter 0: a.weight float32[2, 3] on rank 0, b.weight float32[2, 3] on rank 1" in message


def test_with_more_ranks_the_minority_is_named():
    message = describe_disagreement([[A, B], [A, B], [B, A], [A, B]])
    assert "rank 2 and all others" in message


def test_two_against_two_is_no_minority():
    assert "against all others" not in describe_disagreement([[A, B], [A, B], [B, A], [B, A]])


def test_a_missing_parameter_is_named_with_both_counts():
    message = describe_disagreement([[A, B], [A]])
    assert "rank 0 has 2 params, rank 1 has 1 params" in message
    assert "b.weight float32[2, 3] on rank 0, none on rank 1" in message


def test_the_same_name_with_another_dtype_differs():
    half = ("a.weight", (2, 3), "float16")
    assert "a.weight float32[2, 3] on rank 0, a.weight float16[2, 3] on rank 1" in describe_disagreement([[A], [half]])


def test_it_is_said_where_in_the_module_tree_the_parameter_is():
    deep = ("layers.0.weight", (2, 3), "float32")
    message = describe_disagreement([[deep, A], [A, deep]], [["Linear", "Conv1d"], ["Conv1d", "Linear"]])
    assert "layers.0.weight float32[2, 3] (Linear at layers.0) on rank 0" in message
    assert "a.weight float32[2, 3] (Conv1d at a) on rank 1" in message
