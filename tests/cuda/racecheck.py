"""``compute-sanitizer --tool racecheck`` over ``sanitized.py``, and a judge of what it reports.

``python racecheck.py [SECONDS [PROCESSES]]`` runs the kit's cases in one process and shares of the
launches in others, and leaves with 1 for any hazard but one kind, which it proves to be none from
the machine code that ran.

The kind: ``warp_specialize`` tells its warps what to do by a byte for each in shared memory. The
tool reports some reads of these bytes as racing with their writes, although all threads of the
block pass barrier 1 between them (decision 0010). A pair of accesses is accepted if the write is
the store right before a barrier 1 of the whole block, or one of several, the read is a byte-wide
load behind one with nothing but the arithmetic of its address between, and both name the reported
place.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
LIMIT = 100_000
"""Hazards that the tool may print: what it leaves out could not be judged."""
SHARED_BASE = 0x400
"""Where a block's own shared memory begins in the addresses of the tool and of the code."""
DISPATCH = "BAR.SYNC.DEFER_BLOCKING 0x1"
"""Without a count of threads it waits for the whole block."""
HAZARD = re.compile(
    r"Potential (?P<kind>\w+) hazard detected at __shared__ (?P<at>0x[0-9a-f]+).*\n"
    r"=+ +Write Thread \S+ at (?P<kernel>\w+)\+(?P<write>0x[0-9a-f]+).*\n"
    r"=+ +Read Thread \S+ at (?P<reader>\w+)\+(?P<read>0x[0-9a-f]+)"
)
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;|^(\.L\w+):", re.MULTILINE)
ARITHMETIC = re.compile(
    r"(?:ULEA|LEA|VIADD|IADD3|UIADD3|SHF|UMOV|MOV|S2R|S2UR|R2UR)(?:\.\w+)* "
    r"|IMAD(?:\.\w+)* \w+, RZ, RZ, "  # a move
)
ADDRESS = 8
"""Instructions that an address takes at most."""
STORE = re.compile(r"STS(?:\.(U8|U16|64|128))? \[[^\]]*?(?:\+(0x[0-9a-f]+))?\]")
LOAD = re.compile(r"LDS\.U8 \w+, \[[^\]]*?\+(0x[0-9a-f]+)\]")
WIDTH = {None: 4, "U8": 1, "U16": 2, "64": 8, "128": 16}


class Hazard(NamedTuple):
    """A reported pair: its kind, place in shared memory, kernel, both instructions' offsets."""

    kind: str
    at: int
    kernel: str
    write: int
    read: int


def hazards(report):
    """Of a whole report; ValueError where the tool did not end or says more than can be read."""
    found = []
    for match in HAZARD.finditer(report):
        kind, at, kernel, write, reader, read = match.groups()
        if reader == kernel:
            found.append(Hazard(kind, int(at, 16), kernel, int(write, 16), int(read, 16)))
    said = re.findall(r"RACECHECK SUMMARY: (\d+) hazards? displayed", report)
    if len(said) != 1:
        raise ValueError(f"the report has {len(said)} summaries: the tool did not end well")
    if int(said[0]) != len(found):
        raise ValueError(f"{said[0]} hazards are reported, {len(found)} could be read")
    return found


def instructions(sass):
    """[(offset, text)] of a disassembled kernel, in order; labels have offset −1."""
    return [
        (-1, label) if label else (int(at, 16), text)
        for at, text, label in INSTRUCTION.findall(sass)
    ]


def is_dispatch(hazard, code):
    """Whether in this machine code the pair is the dispatch of ``warp_specialize``."""
    place = {at: index for index, (at, _) in enumerate(code)}
    write, read = place.get(hazard.write), place.get(hazard.read)
    if hazard.kind != "RAW" or write is None or read is None or not read or write + 1 == len(code):
        return False
    store, load = STORE.match(code[write][1]), LOAD.match(code[read][1])
    if not store or not load:
        return False
    begin, width = int(store[2] or "0", 16), WIDTH[store[1]]
    before = read - 1
    while read - before <= ADDRESS and ARITHMETIC.match(code[before][1]):
        before -= 1
    behind = write + 1
    while behind + 1 < len(code) and STORE.match(code[behind][1]):
        behind += 1
    ordered = code[behind][1] == DISPATCH and code[before][1] == DISPATCH
    named = begin <= hazard.at - SHARED_BASE < begin + width
    return ordered and named and begin - 32 <= int(load[1], 16) <= begin


def main():
    seconds = sys.argv[1] if sys.argv[1:] else "60"
    shares = int(sys.argv[2]) if sys.argv[2:] else 8
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    options = ("--tool", "racecheck", "--racecheck-report", "hazard", "--print-limit", str(LIMIT))
    ours = ("--kernel-name", "kernel_substring=_kernel")
    check = (sys.executable, "-u", str(HERE / "sanitized.py"), seconds)
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TRITON_CACHE_DIR": cache}
        running = [
            subprocess.Popen(
                (tool, *options, *ours, *check, part),
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for part in ("kit", *(f"{share}/{shares}" for share in range(shares)))
        ]
        reports = [(process.communicate()[0], process.returncode) for process in running]
        bad = sum(judge(report, code, Path(cache)) for report, code in reports)
    said = {name for report, _ in reports for name in _launched(report)}
    print("launched:", *sorted(said))
    missing = _unreached(said)
    for name in missing:
        print("never launched:", name)
    print(f"{bad} faults, {len(missing)} kernels never launched")
    return 1 if bad or missing else 0


def judge(report, code, cache):
    """Print what is wrong with a process's report; how much it is."""
    lines = [line for line in report.splitlines() if not line.startswith("=====")]
    print("\n".join(lines[-3:]))
    try:
        found = hazards(report)
    except ValueError as why:
        print(why)
        return 1
    known = {}
    bad = [hazard for hazard in dict.fromkeys(found) if not _proven(hazard, cache, known)]
    for hazard in bad:
        print(hazard)
    print(f"{len(found)} reported, {len(bad)} of them no dispatch of warp_specialize")
    return len(bad) + (code != 0)


def _proven(hazard, cache, known):
    if hazard.kernel not in known:
        from dry_driver import TOOLS

        paths = sorted(cache.glob(f"*/{hazard.kernel}.cubin"))
        known[hazard.kernel] = [
            instructions(
                subprocess.run(
                    (str(TOOLS / "nvdisasm"), "-c", str(path)),
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout
            )
            for path in paths
        ]
    return any(is_dispatch(hazard, code) for code in known[hazard.kernel])


def _launched(report):
    return [
        n for line in re.findall(r"^launched: (.*)$", report, re.MULTILINE) for n in line.split()
    ]


def _unreached(launched):
    """Kernels of the backend that no process launched, of those that serve this GPU."""
    from registry import unreached

    return unreached(launched)


if __name__ == "__main__":
    sys.exit(main())
