"""The published support-ticket call over HTTP, many times: is every answer what the schema says?

    python benchmarks/support_tickets.py [--calls 200] [--parallel 8] [--url http://…] [--json FILE]
    python benchmarks/support_tickets.py --unbounded --max-tokens 256 --calls 100

``POST /v1/generate`` with a Russian prompt, temperature 1, another seed each time, and a schema of
an enum, an integer from 1 to 5 and a text or null, all required. Each ``text`` is checked by
``jsonschema``. The text has a ``maxLength``: without one (``--unbounded``) a model this small now
and then fills the rest of its context with it, and what is cut off there (``length``, or a call
that is not waited for any longer: ``timeout``) is no JSON. Without ``--url`` a server of its own is
started with the demo model. The answers are valid and not wise. Leaves with 0 if all are valid;
with ``--unbounded`` if all that ended by themselves are.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema

CUT = ("length", "timeout")
SHOWN = ("seed", "text", "finish_reason", "wrong")
PROMPT = (
    "Разбери обращение в поддержку и ответь в JSON.\n"
    "Обращение: «Второй день не могу войти в личный кабинет, код из СМС не приходит. "
    "Заказ 48213 нужно оплатить сегодня!»\nОтвет: "
)
SCHEMA = {
    "type": "object",
    "properties": {
        "category": {"type": "string", "enum": ["billing", "technical", "account", "other"]},
        "urgency": {"type": "integer", "minimum": 1, "maximum": 5},
        "order_id": {"type": ["string", "null"], "maxLength": 24},
    },
    "required": ["category", "urgency", "order_id"],
    "additionalProperties": False,
}


def call(url: str, seed: int, tokens: int | None, patience: float) -> dict:
    """One call: the answer, its seconds, and what is wrong with it; None where it was cut off."""
    body = {
        "prompt": PROMPT,
        "temperature": 1.0,
        "seed": seed,
        "structured_output": {"schema_type": "json", "schema": SCHEMA},
        **({} if tokens is None else {"max_tokens": tokens}),
    }
    request = urllib.request.Request(
        f"{url}/v1/generate",
        json.dumps(body, ensure_ascii=False).encode(),
        {"content-type": "application/json"},
    )
    began = time.perf_counter()
    try:
        with urllib.request.urlopen(request, timeout=patience) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as why:
        with why:
            return {"seed": seed, "finish_reason": "refused", "wrong": why.read().decode()}
    except TimeoutError:  # the server sees us leave and frees the request
        return {"seed": seed, "finish_reason": "timeout", "wrong": None}
    seconds = time.perf_counter() - began
    wrong = None if answer["finish_reason"] in CUT else wrong_with(answer["text"])
    return {"seed": seed, "seconds": seconds, **answer, "wrong": wrong}


def wrong_with(text: str) -> str | None:
    """Why a text is not what the schema says; None if it is."""
    try:
        jsonschema.validate(json.loads(text), SCHEMA)
    except (ValueError, jsonschema.ValidationError) as why:
        return f"{type(why).__name__}: {str(why).splitlines()[0]}"
    return None


def own_server() -> tuple[subprocess.Popen, str]:
    """A server with the demo model, and where it listens."""
    argv = [sys.executable, "-m", "deepinfer.server", "--model", "demo", "--port", "0"]
    process = subprocess.Popen([*argv, "--no-access-log"], stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        found = re.search(r"is served at (http://\S+)", line)
        if found:
            return process, found[1]
    raise SystemExit("the server did not start")


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, help="none: as published, to the text's end")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds to wait for a call")
    parser.add_argument("--unbounded", action="store_true", help="leave out maxLength")
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--json", help="write the figures there")
    options = parser.parse_args()
    if options.unbounded:
        del SCHEMA["properties"]["order_id"]["maxLength"]
    process, url = (None, options.url) if options.url else own_server()

    def one(seed: int) -> dict:
        return call(url, seed, options.max_tokens, options.timeout)

    try:
        with ThreadPoolExecutor(options.parallel) as pool:
            answers = list(pool.map(one, range(options.calls)))
        again = one(0)
    finally:
        if process is not None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            process.stderr.close()
    seen = figures(answers, again)
    print(json.dumps(seen, indent=1, ensure_ascii=False))
    if options.json:
        Path(options.json).write_text(json.dumps(seen, indent=1, ensure_ascii=False) + "\n")
    good = seen["valid"] + (seen["cut off"] if options.unbounded else 0)
    return 0 if good == options.calls else 1


def figures(answers: list[dict], again: dict) -> dict:
    """What all calls come to; ``again`` is the first one once more."""
    cut = [a for a in answers if a["finish_reason"] in CUT]
    wrong = [a for a in answers if a["wrong"]]
    tokens = [a["usage"]["completion_tokens"] for a in answers if "usage" in a]
    both = "text" in again and "text" in answers[0]
    return {
        "calls": len(answers),
        "valid": len(answers) - len(cut) - len(wrong),
        "cut off": len(cut),
        "different texts": len({a["text"] for a in answers if "text" in a}),
        "same seed, same text": again["text"] == answers[0]["text"] if both else None,
        "finish": dict(Counter(a["finish_reason"] for a in answers)),
        "tokens median": statistics.median(tokens) if tokens else None,
        "examples": [a.get("text") for a in answers[:3]],
        "wrong": [{k: a.get(k) for k in SHOWN} for a in wrong[:5]],
    }


if __name__ == "__main__":
    sys.exit(main())
