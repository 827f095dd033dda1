"""Talk to the HTTP server with the standard library alone.

    python examples/http_client.py [--url http://127.0.0.1:8080] [--key KEY]

Without ``--url`` a server with the demo model is started for as long as it takes.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator


def post(url: str, key: str | None, body: dict) -> Iterator[str]:
    """The lines of the answer, as they come."""
    headers = {"content-type": "application/json"}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        for line in response:
            yield line.decode().rstrip("\n")


def show(url: str, key: str | None) -> None:
    """Three requests."""
    prompt = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 12}
    (line,) = post(f"{url}/v1/generate", key, prompt)
    answer = json.loads(line)
    print(f"text: {answer['text']!r}, finish_reason: {answer['finish_reason']}")

    talk = [{"role": "user", "content": "Name three colours."}]
    body = {"messages": talk, "temperature": 0, "max_tokens": 24, "stream": True}
    print("stream: ", end="")
    for line in post(f"{url}/v1/chat/completions", key, body):
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                print(choice["delta"].get("content") or "", end="", flush=True)
    print()

    try:
        list(post(f"{url}/v1/generate", key, {"prompt": "x", "temperature": -1}))
    except urllib.error.HTTPError as why:
        with why:
            error = json.load(why)["error"]
        print(f"refused with {why.code}: {error['param']}: {error['message']}")


def main() -> None:
    """Ask a server that runs, or one of our own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url")
    parser.add_argument("--key")
    options = parser.parse_args()
    if options.url:
        show(options.url, options.key)
        return
    argv = [sys.executable, "-m", "deepinfer.server", "--model", "demo", "--port", "0"]
    server = subprocess.Popen([*argv, "--no-access-log"], stderr=subprocess.PIPE, text=True)
    try:
        for line in server.stderr:
            found = re.search(r"is served at (http://\S+)", line)
            if found:
                show(found[1], options.key)
                break
        else:
            raise SystemExit("The server did not start.")
    finally:
        server.send_signal(signal.SIGTERM)
        server.stderr.close()
        server.wait()


if __name__ == "__main__":
    main()
