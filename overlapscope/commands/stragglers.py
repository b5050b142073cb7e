"""Print which ranks make the others wait, why, in which steps, and what it costs.

Every rank's own time in a step is compared with the median rank's: copies back, optimizer, data wait, forward,
backward, garbage collection, and communication that ended later for it. A delay in every step, every k steps, from one
step on or just once is named with the statistic that shows it. Its cost is what it adds to the step time when nothing
else is wrong, from a replay of the recording; its saving is what fixing it alone would gain.

With --json the output is one JSON object with the keys
  path, ranks, steps, steps_left_out, clock_error_ns
  reason        why nothing can be said, or null
  step_time_ns  mean of the steps compared
  what_if       step time if all ranks were like the median rank, and with every all-reduce at its best observed
  findings      one object each: sentence, ranks, host, link, cause, parts_ns, pattern, period, statistic, p_value,
                first_step, last_step, delayed_steps, worst_step, delay_ns, cost_ns, cost_error_ns, cost_share,
                saving_ns
  by_step       the critical path of each step, and how much longer its rank took, by cause
  by_rank, by_host, by_cause, by_bucket   cost and slowdown of each
  links         one object per direction of a link between two ranks: what the kernel counted
  problems      objects with severity ("note" or "error") and message
Times are nanoseconds, named *_ns.
"""

from __future__ import annotations

import argparse
from pathlib import Path

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
    if args.json:
        print(stragglers_report.as_json(trace, stragglers))
    else:
        stragglers_report.print_text(trace, stragglers)
    return report_problems(trace)
