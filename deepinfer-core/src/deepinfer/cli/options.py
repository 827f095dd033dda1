"""Options that several commands share, gathered into one dictionary each.

Where you are: between click and the library's keyword arguments. An option that was not given is
left out, so the library's own default (or the environment) decides.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import click

_Command = TypeVar("_Command", bound=Callable[..., Any])
Option = tuple[tuple[str, ...], dict[str, Any]]
NO_LIMIT: Final = "none"


def _limit(value: str | int) -> int | str:
    """A number, or ``none`` for no limit."""
    try:
        return NO_LIMIT if value == NO_LIMIT else int(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is neither a number nor {NO_LIMIT}.") from None


def _opt(*names: str, **kwargs: Any) -> Option:
    return names, kwargs


_ENGINE: Final[Sequence[Option]] = (
    _opt("-m", "--model", default="demo", show_default=True, help="Directory, GGUF, hub id."),
    _opt("--tokenizer", help="Where the tokenizer lies, if not with the model."),
    _opt("--revision", help="Of a hub id."),
    _opt("--dtype", type=click.Choice(["auto", "float32", "bfloat16"])),
    _opt("--backend", help="A backend plugin's name."),
    _opt("--device", type=click.Choice(["cpu", "cuda", "npu"])),
    _opt("--quantization", type=click.Choice(["int8", "fp8"]), help="Of weights."),
    _opt("--load-format", type=click.Choice(["auto", "dummy"]), help="dummy: random weights."),
    _opt("--max-model-len", type=int, help="Longest text in tokens."),
    _opt(
        "--max-num-seqs",
        "--max-batch-size",
        "max_num_seqs",
        type=int,
        help="Requests that run at once.",
    ),
    _opt("--max-num-batched-tokens", type=int, help="Tokens of one step."),
    _opt("--kv-cache-memory", help='Bytes of KV, as "2GiB".'),
    _opt("--kv-cache-dtype", type=click.Choice(["auto", "bfloat16", "packed"])),
    _opt("--page-size", type=int, help="Tokens per KV page."),
    _opt(
        "--yoco-prefill-truncation-mode",
        type=click.Choice(["compact", "mask", "off", "exact"]),
        help="How late layers skip a prompt's beginning.",
    ),
    _opt("--yoco-prefill-keep-tokens", type=int, help="Rows that they keep."),
    _opt(
        "--dequantize-weights/--no-dequantize-weights",
        default=None,
        help="Turn low-bit weights into dtype at load.",
    ),
    _opt("--gpu-memory-utilization", type=float),
    _opt("--engine-seed", "engine_seed", type=int, help="Where seeds of requests come from."),
    _opt("--batch-invariant/--no-batch-invariant", default=None, help="Results free of the batch."),
    _opt("--prefix-caching/--no-prefix-caching", "enable_prefix_caching", default=None),
    _opt("--overlap/--no-overlap", default=None, help="Plan one step ahead of the device."),
    _opt("--scheduling-policy", help="fcfs, priority or a plugin's."),
    _opt("--grammar-backend", help="A grammar plugin's name, for structured output."),
    _opt(
        "--grammar-acceleration",
        type=click.Choice(["auto", "cpu", "cuda"]),
        help="Who applies grammars' masks.",
    ),
    _opt("--speculative", help="A draft's name or path, key=value,… or a JSON object; off."),
    _opt("--threads", "num_threads", type=int, help="CPU threads."),
    _opt("--generation-config", type=click.Choice(["auto", "none"])),
    _opt("--trust-remote-code", is_flag=True, default=None, help="Accepted; nothing is run."),
    _opt("--ep", "expert_parallel_size", type=int, help="Expert parallel size."),
    _opt("--dp", "data_parallel_size", type=int, help="Data parallel size."),
    _opt("--cp", "context_parallel_size", type=int, help="Context parallel size."),
    _opt("--tp", "tensor_parallel_size", type=int, help="Tensor parallel size."),
    _opt("--no-plugin", "disable_plugins", multiple=True, help="A plugin to leave out."),
)

_SAMPLING: Final[Sequence[Option]] = (
    _opt(
        "-n",
        "--max-tokens",
        type=_limit,
        metavar="N|none",
        help="Longest output; none: to the context's end.",
    ),
    _opt("--min-tokens", type=int),
    _opt("-t", "--temperature", type=float, help="Default: the checkpoint's, else 0 (greedy)."),
    _opt("--top-k", type=int),
    _opt("--top-p", type=float),
    _opt("--min-p", type=float),
    _opt("--presence-penalty", type=float),
    _opt("--frequency-penalty", type=float),
    _opt("--repetition-penalty", type=float),
    _opt("-s", "--seed", type=int, help="Same seed, same text."),
    _opt("--stop", multiple=True, help="A text that ends the output."),
    _opt("--stop-token-id", "stop_token_ids", type=int, multiple=True),
    _opt("--include-stop-text", "include_stop_str_in_output", is_flag=True, default=None),
    _opt("--ignore-eos", is_flag=True, default=None),
    _opt("--bad-word", "bad_words", multiple=True, help="A text that may not appear."),
    _opt("--allow-token-id", "allowed_token_ids", type=int, multiple=True),
    _opt("--logit-bias", multiple=True, metavar="ID:BIAS", help="Added to a token's logit."),
    _opt("--logprobs", type=int, help="Best candidates to report per token."),
    _opt("--keep-special-tokens", "skip_special_tokens", flag_value=False, default=None),
)

# How many outputs, and what they obey: what a recipe decides itself.
_OUTPUTS: Final[Sequence[Option]] = (
    _opt("--samples", "n", type=int, help="Samples per prompt."),
    _opt("--json-schema", metavar="FILE|JSON", help="The output is JSON of this schema."),
    _opt("--regex", metavar="PATTERN", help="The output matches it, whole."),
    _opt("--grammar", metavar="FILE|EBNF", help="The output is a text of this grammar."),
    _opt("--choice", multiple=True, help="The output is one of these texts."),
)


def engine_options(command: _Command) -> _Command:
    """Adds the engine's options; the command gets them as ``engine: dict``."""
    return _gathered(command, _ENGINE, "engine")


def sampling_options(command: _Command) -> _Command:
    """Adds the sampling options; the command gets them as ``sampling: dict``."""
    return _gathered(command, (*_SAMPLING, *_OUTPUTS), "sampling")


def drawing_options(command: _Command) -> _Command:
    """Those of them that say how tokens are drawn and when a text ends; likewise."""
    return _gathered(command, _SAMPLING, "sampling")


def _gathered(command: _Command, options: Sequence[Option], name: str) -> _Command:
    fields = [_field(names) for names, _ in options]

    @functools.wraps(command)
    def wrapper(*args: Any, **given: Any) -> Any:
        taken = {key: given.pop(key) for key in fields}
        given[name] = {k: v for k, v in taken.items() if v is not None and v != ()}
        return command(*args, **given)

    for names, kwargs in reversed(options):
        wrapper = click.option(*names, **kwargs)(wrapper)
    return wrapper  # type: ignore[return-value]


def _field(names: Sequence[str]) -> str:
    """The parameter name that click makes of an option's names."""
    plain = [name for name in names if not name.startswith("-")]
    if plain:
        return plain[0]
    long = max((n.partition("/")[0] for n in names), key=lambda n: n.startswith("--"))
    return long.lstrip("-").replace("-", "_")


def open_llm(engine: dict[str, Any]) -> Any:
    """An ``LLM`` from the engine's options."""
    from deepinfer.entrypoints.llm import LLM

    return _opened(LLM, engine)


def open_async_llm(engine: dict[str, Any]) -> Any:
    """An ``AsyncLLM`` from the engine's options."""
    from deepinfer.entrypoints.async_llm import AsyncLLM

    return _opened(AsyncLLM, engine)


def _opened(door: Any, engine: dict[str, Any]) -> Any:
    config = engine_config(engine)
    fetch_demo(config.model)
    with doing(f"loading {config.model}"):
        return door.from_config(config)


def fetch_demo(model: str) -> None:
    """The first use of the demo model fetches 93 MB: say so, however quiet logging is."""
    if model == "demo":
        from deepinfer.models import demo

        demo.fetch(lambda sentence: click.echo(sentence, err=True))


@contextmanager
def doing(what: str, log: bool = False) -> Iterator[Callable[[str], None]]:
    """Show on a terminal's last line what is being done; gives the call that changes it.

    ``log``: without a terminal, write a line for each instead of nothing.
    """
    terminal = sys.stderr.isatty()

    def tell(now: str) -> None:
        if terminal:
            click.echo(f"\r\x1b[K{now} ...", nl=False, err=True)
        elif log:
            click.echo(now, err=True)

    tell(what)
    try:
        yield tell
    finally:
        if terminal:
            click.echo("\r\x1b[K", nl=False, err=True)


def engine_config(engine: dict[str, Any]) -> Any:
    """The configuration that the engine's options describe."""
    from deepinfer.config import EngineConfig

    arguments = dict(engine)
    if "engine_seed" in arguments:
        arguments["seed"] = arguments.pop("engine_seed")
    return EngineConfig.make(**arguments)


def sampling_params(sampling: dict[str, Any], base: Any = None) -> Any:
    """``base``, the checkpoint's defaults, with what the command line gave in its place.

    A temperature that nobody names is 0: who types a question wants the answer, and again.
    Without ``base``: only to refuse wrong values, before a model is loaded.
    """
    from deepinfer.sampling_params import SamplingParams

    base = SamplingParams() if base is None else base
    given = dict(sampling)
    if given.get("max_tokens") == NO_LIMIT:
        given["max_tokens"] = None
    if "logit_bias" in given:
        given["logit_bias"] = dict(_bias(text) for text in given["logit_bias"])
    given.update(_structured(given))
    return SamplingParams(**{"temperature": 0.0, **base.model_dump(exclude_unset=True), **given})


_RULES: Final = {"json_schema": "json", "regex": "regex", "grammar": "ebnf", "choice": "choice"}


def _structured(given: dict[str, Any]) -> dict[str, Any]:
    """The option that says what the output must obey, taken out, as ``so_args``."""
    rules = {name: given.pop(name) for name in _RULES if name in given}
    if len(rules) > 1:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in rules)
        raise click.UsageError(f"{named} each say what the output must obey; give one of them.")
    for name, rule in rules.items():
        if name in ("json_schema", "grammar"):
            rule = _text_or_file(rule, f"--{name.replace('_', '-')}")
        return {"so_args": {"schema_type": _RULES[name], "schema": rule}}
    return {}


def _text_or_file(given: str, option: str) -> str:
    """A rule as it is typed, or the contents of the file of that name."""
    if any(mark in given for mark in ("{", "::=")) or given.strip() in ("true", "false"):
        return given
    try:
        return Path(given).read_text("utf-8")
    except (OSError, ValueError) as why:
        raise click.BadParameter(
            f"{given!r} is neither a rule nor a file that can be read: {why}.", param_hint=option
        ) from None


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition(":")
    try:
        return int(token), float(bias)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not ID:BIAS", param_hint="--logit-bias") from None
