"""The optional C extension; everything else is in pyproject.toml.

Without a C compiler the build goes on without it and the torch reference runs instead.
No -march flag: the sources switch instruction sets themselves and choose at run time.
"""

import sys

from setuptools import Extension, setup

NATIVE = "src/deepinfer/native/"
FLAGS = [
    "-O3",
    "-g0",
    "-std=gnu11",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fwrapv",
    "-Wno-psabi",
    "-Wno-unknown-pragmas",
]
HEADERS = "blocks kernels simd dot tile linear rows attention sampling filter template".split()

setup(
    ext_modules=[
        Extension(
            "deepinfer.native._kernels",
            sources=[
                NATIVE + name for name in ("module.c", "isa_base.c", "isa_avx2.c", "isa_avx512.c")
            ],
            depends=[f"{NATIVE}{name}.h" for name in HEADERS],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            extra_compile_args=[] if sys.platform == "win32" else FLAGS,
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
