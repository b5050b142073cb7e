"""Error messages for a backward that can't be reduced: stock DDP's texts, which people search for, with names.

The texts follow torch/csrc/distributed/c10d/reducer.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed import DebugLevel, get_debug_level  # type: ignore[attr-defined]

_UNFINISHED = (
    "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that "
)


def unfinished_reduction(
    names: Sequence[str], indices: Sequence[int], rank: int, *, find_unused_parameters: bool, static_graph: bool
) -> str:
    """Return the message for a previous backward that left gradients out.

    Args:
        names: names of all parameters.
        indices: indices of the parameters without a gradient.
    """
    if static_graph:
        advice = (
            "your training graph has changed in this iteration, e.g., one parameter is used in first iteration, but "
            "then got unused in the second iteration. this is not compatible with static_graph set to True."
        )
    else:
        advice = "your module has parameters that were not used in producing loss. " + (
            "Since `find_unused_parameters=True` is enabled, this likely  means that not all `forward` outputs "
            "participate in computing loss. You can fix this by "
            if find_unused_parameters
            else "You can enable unused parameter detection by passing the keyword argument "
            "`find_unused_parameters=True` to `torch.nn.parallel.DistributedDataParallel`, and by \n"
        )
        advice += (
            "making sure all `forward` function outputs participate in calculating loss. \nIf you already have done "
            "the above, then the distributed data parallel module wasn't able to locate the output tensors in the "
            "return value of your module's `forward` function. Please include the loss function and the structure of "
            "the return value of `forward` of your module when reporting this issue (e.g. list, dict, iterable)."
        )
    missing = ", ".join(names[index] for index in indices)
    text = (
        f"{_UNFINISHED}{advice}\nParameter indices which did not receive grad for rank {rank}: "
        f"{' '.join(map(str, indices))}\nParameters which did not receive grad for rank {rank}: {missing}"
    )
    if get_debug_level() == DebugLevel.OFF:
        text += (
            "\n In addition, you can set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL to "
            "print out information about which particular parameters did not receive gradient on this rank as part of "
            "this error"
        )
    return text


def marked_twice(name: str, index: int) -> str:
    """Return the message for a gradient that was marked ready twice."""
    return (
        "Expected to mark a variable ready only once. This error is caused by one of the following reasons: "
        "1) Use of a module parameter outside the `forward` function. Please make sure model parameters are not "
        "shared across multiple concurrent forward-backward passes. or try to use _set_static_graph() as a workaround "
        "if this module graph does not change during training loop.2) Reused parameters in multiple reentrant "
        "backward passes. For example, if you use multiple `checkpoint` functions to wrap the same part of your "
        "model, it would result in the same set of parameters been used by different reentrant backward passes "
        "multiple times, and hence marking a variable ready multiple times. DDP does not support such use cases in "
        "default. You can try to use _set_static_graph() as a workaround if your module graph does not change over "
        f"iterations.\nParameter at index {index} with name {name} has been marked as ready twice. This means that "
        "multiple autograd engine  hooks have fired for this particular parameter during this iteration."
    )


def graph_has_changed(name: str) -> str:
    """Return the message for a parameter that got more gradients than in the first iteration of a static graph."""
    return (
        "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, but then "
        "got used in the second iteration. this is not compatible with static_graph set to True. The parameter is "
        f"{name}."
    )


NO_UNUSED_FOUND = (
    "find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters in the "
    "forward pass. This flag results in an extra traversal of the autograd graph every iteration,  which can adversely "
    "affect performance. If your model indeed never has any unused parameters in the forward pass, consider turning "
    "this flag off. Note that this warning may be a false positive if your model has flow control causing later "
    "iterations to have unused parameters."
)
"""Warning that is issued once per process."""
