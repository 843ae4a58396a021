"""Variants of kernels: what Triton compiles a kernel for, as text. Launches nothing.

Triton compiles a kernel once for each combination of its arguments' types and alignments, its constants and
the compiler's options. It can serialize such a combination, and compile or load it from that text later.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hearth.kernels.jit import hash_kernels, triton

#: Kernels are named by module, and only those of this package are ever imported for it.
_PACKAGE = "hearth.kernels."


@dataclass(frozen=True, slots=True)
class Variant:
    module: str
    kernel: str
    specialization: str  #: as Triton serializes it

    def compiled(self) -> Any:
        """Return Triton's compiled kernel, from its cache if there. Raises ValueError: there is none."""
        if not self.module.startswith(_PACKAGE):
            raise ValueError(f"`{self.module}` is not in {_PACKAGE}")
        try:
            # A kernel that this process has is kept: graphs may have captured it.
            return self._kernels().get(self._key()) or self._function().preload(self.specialization)
        except (ImportError, AttributeError, KeyError, RuntimeError) as error:
            raise ValueError(
                f"`{self.module}.{self.kernel}` cannot be compiled as recorded: {error!r}"
            ) from error

    def forget(self) -> None:
        """Have the next launch look for the kernel on disk again. It must not have been launched."""
        self._kernels().pop(self._key(), None)

    def _kernels(self) -> dict[str, Any]:
        kernels: dict[str, Any]  # private in Triton 3.6 to 3.9, which have no public way to ask
        kernels, *_ = self._function().device_caches[triton.runtime.driver.active.get_current_device()]
        return kernels

    def _function(self) -> Any:
        function = getattr(importlib.import_module(self.module), self.kernel)
        hash_kernels(self.module)
        return function

    def _key(self) -> Any:
        return json.loads(self.specialization)["key"]


def loaded_functions() -> dict[str, int]:
    """Return the driver's functions of Hearth's kernels on the current device, by the hash of the variant,
    which is the same in all processes with the same source, variant and compiler.
    """
    device = triton.runtime.driver.active.get_current_device()
    # Copied: other threads may import and compile meanwhile.
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(_PACKAGE)]
    found = {}
    for kernel in (member for module in modules for member in list(vars(module).values())):
        if isinstance(kernel, triton.runtime.JITFunction) and device in kernel.device_caches:
            compiled, *_ = kernel.device_caches[device]
            found.update(
                {one.hash: one.function for one in list(compiled.values()) if one.function is not None}
            )
    return found


@contextmanager
def recording() -> Iterator[set[Variant]]:
    """Collect the variants that launches over meta tensors need and this process lacks. Compiles none."""
    found: set[Variant] = set()

    def note(*, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        found.add(Variant(fn.module, fn.name, compile["specialization_data"]))
        return True  # do not compile

    runtime = triton.knobs.runtime
    before, runtime.jit_cache_hook = runtime.jit_cache_hook, note
    try:
        yield found
    finally:
        runtime.jit_cache_hook = before


class TargetDriver:
    """Replaces Triton's driver where kernels are compiled for a device that is not used."""

    def __init__(self, capability: int) -> None:
        self._capability = capability  #: as in 90 for 9.0

    def activate(self) -> None:
        triton.runtime.driver.set_active(self)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, warp_size=32)
