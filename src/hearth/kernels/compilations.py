"""Counts and logs kernels that Triton compiles or loads while the steps of all models wait for them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from hearth.kernels.jit import HAS_TRITON, triton

#: True while the current thread prepares kernels that no step waits for.
_is_ahead: ContextVar[bool] = ContextVar("is_ahead", default=False)

log = logging.getLogger(__name__)


class Compilations:
    def __init__(self) -> None:
        self.num_ahead = 0  #: kernels that were compiled before a step needed them
        self.num_while_serving = 0  #: kernels that were compiled at a launch
        self.num_loads_while_serving = 0  #: kernels that were loaded from disk at a launch
        #: Several threads may compile at a time.
        self._lock = threading.Lock()

    def watch(self) -> None:
        if HAS_TRITON:
            triton.knobs.compilation.listener = self._note

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Count what the current thread compiles in this context as work that no step waits for."""
        token = _is_ahead.set(True)
        try:
            yield
        finally:
            _is_ahead.reset(token)

    def _note(self, *, src: Any, times: Any, cache_hit: bool, **_: object) -> None:
        is_ahead = _is_ahead.get()
        with self._lock:
            self.num_ahead += is_ahead and not cache_hit
            self.num_while_serving += not is_ahead and not cache_hit
            self.num_loads_while_serving += not is_ahead and cache_hit
        if not is_ahead:
            log.log(
                logging.INFO if cache_hit else logging.WARNING,
                "kernel_%s_while_serving kernel=%s seconds=%.3f variant=`%s`",
                "loaded" if cache_hit else "compiled",
                src.name,
                times.total / 1e6,
                _variant(src),
            )


def _variant(source: Any) -> str:
    constants = {source.fn.arg_names[at]: value for (at, *_), value in source.constants.items()}
    types = {name: kind for name, kind in source.signature.items() if name not in constants}
    return ", ".join(f"{name}={value}" for name, value in {**types, **constants}.items())


#: Triton has one listener per process.
COMPILATIONS = Compilations()
