"""Print who makes the other ranks wait, by what, in which steps, and what it costs.

Every rank's own time in a step is compared with that of the middle rank: copies back, optimizer, data wait, forward,
backward, garbage collection, and communication that ended later for it. What is late in every step, every k steps,
from one step on or for once is named with the statistic that says so. Its cost is what it adds to the step time with
nothing else wrong, from a replay of the recording; its saving is what mending it alone would gain.

With --json the output is one JSON object with the keys
  path, ranks, steps, steps_left_out, clock_error_ns
  reason        why nothing can be said, else null
  step_time_ns  mean of the steps compared
  what_if       step time with all ranks like the middle one, and with every all-reduce at its best observed
  findings      an object each: sentence, ranks, host, link, cause, parts_ns, pattern, period, statistic, p_value,
                first_step, last_step, delayed_steps, worst_step, delay_ns, cost_ns, cost_error_ns, cost_share,
                saving_ns
  by_step       the critical path of each step, and what its rank took longer by cause
  by_rank, by_host, by_cause, by_bucket   cost and slowdown of each
  links         an object per direction of a link between two ranks: what the kernel counted
  problems      objects with severity ("note" or "error") and message
Times are nanoseconds, named *_ns.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from overlapscope.commands.pipe import until_the_reader_leaves
from overlapscope.commands.reading import read_with_progress, report_problems


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("traces", type=Path, help="the folder that 'overlapscope record -o' wrote")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Print the findings; 1 if a part of the recording could not be read."""
    from overlapscope.analysis.stragglers import stragglers_of
    from overlapscope.commands import stragglers_report

    trace = read_with_progress(args.traces)
    stragglers = stragglers_of(trace)
    with until_the_reader_leaves():
        if args.json:
            print(stragglers_report.as_json(trace, stragglers))
        else:
            stragglers_report.print_text(trace, stragglers)
    return report_problems(trace)
