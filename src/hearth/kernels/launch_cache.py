"""Compiled kernels by launch, so that a repeated launch skips Triton's own lookup. Compiles nothing.

Triton inspects every argument of every launch in Python, some 30 us; a step of a large model has hundreds of
launches. The key of a launch here is cheap and at least as fine as Triton's: two launches of one key run the
same compiled kernel. The first goes through Triton.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

#: The versions of Triton whose compiled kernels are called as here: `run` has no documented signature.
_OLDEST, _NEWEST = (3, 6), (3, 9)
#: Triton passes larger integers as another type.
_MAX_INT32 = 2**31 - 1

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Launchable:
    compiled: Any  #: kept, for Triton unloads a kernel with its last reference
    constants: tuple[object, ...]  #: the keyword arguments of a launch, in the order of the parameters
    get_stream: Any  #: of a device


class LaunchCache:
    def __init__(self, triton: Any) -> None:
        self._triton = triton
        self._hooks = triton.knobs.runtime
        self._launchables: dict[Hashable, _Launchable] = {}
        obstacle = launch_obstacle(triton.__version__)
        self._is_known = obstacle is None
        if obstacle is not None:
            log.warning("fallback launches=slow reason=`%s`", obstacle)

    def launch(self, key: Hashable, grid: Sequence[int], args: Sequence[Any]) -> bool:
        """Queue the kernel of `key`; False: it is not known. The first argument is a tensor."""
        found = self._launchables.get(key)
        # A profiler hooks into Triton's own launches.
        if found is None or self._hooks.launch_enter_hook.calls:
            return False
        compiled, stream = found.compiled, found.get_stream(args[0].get_device())
        width, height, depth = (*grid, 1, 1)[:3]
        compiled.run(
            width,
            height,
            depth,
            stream,
            compiled.function,
            compiled.packed_metadata,
            None,
            None,
            None,
            *args,
            *found.constants,
        )
        return True

    def remember(
        self, key: Hashable, kernel: Any, compiled: Any, num_args: int, options: Mapping[str, object]
    ) -> None:
        if compiled is None or not self._is_known:
            return
        names = kernel.arg_names[num_args:]
        if all(name in options for name in names):  # else one has a default, which only Triton knows
            get_stream = self._triton.runtime.driver.active.get_current_stream
            self._launchables[key] = _Launchable(compiled, tuple(options[name] for name in names), get_stream)


def launch_obstacle(version: str) -> str | None:
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if _OLDEST <= numbers <= _NEWEST:
        return None
    oldest, newest = (".".join(map(str, known)) for known in (_OLDEST, _NEWEST))
    return f"Triton {version} is not one of {oldest} to {newest}, whose way to launch kernels is known"


def launch_key(
    kernel: Any, args: Sequence[Any], options: Mapping[str, object], overlaps: bool
) -> tuple[object, ...]:
    """Return a key such that launches of one key are one variant to Triton, on one device."""
    # A kernel lives as long as its module, so its id is unique.
    parts: list[object] = [id(kernel), args[0].get_device(), overlaps, *options, *options.values()]
    for arg in args:
        if type(arg) is torch.Tensor:
            parts.append(arg.dtype)
            parts.append(arg.data_ptr() & 15 == 0)
        elif type(arg) is int:
            parts.append(arg > _MAX_INT32)
            parts.append("one" if arg == 1 else "aligned" if arg & 15 == 0 else "any")
        elif arg is None or type(arg) is float:
            parts.append(type(arg))
        else:  # a tensor descriptor
            parts.append((type(arg), arg.base.dtype, *arg.block_shape, arg.layout, arg.padding))
    return tuple(parts)
