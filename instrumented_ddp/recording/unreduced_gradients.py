"""Detection of gradients that are never reduced because the module was called instead of its DDP wrapper.

``ddp.module(x)`` is right for evaluation. In training it yields gradients of this rank alone: nothing fails, all ranks
do the same, and their models diverge from that step on.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType

import torch

from instrumented_ddp.collectives.log import CollectiveRecorder
from overlapscope.trace.schema import NO_CALL_SITE


class UnreducedGradientDetector:
    """Detector of unreduced gradients of one wrapped module.

    Args:
        parameters: trained parameters of the module.
        collectives: source of the user's call sites and of the volume that users reduce themselves.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], collectives: CollectiveRecorder) -> None:
        self._parameters = parameters
        self._elements = sum(parameter.numel() for parameter in parameters)
        self._collectives = collectives
        self._access_call_site = NO_CALL_SITE
        self._call_site = NO_CALL_SITE
        self._reduced_by_user_before = 0

    def on_module_access(self, frame: FrameType) -> None:
        """Note that the user accesses the wrapped module, perhaps to call it."""
        if self._collectives.call_sites.is_user_frame(frame):
            self._access_call_site = self._collectives.call_sites.number_of(frame)

    def on_local_gradient(self) -> None:
        """Note a gradient from outside any pass through the wrapper."""
        if self._call_site == NO_CALL_SITE:
            self._call_site = self._access_call_site or self._collectives.call_sites.get_caller_number()
            self._reduced_by_user_before = self._collectives.elements_reduced_by_user

    def on_gradients_reduced(self) -> None:
        """Note that the current gradients are averages."""
        self._call_site = self._access_call_site = NO_CALL_SITE

    def take_unreduced_call_site(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the call site behind unreduced gradients that an update is about to use. Called before each update.

        Args:
            optimizer: optimizer that is about to update. Gradients that another model's optimizer ignores may still be
                set to zero: a discriminator gets gradients from its generator's loss.

        Returns:
            The call site behind gradients that nobody has reduced; ``NO_CALL_SITE`` if there are none.
        """
        if self._call_site == NO_CALL_SITE:
            self._access_call_site = NO_CALL_SITE
            return NO_CALL_SITE
        if not self._are_updated_by(optimizer):
            return NO_CALL_SITE
        line, self._call_site, self._access_call_site = self._call_site, NO_CALL_SITE, NO_CALL_SITE
        if all(parameter.grad is None for parameter in self._parameters):
            return NO_CALL_SITE
        by_user = self._collectives.elements_reduced_by_user - self._reduced_by_user_before
        return NO_CALL_SITE if 2 * by_user >= self._elements else line

    def _are_updated_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer holds any of the parameters. Called only if there is an unreduced gradient."""
        own = {id(parameter) for parameter in self._parameters}
        return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
