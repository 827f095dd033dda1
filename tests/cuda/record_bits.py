"""Writes ``golden_bits.json`` from the GPU at hand: ``python record_bits.py FILE``.

After a change of a kernel's reduction order, or of Triton; say in the commit which bits moved, and
why. Entries of other compute capabilities stay as they are.
"""

import json
import sys
from importlib import resources
from pathlib import Path

import torch
from deepinfer_backend_cuda import bits


def main():
    before = json.loads(resources.files("deepinfer_backend_cuda").joinpath(bits.GOLDEN).read_text())
    with torch.inference_mode():
        found = bits.record(torch.device("cuda", 0))
    known = before.get("fingerprints", {})
    for capability, prints in found["fingerprints"].items():
        old = known.get(capability, {})
        print("moved:", [n for n, bits_ in prints.items() if n in old and old[n] != bits_])
        print("new:", [n for n in prints if n not in old])
    found["fingerprints"] = {**known, **found["fingerprints"]}
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
