"""From an :class:`EngineConfig` to a running engine: every part is opened here, in one function.

Where you are: behind both front doors. Order: find the model, choose plugins, read the tokenizer,
start the executor (weights, KV), build the brain. If a later part fails, what was opened is closed
before the error leaves. Each stage is timed; the tree is ``Assembly.timings``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, cast

from deepinfer import settings
from deepinfer.api.grammar import GrammarContext
from deepinfer.chat import ChatFormat, ChatOptions, chat_format, prompt_ids
from deepinfer.chat.interface import NO_WISHES
from deepinfer.config import EngineConfig
from deepinfer.entrypoints.images import PromptImages
from deepinfer.entrypoints.inputs import ChatPrompt, Message, Preparer
from deepinfer.entrypoints.speculation import open_planner, speculator_name
from deepinfer.errors import InvalidRequestError, TokenizerError
from deepinfer.plugins import PluginManager, Resolution, Wanted
from deepinfer.sampling_params import SamplingParams
from deepinfer.structured.wishes import format_spec

if TYPE_CHECKING:
    from deepinfer.api.executor import Executor, ModelFacts
    from deepinfer.api.grammar import GrammarBackend
    from deepinfer.api.observer import Observer
    from deepinfer.engine.engine import Engine
    from deepinfer.models.source import ModelSource
    from deepinfer.tokenizer import Tokenizer

logger: Final = logging.getLogger("deepinfer")
_CHAT_FORMATS: Final = 32
_FROM_CHECKPOINT: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class StartupTimes:
    """Seconds per stage of a start, in order."""

    def __init__(self) -> None:
        self.stages: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time one stage."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.stages[name] = time.perf_counter() - began

    def inside(self, name: str, parts: Mapping[str, float]) -> None:
        """What a stage measured of itself, kept as ``name / part``."""
        self.stages.update((f"{name} / {part}", s) for part, s in parts.items() if part != "total")

    def tree(self) -> str:
        """For a terminal."""
        total = sum(seconds for name, seconds in self.stages.items() if " / " not in name)
        lines = [f"{'start-up':<28} {total:8.3f} s"]
        for name, seconds in self.stages.items():
            outer, _, part = name.rpartition(" / ")
            lines.append(f"{'    ' + part if outer else '  ' + name:<28} {seconds:8.3f} s")
        return "\n".join(lines)


@dataclass(slots=True, kw_only=True)
class Assembly:
    """All parts of one engine. ``engine.close()`` closes the executor too."""

    config: EngineConfig
    executor: Executor
    facts: ModelFacts
    tokenizer: Any
    engine: Engine
    preparer: Preparer
    default_params: SamplingParams = field(default_factory=SamplingParams)
    resolution: Resolution | None = None
    times: StartupTimes = field(default_factory=StartupTimes)
    _chat_formats: dict[str | None, ChatFormat] = field(default_factory=dict)

    @property
    def timings(self) -> dict[str, float]:
        """Stage → seconds."""
        return self.times.stages

    def render_chat(
        self,
        messages: Sequence[Message],
        options: ChatOptions = NO_WISHES,
        template: str | None = None,
    ) -> ChatPrompt:
        """A conversation as a prompt: its text, its ids, and how to read the answer.

        Args:
            messages: role and content each, oldest first.
            options: what else the caller wishes.
            template: a Jinja template in place of the model's own format.
        """
        if self.tokenizer is None:
            raise TokenizerError("This engine has no tokenizer, so it cannot chat.")
        chat = self._chat_formats.get(template)
        if chat is None:
            if len(self._chat_formats) >= _CHAT_FORMATS:
                self._chat_formats.clear()  # who brings a template of his own each time
            chat = chat_format(self.tokenizer, template, self.facts.architecture)
            self._chat_formats[template] = chat
        forced = None if options.format_is_forced else format_spec(options.response_format)
        if forced is not None:
            options = replace(options, format_is_forced=True)
        rendered = chat.render(messages, options)
        images = self.preparer.images.read(rendered.images)
        ids = prompt_ids(rendered, self.tokenizer, [image.tokens for image in images])
        return {
            "prompt": rendered.text,
            "prompt_token_ids": ids,
            "parser": rendered.parser,
            "reasoning_end": rendered.reasoning_end,
            "so_args": forced,
            "images": self.preparer.images.place(ids, images),
        }


def assemble(config: EngineConfig, observers: Sequence[Observer] = ()) -> Assembly:
    """Open everything that the configuration names.

    Args:
        config: what to open.
        observers: told of steps and requests, after those of plugins.

    Raises:
        DeepInferError: what is missing or broken; whatever was opened before is closed again.
    """
    for sentence in settings.unknown():
        logger.warning("%s", sentence)
    if config.trust_remote_code:
        logger.info("trust_remote_code has no effect: no code of a checkpoint is ever run.")
    times = StartupTimes()
    with ExitStack() as opened:
        source, raw, generation = _found(config, times)
        with times.stage("choose plugins"):
            from deepinfer.models.registry import architectures_of

            manager = PluginManager(disable=config.disable_plugins)
            speculator = speculator_name(manager, config, raw)
            wanted = Wanted.by(config, architectures_of(raw), speculator)
            resolution = manager.resolve(wanted, config)
        with times.stage("tokenizer"):
            tokenizer = _tokenizer(source, config.load_format)
        with times.stage("weights and KV"):
            executor: Executor = resolution.load("executor")()
            opened.callback(executor.close)
            facts = executor.start(config, resolution)
        times.inside("weights and KV", getattr(executor, "startup", {}))
        ends = _end_ids(tokenizer, raw, generation, facts.vocab_size)
        with times.stage("engine"):
            grammar = _grammar_backend(config, resolution, tokenizer, facts, ends)
            told = [*cast("list[Observer]", manager.observers(config)), *observers]
            engine = _engine(config, resolution, executor, facts, tokenizer, grammar, told)
            opened.callback(engine.close)
        assembly = Assembly(
            config=config,
            executor=executor,
            facts=facts,
            tokenizer=tokenizer,
            engine=engine,
            preparer=Preparer(
                facts,
                tokenizer,
                ends,
                config.seed,
                images=_images(resolution, raw),
                grammar=grammar,
            ),
            default_params=_defaults(config, generation),
            resolution=resolution,
            times=times,
        )
        opened.pop_all()
    logger.info("%s\n%s", _summary(assembly), times.tree())
    return assembly


def _found(
    config: EngineConfig, times: StartupTimes
) -> tuple[ModelSource, dict[str, Any], dict[str, Any]]:
    """Where the model lies, and its config and generation_config; no tensor is read."""
    with times.stage("find the model"):
        from deepinfer.models.source import resolve

        source = resolve(
            config.model,
            revision=config.revision,
            tokenizer=config.tokenizer,
            weights=config.load_format != "dummy",
        )
    with times.stage("import torch"):
        import torch  # noqa: F401  (most of a start; timed where it can be seen)
    with times.stage("read its header"):
        from deepinfer.models.checkpoint import open_checkpoint

        checkpoint = open_checkpoint(source, config.load_format)
        return source, checkpoint.config, checkpoint.generation_config


def _engine(
    config: EngineConfig,
    resolution: Resolution,
    executor: Executor,
    facts: ModelFacts,
    tokenizer: Tokenizer | None,
    grammar: GrammarBackend | None,
    observers: Sequence[Observer],
) -> Engine:
    """The brain, with the policy and the planner that were chosen."""
    from deepinfer.engine.engine import Engine

    return Engine(
        config,
        executor,
        facts,
        tokenizer=tokenizer,
        policy=resolution.load("policy")(),
        planner=open_planner(config, resolution, executor, facts),
        grammar_backend=grammar,
        observers=observers,
    )


def _tokenizer(source: ModelSource, load_format: str) -> Tokenizer | None:
    """The model's; None where dummy weights come without one, and prompts are token ids."""
    from deepinfer.tokenizer import has_tokenizer, load_tokenizer

    if load_format == "dummy" and not has_tokenizer(source):
        return None
    return load_tokenizer(source)


def _grammar_backend(
    config: EngineConfig,
    resolution: Resolution,
    tokenizer: Tokenizer | None,
    facts: ModelFacts,
    ends: frozenset[int],
) -> GrammarBackend | None:
    """The chosen one for this model; None where no plugin brings any."""
    for choice in resolution.all("grammar"):
        context = GrammarContext(
            tokenizer=tokenizer,
            vocab_size=facts.vocab_size,
            eos_ids=ends,
            options=config.plugin_config.get(choice.plugin, {}),
            cache_dir=settings.cache_dir() / "grammars",
        )
        backend: GrammarBackend = choice.load_part()(context)
        return backend
    return None


def _images(resolution: Resolution, raw: Mapping[str, Any]) -> PromptImages:
    from deepinfer.models.registry import adapter_of, architectures_of, image_reader

    return PromptImages(image_reader(adapter_of(resolution), raw), architectures_of(raw)[0])


def _end_ids(
    tokenizer: Tokenizer | None, raw: Mapping[str, Any], generation: Mapping[str, Any], vocab: int
) -> frozenset[int]:
    ends = set() if tokenizer is None else set(tokenizer.stop_token_ids)
    for given in (generation.get("eos_token_id"), raw.get("eos_token_id")):
        ends.update([given] if isinstance(given, int) else given or ())
    return frozenset(i for i in ends if 0 <= i < vocab)


def _defaults(config: EngineConfig, generation: Mapping[str, Any]) -> SamplingParams:
    """Sampling defaults of the checkpoint, if they are wanted and valid."""
    if config.generation_config == "none":
        return SamplingParams()
    named = {k: generation[k] for k in _FROM_CHECKPOINT if generation.get(k) is not None}
    if generation.get("max_new_tokens") is not None:
        named["max_tokens"] = generation["max_new_tokens"]
    try:
        return SamplingParams(**named)
    except InvalidRequestError as why:
        logger.warning("The checkpoint's generation_config.json is left out: %s", why)
        return SamplingParams()


def _summary(assembly: Assembly) -> str:
    facts = assembly.facts
    return (
        f"{facts.architecture} on {facts.backend} in {facts.dtype}: "
        f"{facts.weight_bytes / 1e6:.0f} MB of weights, KV for "
        f"{facts.num_pages * facts.page_size} tokens, context {facts.max_model_len}"
    )
