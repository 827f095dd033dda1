"""What ``plugin_config={"structured": {…}}`` may say: :class:`Options`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from deepinfer.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of the plugin, for all requests of an engine.

    Args:
        max_whitespace: most blanks in a row between JSON's tokens.
        max_digits: most digits in a row of a JSON integer.
        additional_properties: which undeclared keys may be written: ``declared_only`` none where a
            schema lists some and does not speak of others, ``allow`` all that the standard
            allows, ``never`` none.
        formats: ``assert`` enforces ``format`` where it is known; ``annotate`` ignores it.
        compile_seconds: longest time that one grammar may take to compile, or one text to be
            validated; what takes longer is refused.
        max_grammar_bytes: longest grammar, as its text or as what a schema comes to.
        max_compiled_bytes: most memory of one compiled grammar.
        cache_bytes: memory of compiled grammars that are kept, least recently used ones go first.
        disk_cache: keep compiled grammars in the cache folder too, for the next start.
        fill_seconds: a grammar whose mask takes longer than this fails its request.
        threads: that fill masks where there is enough to fill; 0 takes half of the processors.
    """

    max_whitespace: int = 16
    max_digits: int = 18
    additional_properties: str = "declared_only"
    formats: str = "assert"
    compile_seconds: float = 10.0
    max_grammar_bytes: int = 2_000_000
    max_compiled_bytes: int = 256 << 20
    cache_bytes: int = 256 << 20
    disk_cache: bool = False
    fill_seconds: float = 0.5
    threads: int = 0

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """From the configuration.

        Raises:
            ConfigError: an unknown name or a wrong value; all of them at once.
        """
        known = {f.name: f for f in fields(cls)}
        problems = [f"{name}: no such option" for name in given if name not in known]
        for name, value in given.items():
            if name in known:
                problems += [f"{name}={value!r}: {why}" for why in [_wrong(name, value)] if why]
        if problems:
            raise ConfigError(
                f"plugin_config of structured: {'; '.join(problems)}.",
                setting="plugin_config",
                next_step=f"Known: {', '.join(known)}.",
            )
        return cls(**given)


_WORDS: Mapping[str, tuple[str, ...]] = {
    "additional_properties": ("declared_only", "allow", "never"),
    "formats": ("assert", "annotate"),
}
_RANGES: Mapping[str, tuple[float, float]] = {
    "max_whitespace": (0, 64),
    "max_digits": (1, 400),
    "compile_seconds": (0.01, 3600),
    "max_grammar_bytes": (1, 1 << 30),
    "max_compiled_bytes": (1, 1 << 40),
    "cache_bytes": (0, 1 << 44),
    "fill_seconds": (0.001, 3600),
    "threads": (0, 1024),
}


def _wrong(name: str, value: Any) -> str | None:
    if name in _WORDS:
        return None if value in _WORDS[name] else f"one of {', '.join(_WORDS[name])}"
    if name == "disk_cache":
        return None if isinstance(value, bool) else "true or false"
    low, high = _RANGES[name]
    kinds = (int, float) if name.endswith("seconds") else (int,)
    fits = isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high
    return None if fits else f"a number in {low} … {high}"
