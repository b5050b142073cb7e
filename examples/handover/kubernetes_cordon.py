"""Cordon the nodes of the pods that a verdict names, and delete these pods, so that they are started elsewhere.

    overlapscope diagnose --json traces/ | python kubernetes_cordon.py --namespace research [--delete-pods]

Runs where `kubectl` may cordon nodes: not in the training's own pod. The host of a rank is the name of its pod, unless
the pod has `hostNetwork: true`: then it is the name of the node.
"""

import argparse
import json
import subprocess
import sys


def node_of(host, namespace):
    """Return the node of a pod and True, or the host itself if there is no such pod."""
    command = ["kubectl", "get", "pod", host, "-n", namespace, "-o", "jsonpath={.spec.nodeName}"]
    found = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return (found.stdout.strip(), True) if found.returncode == 0 and found.stdout.strip() else (host, False)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--namespace", default="default")
    parser.add_argument("--delete-pods", action="store_true", help="also delete the pods: their owner makes new ones")
    args = parser.parse_args()

    verdict = json.load(sys.stdin)["verdict"]
    print(f"{verdict['code']} ({verdict['certainty']}): {verdict['sentence']}")
    if not verdict["may_be_host"] or verdict["certainty"] != "certain":
        print("no node is cordoned: it is not certain that the ranks named are the cause, or their hosts can't be")
        return 0
    for host in verdict["hosts"]:
        node, is_pod = node_of(host, args.namespace)
        subprocess.run(["kubectl", "cordon", node], check=True)
        if is_pod and args.delete_pods:
            subprocess.run(["kubectl", "delete", "pod", host, "-n", args.namespace, "--wait=false"], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
