"""Look at a training while it runs, and post each new verdict to a webhook (Slack, Mattermost, Teams, your own).

    python alert.py traces/ https://hooks.example/T000/B000 --every 60

Posts {"text": ..., "verdict": {...}} when a fault is found, when it becomes certain, and when it is gone again.
"""

import argparse
import json
import subprocess
import sys
import time
import urllib.request


def read_verdict(recording):
    """Read the verdict on the recording as it is now; None before there is anything to read."""
    ran = subprocess.run(["overlapscope", "diagnose", "--json", recording], stdout=subprocess.PIPE, text=True)
    return json.loads(ran.stdout)["verdict"] if ran.stdout else None


def is_worth_a_message(verdict):
    """Tell whether somebody should look: a fault that is more than missing data."""
    return verdict["restart"] != "not-needed" and verdict["code"] not in ("cannot-tell", "interrupted")


def text_of(verdict):
    certainty = "" if verdict["certainty"] == "certain" else f" ({verdict['certainty']})"
    hosts = f" Hosts: {', '.join(verdict['hosts'])}." if verdict["hosts"] else ""
    return f"{verdict['code']}{certainty}: {verdict['sentence']}{hosts} A restart: {verdict['restart']}."


def post(url, content):
    body = json.dumps(content).encode()
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10):
        pass


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording")
    parser.add_argument("webhook")
    parser.add_argument("--every", type=float, default=60, help="seconds between two looks (%(default)s)")
    parser.add_argument("--looks", type=int, default=sys.maxsize, help="how many; by default, until it is ended")
    args = parser.parse_args()

    said = None
    for look in range(args.looks):
        time.sleep(args.every if look else 0)
        verdict = read_verdict(args.recording)
        if verdict is None:
            continue
        news = (verdict["code"], verdict["certainty"]) if is_worth_a_message(verdict) else None
        if news == said:
            continue
        try:
            post(args.webhook, {"text": text_of(verdict), "verdict": verdict})
        except OSError as error:  # tried again at the next look
            print(f"alert: {args.webhook}: {error}", file=sys.stderr)
            continue
        said = news


if __name__ == "__main__":
    main()
