"""One rank of an experiment: ``overlapscope lab run`` becomes this on each rank, with any launcher.

It trains nothing itself. Each trial runs in a new process of each rank, so nothing of one trial remains in the next,
and one that fails takes no other with it. Rank 0 says which trial is next and stores the results; ranks that a trial
does not need wait. They communicate through the store of the job.
"""

from __future__ import annotations

import argparse
import sys

from agent import Rank
from lead import lead

from overlapscope.cli import lab_run
from overlapscope.errors import OverlapScopeError


def main() -> int:
    """Join the job; rank 0 leads. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="overlapscope lab run")
    lab_run.add_arguments(parser)
    args = parser.parse_args()
    rank = Rank()
    if rank.number > 0:
        rank.run_orders()
        return 0
    try:
        return lead(rank, args)
    except OverlapScopeError as error:
        print(f"overlapscope lab: {error}", file=sys.stderr)
        return 1
    finally:
        rank.shut_down()


if __name__ == "__main__":
    sys.exit(main())
