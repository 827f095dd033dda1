"""The four hooks. Their docstrings are the plugin contract.

Hooks are called while an engine is assembled and never in a step. They return light specs; what
the engine then talks to are plain objects. A plugin is a module (its *window*, by custom
``<package>/plugin.py``) named by an entry point in group ``deepinfer.v1``::

    [project.entry-points."deepinfer.v1"]
    mychip = "deepinfer_backend_mychip.plugin"

What every window promises:

- It imports the standard library and ``deepinfer.api``, nothing heavier. It is imported on every
  machine where the plugin is installed, chosen or not.
- Importing it touches nothing: no device, environment variable, signal handler, logger,
  ``sys.modules`` entry of others, and no function of another library.
- Its functions carry ``@hookimpl``. A marked function with a name that is no hook, an argument
  that the hook does not have, and an unmarked function called ``deepinfer_...`` are errors of
  that plugin.

What core promises in return:

- An implementation may take fewer arguments than the hook offers; within one major version
  arguments are only added. A hook that retires warns for a minor release first.
- The distribution's requirement on ``deepinfer-core`` is compared before the window is imported;
  a plugin for another major (``deepinfer.v2``) is listed and never imported.
- A plugin that is broken and was not asked for costs one log warning. One that was asked for
  stops the start with its own traceback.
- The choice is made once; other processes get it by name, version and load path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pluggy

from deepinfer.api.specs import Spec

PROJECT: Final = "deepinfer"
hookspec: Final = pluggy.HookspecMarker(PROJECT)
hookimpl: Final = pluggy.HookimplMarker(PROJECT)


@hookspec
def deepinfer_provide(api: tuple[int, int]) -> Sequence[Spec]:
    """Return everything that this plugin sells; all plugins' answers are put together.

    Args:
        api: (major, minor) of the API that this core speaks. The major is the one of the group
            that the plugin registered in; a plugin may hold back specs that need a later minor.

    Called once per engine, on every machine where the plugin is installed, so it must be cheap
    and must not raise: say what cannot run here through ``Spec.probe``, not by leaving it out,
    so that ``deepinfer plugins list`` can show the reason. Two plugins that sell the same name
    of the same kind are refused, both named.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def deepinfer_choose(kind: str, candidates: Sequence[Spec], config: Any) -> Spec | None:
    """Pick one of several usable candidates of a kind; the first answer that is not None counts.

    Args:
        kind: ``Spec.kind`` of all candidates.
        candidates: usable ones only (their probe returned None), in order of name. When the
            configuration names one, only that one stands here: the user's word is final. For
            kind ``model``, those that read the checkpoint's architecture.
        config: the engine's configuration, to read.

    Return one of ``candidates`` by identity, or None to leave it to others. Core's own answer
    comes last: the highest priority; two equal ones are an error that names both. Most plugins
    need no such hook: a priority is enough.
    """
    raise NotImplementedError


@hookspec
def deepinfer_check(config: Any, chosen: Mapping[str, Spec]) -> Sequence[str]:
    """Return one sentence for each thing that cannot work as configured; all are shown together.

    Args:
        config: the engine's configuration, to read.
        chosen: kind -> the spec chosen for it (the first one, where a kind takes several).

    Called after the choice and before anything is loaded. Every plugin is asked, its own specs
    chosen or not: answer only for what is yours. Any sentence refuses the start, so use it for
    combinations that cannot be kept, never for advice. Capabilities need no hook: ``Spec.needs``
    and ``Spec.offers`` are compared by core.
    """
    raise NotImplementedError


@hookspec
def deepinfer_observers(config: Any) -> Sequence[object]:
    """Return objects that want to see steps and requests go by.

    Args:
        config: the engine's configuration, to read.

    Each object has the methods of ``deepinfer.api.observer`` that it cares for; the engine calls
    them directly, after a step, on its own thread. They must return quickly and not raise: one
    that raises is dropped with one log line, and the request goes on.
    """
    raise NotImplementedError
