"""Streaming clients of which a third hang up at random, and what is left of them.

    python benchmarks/server_soak.py [--clients 64] [--seconds 120] [--json FILE]

A server of its own process with the demo model in invariant mode. Each client asks one of a fixed
set of texts again and again, most as streams, some in one piece; a third of the requests are left
at a random moment. Texts of the others must be, bit for bit, what the library makes of them
without a server. At the end the server's own metrics must say that all pages and slots are free
and no request or task is left; its memory is compared with what it was after a first quarter.
Leaves with 0 if all of it holds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

TEXTS = 96
SAMPLING = {"temperature": 1.0, "ignore_eos": True}
ENGINE = {"max_model_len": 512, "max_num_seqs": 32, "num_threads": 2}
GROWTH = 0.05
"""Of resident memory, between the first quarter's end and the last: what is no leak."""


def asked(number: int, tokens: int) -> dict:
    """Request ``number`` of the fixed set; lengths differ, beginnings are shared."""
    draw = random.Random(number)
    prompt = f"Story number {number % 24}. " + "Once upon a time " * draw.randrange(1, 12)
    return {"prompt": prompt, "seed": number, "max_tokens": draw.randrange(4, tokens), **SAMPLING}


def offline(model: str, tokens: int) -> list[str]:
    """What the library makes of each request without a server."""
    from deepinfer import LLM, SamplingParams

    bodies = [asked(i, tokens) for i in range(TEXTS)]
    prompts = [body.pop("prompt") for body in bodies]
    with LLM(model, batch_invariant=True, **ENGINE) as llm:
        outputs = llm.generate(prompts, [SamplingParams(**body) for body in bodies])
    return [output.text for output in outputs]


class Program:
    """``python -m deepinfer.server`` and what it says of itself."""

    def __init__(self, model: str) -> None:
        argv = ["-m", "deepinfer.server", "--model", model, "--port", "0", "--batch-invariant"]
        argv += ["--max-model-len", "512", "--max-batch-size", "32", "--threads", "2"]
        # Few pages: all of them are soon in memory, which counts none before it is written to, and
        # requests give way to each other.
        argv += ["--kv-cache-memory", "100MB"]
        self.process = subprocess.Popen(
            [sys.executable, *argv, "--no-access-log"], stderr=subprocess.PIPE, text=True
        )
        assert self.process.stderr is not None
        for line in self.process.stderr:
            found = re.search(r"is served at http://([^:]+):(\d+)", line)
            if found:
                self.host, self.port = found[1], int(found[2])
                return
        raise SystemExit("the server did not start")

    async def metrics(self) -> dict[str, float]:
        """Its gauges and counters by name."""
        text = await fetch(self, "GET", "/metrics", None)
        found = re.findall(r"^(deepinfer_\w+(?:{[^}]*})?) (\S+)$", text, re.M)
        return {name: float(value) for name, value in found}

    def rss(self) -> int:
        """Resident bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024

    def end(self) -> int:
        """SIGTERM, and its exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        self.process.stderr.close()
        return code


async def opened(program: Program, method: str, path: str, body: dict | None):
    """A request that was sent, before anything of its answer was read."""
    reader, writer = await asyncio.open_connection(program.host, program.port)
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nhost: soak\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer


async def fetch(program: Program, method: str, path: str, body: dict | None) -> str:
    """The whole answer's body."""
    reader, writer = await opened(program, method, path, body)
    try:
        head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        if b" 200 " not in head.splitlines()[0]:
            raise RuntimeError(f"{path}: {head.splitlines()[0]!r}: {rest[:300]!r}")
        return (unchunked(rest) if b"chunked" in head.lower() else rest).decode()
    finally:
        writer.close()


def unchunked(data: bytes) -> bytes:
    """The body of a chunked answer."""
    parts = []
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        parts.append(data[:length])
        data = data[length + 2 :]
        if not length:
            break
    return b"".join(parts)


def text_of(answer: str, stream: bool) -> str:
    """What a whole answer or a stream says."""
    if not stream:
        return json.loads(answer)["text"]
    lines = [line[6:] for line in answer.splitlines() if line.startswith("data: {")]
    return "".join(json.loads(line).get("text", "") for line in lines)


async def client(program, number, want, tokens, until, count: Counter, wrong: list) -> None:
    """One client until the time is over."""
    draw = random.Random(1000 + number)
    while time.monotonic() < until:
        which = draw.randrange(TEXTS)
        stream = draw.random() < 0.8
        body = {**asked(which, tokens), "stream": stream}
        if draw.random() < 1 / 3:
            reader, writer = await opened(program, "POST", "/v1/generate", body)
            try:
                wait = draw.expovariate(1.0)
                await asyncio.wait_for(reader.read(), wait)
                count["over before the client left"] += 1
            except TimeoutError:
                count["left"] += 1
            finally:
                writer.close()
            continue
        said = text_of(await fetch(program, "POST", "/v1/generate", body), stream)
        count["read to the end"] += 1
        if said != want[which]:
            wrong.append((which, said, want[which]))


async def soak(program: Program, options, want: list[str]) -> dict:
    """Run the clients; what was seen."""
    await fetch(program, "POST", "/v1/generate", asked(0, options.tokens))
    before = await idle(program)
    began = time.monotonic()
    count, wrong, memory = Counter(), [], []
    until = began + options.seconds
    clients = [
        asyncio.create_task(client(program, i, want, options.tokens, until, count, wrong))
        for i in range(options.clients)
    ]
    while not all(task.done() for task in clients):
        await asyncio.sleep(min(5.0, options.seconds / 8))
        memory.append((time.monotonic() - began, program.rss()))
    await asyncio.gather(*clients)
    after = await idle(program)
    warm = [rss for at, rss in memory if at >= options.seconds / 4] or [memory[-1][1]]
    return {
        "clients": options.clients,
        "seconds": options.seconds,
        "requests": dict(count),
        "wrong": len(wrong),
        "first wrong": wrong[:1],
        "metrics before": before,
        "metrics after": after,
        "memory MB": [round(rss / 2**20) for _, rss in memory],
        "memory growth": round(warm[-1] / warm[0] - 1, 4),
        "finished": after.pop("finished"),
    }


KEPT = ("kv_pages", "kv_pages_free", "kv_slots_free", "requests_running", "requests_waiting")
NAMES = (*KEPT, "tasks", "http_requests_inside")


async def idle(program: Program) -> dict:
    """The metrics once nothing runs; at most ten seconds after."""
    for _ in range(100):
        found = await program.metrics()
        if not found["deepinfer_requests_running"] and found["deepinfer_http_requests_inside"] == 0:
            break
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.3)
    found = await program.metrics()
    kept = {name: found[f"deepinfer_{name}"] for name in NAMES}
    ends = {k: v for k, v in found.items() if "requests_finished_total" in k}
    return {**kept, "finished": ends}


def verdict(seen: dict) -> list[str]:
    """What does not hold."""
    after, before = seen["metrics after"], seen["metrics before"]
    wrong = [] if not seen["wrong"] else [f"{seen['wrong']} texts differ from offline ones"]
    if after["kv_pages_free"] != after["kv_pages"]:
        wrong.append("pages are not free")
    for name in ("kv_slots_free", "tasks", "requests_running", "http_requests_inside"):
        if after[name] != before[name]:
            wrong.append(f"{name}: {before[name]:g} before, {after[name]:g} after")
    if seen["memory growth"] > GROWTH:
        wrong.append(f"memory grew by {seen['memory growth']:.1%}")
    return wrong


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--tokens", type=int, default=40, help="longest text")
    parser.add_argument("--json", help="write the figures there")
    options = parser.parse_args()
    want = offline(options.model, options.tokens)
    program = Program(options.model)
    try:
        seen = asyncio.run(soak(program, options, want))
    finally:
        seen_code = program.end()
    problems = verdict(seen) + ([] if seen_code == 0 else [f"exit code {seen_code}"])
    seen.update(problems=problems, cores=os.cpu_count())
    print(json.dumps(seen, indent=1, ensure_ascii=False))
    if options.json:
        Path(options.json).write_text(json.dumps(seen, indent=1, ensure_ascii=False) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
