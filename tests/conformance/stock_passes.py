"""The tests that torch's own class passes here: ``stock_passes.txt``, and how it is made.

For a new version of torch, change ``TORCH_VERSION`` and run::

    python -m tests.conformance.stock_passes

A test that fails with stock fails because there is no GPU (SyncBatchNorm, names of devices), or is skipped upstream.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.conformance.fork_server import ForkServer

TORCH_VERSION = "2.13"
LIST = Path(__file__).with_suffix(".txt")
STOCK_CLASS = "torch.nn.parallel.distributed:DistributedDataParallel"

TOO_SLOW = {"test_ddp_uneven_inputs"}
"""Convolutions of ResNet-50's size, minutes of them on a CPU."""


def stock_passes() -> list[str]:
    """The names of the tests, sorted."""
    return LIST.read_text().split()


def main() -> None:
    """Run all tests with torch's class, and write the list."""
    passes = []
    with tempfile.TemporaryDirectory() as folder:
        server = ForkServer(Path(folder) / "server.log")
        for test in server.ddp_tests:
            if test in TOO_SLOW:
                continue
            (Path(folder) / test).mkdir()
            outcome = server.run(test, ddp_class=STOCK_CLASS, folder=Path(folder) / test)
            print(f"{outcome.status:9} {outcome.seconds:6.2f} s  {test}", file=sys.stderr)
            if outcome.status == "passed":
                passes.append(test)
        server.close()
    LIST.write_text("\n".join(passes) + "\n")


if __name__ == "__main__":
    main()
