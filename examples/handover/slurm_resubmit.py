"""Submit a Slurm job again if that may help, without the nodes that the verdict on this one names.

    overlapscope diagnose --json traces/ | python slurm_resubmit.py job.sbatch

Runs in the batch script, after the training. A job is submitted at most MAX_STARTS times. Nodes are excluded from the
next start only: to take one out of service is for who runs the cluster (`scontrol update NodeName=... State=DRAIN`).
"""

import json
import os
import subprocess
import sys

MAX_STARTS = 5


def nodes_of_job():
    """Ask for Slurm's names of this job's nodes."""
    command = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()


def nodes_to_exclude(verdict, nodes):
    """Return the nodes among these that may be the cause; a host may have a longer name than its node."""
    if not verdict["may_be_host"]:
        return []
    short = {host.partition(".")[0] for host in verdict["hosts"]}
    return [node for node in nodes if node.partition(".")[0] in short]


def main():
    script, verdict = sys.argv[1], json.load(sys.stdin)["verdict"]
    print(f"{verdict['code']} ({verdict['certainty']}): {verdict['sentence']}")
    starts = int(os.environ.get("STARTS", "1"))
    if verdict["restart"] != "may-help" or starts >= MAX_STARTS:
        print(f"not submitted again: restart {verdict['restart']}, {starts} of {MAX_STARTS} starts")
        return
    excluded = {node for node in os.environ.get("EXCLUDED", "").split(",") if node}
    excluded.update(nodes_to_exclude(verdict, nodes_of_job()))
    command = ["sbatch", f"--dependency=afterany:{os.environ['SLURM_JOB_ID']}"]
    if excluded:
        command.append(f"--exclude={','.join(sorted(excluded))}")
    own = {"STARTS": str(starts + 1), "EXCLUDED": ",".join(sorted(excluded))}
    subprocess.run([*command, script], check=True, env=os.environ | own)  # sbatch hands its environment to the job


if __name__ == "__main__":
    main()
