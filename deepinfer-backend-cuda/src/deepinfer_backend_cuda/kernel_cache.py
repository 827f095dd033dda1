"""Compiled kernels on disk: a folder for each kind of GPU and Triton, which may be copied about.

Triton's own cache notes absolute paths and lies where an environment variable says. Here this
backend's kernels, and only they, are compiled into a folder of ours with names relative to it; no
variable is set, and kernels of others in this process go where they always went. Entries are found
by a hash of source, options, Triton and target, so a folder made on one machine serves every other
with the same GPU and Triton: copy it, or mount it read-only.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import pkgutil
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import triton
from triton.runtime.cache import FileCacheManager

from deepinfer_backend_cuda import kernels

log = logging.getLogger(__name__)
_knobs: Any = triton.knobs.cache
_scope = threading.RLock()


def folder(root: Path, device: str) -> Path:
    """Where the kernels for a device of this name lie below ``root``."""
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return root / "kernels" / f"{name}-triton-{triton.__version__}"


def of_others() -> bool:
    """Whether the user sent Triton's cache somewhere: then that is where kernels belong."""
    return bool(_knobs.dir != _knobs.get_triton_dir("cache")) or _knobs.manager_class is not None


class KernelCache:
    """One folder, and the time that was spent on it.

    Args:
        path: made if it is not there; if it cannot be written, what is in it is used, and what is
            missing goes where Triton puts it.

    Attributes:
        seconds: spent on compiling, and on loading what lay in the folder.
        counts: kernels compiled, and loaded.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seconds = {"compiled": 0.0, "loaded": 0.0}
        self.counts = {"compiled": 0, "loaded": 0}
        self._manager = _manager(path)

    def serve(self) -> None:
        """From here on this backend's kernels are looked up here; a second call changes nothing.

        Kernels that this process has loaded already stay as they are.
        """
        with self._used():
            _ = triton.runtime.driver.active  # its own helper is compiled, too
        for kernel in all_kernels():
            kernel.device_caches = defaultdict(self._binder(kernel), kernel.device_caches)
            if hasattr(kernel, "compile"):
                kernel.compile = self._compile

    def _binder(self, kernel: Any) -> Callable[[], Any]:
        def create() -> Any:
            made = kernel.create_binder()
            kernel.compile = self._compile
            return made

        return create

    def _compile(self, source: Any, **options: Any) -> Any:
        began = time.perf_counter()
        before = self._manager.written
        with self._used():
            compiled = triton.compile(source, **options)
            compiled._init_handles()  # the launcher is compiled and kept, too
        how = "loaded" if self._manager.written == before else "compiled"
        self.seconds[how] += time.perf_counter() - began
        self.counts[how] += 1
        log.debug("%s %s in %.2f s", how, compiled.name, time.perf_counter() - began)
        return compiled

    @contextmanager
    def _used(self) -> Iterator[None]:
        """Triton asks this cache. Its setter would export a variable, so the value is put under it.

        Kernels of others that are compiled meanwhile, on another thread, come to lie here too.
        """
        with _scope:
            values = vars(_knobs)
            before = dict(values)
            values["manager_class"] = self._manager
            try:
                yield
            finally:
                values.clear()
                values.update(before)


def all_kernels() -> Iterator[Any]:
    """Every jitted function of this package's ``kernels``, Gluon's too."""
    seen = set()
    for info in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        for value in vars(importlib.import_module(info.name)).values():
            if hasattr(value, "create_binder") and id(value) not in seen:
                seen.add(id(value))
                yield value


def _manager(path: Path) -> Any:
    """Triton makes one object of this class for each entry."""

    class Manager(FileCacheManager):  # type: ignore[misc]  # untyped
        written = 0

        def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
            where = path / key
            try:
                if override or dump:
                    raise OSError("not an entry of the cache")
                where.mkdir(parents=True, exist_ok=True)
            except OSError:  # read-only, and not in it
                super().__init__(key, override, dump)
            else:
                self.key = key
                self.cache_dir, self.lock_path = str(where), str(where / "lock")

        def put(self, data: Any, filename: str, binary: bool = True) -> str:
            type(self).written += 1
            return str(super().put(data, filename, binary))

        def put_group(self, filename: str, group: Mapping[str, str]) -> str:
            names = {name: os.path.basename(at) for name, at in group.items()}
            return str(super().put_group(filename, names))

        def get_group(self, filename: str) -> dict[str, str] | None:
            noted = self.get_file(f"__grp__{filename}")
            if noted is None:
                return None
            names = json.loads(Path(noted).read_text("utf-8")).get("child_paths") or {}
            found = {name: self._make_path(os.path.basename(at)) for name, at in names.items()}
            return {name: at for name, at in found.items() if os.path.exists(at)} or None

    return Manager
