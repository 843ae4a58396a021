"""Triton's interpreter at twice its speed. Changes nothing of what it computes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import FunctionType

import numpy as np
import pytest


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Spare Triton's interpreter more than half of its time.

    At each call of a function by a kernel it replaces the builtins of its language, which the kernel's launch
    has replaced, and looks through all of the language to find them; at each result it lists all types of
    numbers, and makes shape and type anew. Here all of it is done once. It also computes every sum and
    product of integers again in 64 bits, for an assertion that it leaves out afterwards, since its option
    `debug` is off.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":  # kernels run on a device
        yield
        return
    # Not at the top, for the interpreter must have been chosen when Triton is imported.
    from triton import language
    from triton.runtime import interpreter

    is_builtin = language.core.is_builtin

    @cache
    def builtin_names(package: object) -> list[str]:
        return [name for name in dir(package) if is_builtin(getattr(package, name, None))]

    def patch_builtin(package: object, builder: object, scope: object) -> None:
        for name in builtin_names(package):
            if is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    scope_of, patch_lang = interpreter._LangPatchScope, interpreter._patch_lang
    patched: set[object] = set()  #: parts of the language whose builtins are replaced now

    class Scope(scope_of):  # type: ignore[misc, valid-type] # Triton leaves it untyped
        def restore(self) -> None:
            super().restore()
            patched.clear()

    @cache
    def languages_of(function: FunctionType) -> set[object]:
        return {part for part in (language, language.core) if part in function.__globals__.values()}

    def patch_lang_once(function: FunctionType) -> object:
        if patched >= languages_of(function):
            return scope_of()  # what there is to restore is in that of the launch
        patched.update(languages_of(function))
        return patch_lang(function)

    np_dtype_of, np_dtypes = interpreter._get_np_dtype, {}

    def np_dtype(dtype: language.dtype) -> np.dtype:
        if (found := np_dtypes.get(dtype.name)) is None:
            found = np_dtypes[dtype.name] = np_dtype_of(dtype)
        return found

    init_tensor, init_block = language.core.tensor.__init__, language.core.block_type.__init__
    sizes_by_shape, block_by_shape = {}, {}

    def quick_init_tensor(self: language.tensor, handle: object, dtype: language.dtype) -> None:
        shape = tuple(dtype.shape.values) if dtype.is_block() else ()
        if (sizes := sizes_by_shape.get(shape)) is None:
            init_tensor(self, handle, dtype)
            sizes_by_shape[shape] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, dtype, dtype.scalar
            self.shape, self.numel = sizes

    def quick_init_block(self: language.block_type, element: language.dtype, shape: Sequence[int]) -> None:
        shape = shape.values if isinstance(shape, language.core.tuple) else shape
        key = (element.name, *shape) if {*map(type, shape)} == {int} else None
        if (block := block_by_shape.get(key)) is None:
            init_block(self, element, shape)
            if key is not None:
                block_by_shape[key] = self.shape, self.numel, self.name
        else:
            self.element_ty = element
            self.shape, self.numel, self.name = block

    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_LangPatchScope", Scope)
        patch.setattr(interpreter, "_patch_lang", patch_lang_once)
        patch.setattr(interpreter, "_patch_builtin", patch_builtin)
        patch.setattr(interpreter, "_get_np_dtype", np_dtype)
        patch.setattr(language.core.tensor, "__init__", quick_init_tensor)
        patch.setattr(language.core.block_type, "__init__", quick_init_block)
        patch.setattr(interpreter.interpreter_builder, "options", options)
        yield
