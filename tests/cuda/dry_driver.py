"""A Triton driver without a GPU: kernels are compiled for a target and launched nowhere.

So the backend's own launchers, on CPU tensors, are what compiles: every tile that they choose.
"""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED_BYTES = 232448
MNEMONICS = (
    *("HMMA", "HGMMA", "QGMMA", "QMMA", "UTCHMMA", "UTCQMMA", "IMMA"),  # matrix instructions
    *("UTMALDG", "UTMASTG", "UBLKCP", "LDGSTS", "LDTM", "STTM"),  # copies
    *("STL", "LDL"),  # local memory
)


class DryDriver(DriverBase):
    """Compiles for ``capability``; ``built``: (name, cubin, shared bytes) of each kernel."""

    def __init__(self, capability):
        self.capability = capability
        self.built = []
        self.utils = self
        self.launcher_cls = lambda source, metadata: lambda *args: None

    def load_binary(self, name, kernel, shared, device):
        self.built.append((name, kernel, shared))
        return object(), object(), 0, 0, 1024

    def get_device_properties(self, device):
        return {"max_shared_mem": SHARED_BYTES}

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty):
        return ty

    def get_benchmarker(self):
        raise NotImplementedError

    @staticmethod
    def is_active():
        return True


class Usage(NamedTuple):
    """Of a thread: registers and bytes of local memory; ``found``: SASS mnemonics that matter."""

    registers: int
    stack: int
    found: dict[str, int]


def resources(cubin):
    """What a compiled kernel takes and uses."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        sass = _tool("nvdisasm", "-c", file.name)
    registers = int(re.findall(r"REG:(\d+)", usage)[-1])
    stack = int(re.findall(r"STACK:(\d+)", usage)[-1])
    found = re.findall(rf"\b({'|'.join(MNEMONICS)})\b", sass)
    return Usage(registers, stack, {name: found.count(name) for name in sorted(set(found))})


def _tool(name, *arguments):
    return subprocess.run(
        [str(TOOLS / name), *arguments], capture_output=True, text=True, check=True
    ).stdout
