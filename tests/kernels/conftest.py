from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> Iterator[None]:
    """Spare Triton's interpreter a third of its time.

    At each call of a function by a kernel it replaces the builtins of its language, and looks through all of
    the language to find them. Here their names are looked up once.
    """
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

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_builtin", patch_builtin)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Triton's interpreter computes with numpy, which warns where a device silently rounds to infinity."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(
                pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
            )
