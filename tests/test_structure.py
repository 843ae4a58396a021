"""The structure of the package: import arrows between rooms, class names, docstrings that stand alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeAlias

PACKAGE = Path(__file__).parents[1] / "src" / "hearth"

Documented: TypeAlias = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

#: Rooms that everything above them may import.
BASE = {"core", "system", "policy"}
EXECUTION = BASE | {"kernels", "models", "text"}
SERVING = EXECUTION | {"engine", "memory", "store", "snapshot"}

#: What each room, or file at the top of the package, may import of Hearth besides itself.
ARROWS: dict[str, set[str]] = {
    "core": set(),
    "system": {"core"},
    "policy": {"core"},
    "text": {"core"},
    "kernels": {"core", "system"},
    "models": {"core", "kernels"},
    "engine": EXECUTION,
    "memory": BASE | {"kernels", "models"},
    "store": BASE | {"models"},
    "snapshot": {"core", "system", "kernels"},
    "worker": SERVING - {"text"},
    "node": BASE | {"store"},
    "control": BASE | {"node", "snapshot", "store", "text"},
    "api": {"control", "core", "policy", "system", "text"},
    "sim": {"core", "policy", "snapshot"},
    "forecast": BASE,
    "inputs": {"core", "text"},
    "outputs": {"core"},
    "vllm_options": {"core"},
    "offline": SERVING | {"control"},
    "question": SERVING | {"outputs"},
    "llm": SERVING | {"inputs", "offline", "outputs", "question", "vllm_options"},
    "async_llm": SERVING | {"inputs", "llm", "outputs", "question"},
    "cli": SERVING | {"api", "control", "forecast", "llm", "node", "offline", "outputs", "sim"},
    "__init__": {"async_llm", "inputs", "llm", "outputs", "system"},
    "__main__": {"cli"},
}

#: Modules from outside that a room must do without; "*" is every room.
FORBIDDEN: dict[str, set[str]] = {
    "*": {"transformers"},
    "core": {"torch"},
    "policy": {"asyncio", "logging", "os", "random", "socket", "subprocess", "threading", "time", "torch"},
    "sim": {"asyncio", "logging", "os", "socket", "subprocess", "threading", "time", "torch"},
    "text": {"torch"},
}


def wrong_arrows(package: Path) -> list[str]:
    """One line per import that `ARROWS` or `FORBIDDEN` rule out, lazy ones inside functions included."""
    wrong = []
    for path in sorted(package.rglob("*.py")):
        room = path.relative_to(package).parts[0].removesuffix(".py")
        for line, module in imports(path, package):
            top, _, inside = module.partition(".")
            if top == "hearth":
                target = inside.split(".")[0] or "__init__"
                is_wrong = target not in ARROWS.get(room, set()) | {room}
            else:
                is_wrong = top in FORBIDDEN["*"] | FORBIDDEN.get(room, set())
            if is_wrong:
                wrong.append(f"{path.relative_to(package)}:{line} {room} -> {module}")
    return wrong


def imports(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute name of every module that the file imports."""
    parents = ["hearth", *path.relative_to(package).parts[:-1]]
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = parents[: len(parents) - node.level + 1] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            if (
                module == "hearth"
            ):  # `from hearth import policy` names a room, `import LLM` what __init__ offers
                names = [f"hearth.{alias.name}" if alias.name in ARROWS else "hearth" for alias in node.names]
                yield from ((node.lineno, name) for name in names)
            else:
                yield node.lineno, module


#: Words that refer to a noun elsewhere, so that no docstring can begin with one and be understood alone.
LEANING = {"It", "Its", "Of", "Them", "They", "Those", "What"}


def classes_defined_twice(package: Path) -> list[str]:
    """One line per class name that several files, or one file, define more than once."""
    places: dict[str, list[str]] = {}
    for path, node in definitions(package):
        if isinstance(node, ast.ClassDef):
            places.setdefault(node.name, []).append(f"{path}:{node.lineno}")
    return [f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1]


def leaning_docstrings(package: Path) -> list[str]:
    """One line per docstring that begins with a word of `LEANING`, unless it is a question."""
    leaning = []
    for path, node in definitions(package):
        first_line = (ast.get_docstring(node) or "").partition("\n")[0]
        words = first_line.replace(",", " ").split()
        if words and words[0] in LEANING and not first_line.endswith("?"):
            leaning.append(f"{path}:{getattr(node, 'lineno', 1)} {first_line}")
    return leaning


def definitions(package: Path) -> Iterator[tuple[Path, Documented]]:
    """Every module, class and function, with the path of its file."""
    for path in sorted(package.rglob("*.py")):
        for node in nodes(path):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield path.relative_to(package), node


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return the imports and definitions of a file, which several checks look at."""
    found = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [node for node in found if isinstance(node, ast.Import | ast.ImportFrom | Documented)]


def plant(package: Path, name: str, code: str) -> Path:
    path = package / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code, encoding="utf-8")
    return package


def test_every_import_follows_the_arrows() -> None:
    assert wrong_arrows(PACKAGE) == []


def test_every_room_has_its_arrows_written_down() -> None:
    rooms = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")}
    assert rooms <= ARROWS.keys()


def test_only_the_composition_roots_are_imported_by_nobody() -> None:
    importers = {room for room, targets in ARROWS.items() if targets & {"cli", "llm"}}
    assert importers == {"cli", "__init__", "__main__", "async_llm"}


def test_arrows_form_no_cycle() -> None:
    remaining = {room: set(targets) for room, targets in ARROWS.items()}
    while leaves := {room for room, targets in remaining.items() if not targets & remaining.keys()}:
        remaining = {room: targets for room, targets in remaining.items() if room not in leaves}
    assert remaining == {}


def test_the_check_catches_a_wrong_arrow(tmp_path: Path) -> None:
    plant(tmp_path, "policy/fleet/brain.py", "from hearth.engine.runner import Runner\n")
    assert wrong_arrows(tmp_path) == ["policy/fleet/brain.py:1 policy -> hearth.engine.runner"]


def test_the_check_sees_relative_room_and_lazy_imports(tmp_path: Path) -> None:
    plant(tmp_path, "kernels/norm.py", "from ..models import arch\nfrom . import jit\n")
    plant(tmp_path, "models/arch.py", "from hearth import engine, core\n")
    plant(tmp_path, "engine/runner.py", "def run():\n    from hearth import LLM\n    import hearth.cli\n")
    assert wrong_arrows(tmp_path) == [
        "engine/runner.py:2 engine -> hearth",
        "engine/runner.py:3 engine -> hearth.cli",
        "kernels/norm.py:1 kernels -> hearth.models",
        "models/arch.py:1 models -> hearth.engine",
    ]


def test_the_check_catches_effects_in_policy(tmp_path: Path) -> None:
    plant(
        tmp_path,
        "policy/batch/batcher.py",
        "import time\nimport torch.nn\nfrom os import path\nimport math\n",
    )
    assert wrong_arrows(tmp_path) == [
        "policy/batch/batcher.py:1 policy -> time",
        "policy/batch/batcher.py:2 policy -> torch.nn",
        "policy/batch/batcher.py:3 policy -> os",
    ]


def test_the_check_catches_a_clock_in_the_simulator(tmp_path: Path) -> None:
    plant(tmp_path, "sim/simulator.py", "import heapq\nimport random\nfrom time import monotonic\n")
    assert wrong_arrows(tmp_path) == ["sim/simulator.py:3 sim -> time"]


def test_the_check_catches_transformers_anywhere(tmp_path: Path) -> None:
    plant(tmp_path, "llm.py", "def load():\n    from transformers import AutoConfig\n")
    assert wrong_arrows(tmp_path) == ["llm.py:2 llm -> transformers"]


def test_a_room_without_arrows_may_import_nothing(tmp_path: Path) -> None:
    plant(tmp_path, "utils.py", "import hearth.core.types\n")
    assert wrong_arrows(tmp_path) == ["utils.py:1 utils -> hearth.core.types"]


def test_benchmarks_import_nothing_of_the_tests() -> None:
    bench = PACKAGE.parents[1] / "bench"
    found = [
        f"{path.relative_to(bench)}:{line} {module}"
        for path in sorted(bench.rglob("*.py"))
        for line, module in imports(path, bench)
        if module.split(".")[0] == "tests"
    ]
    assert found == []


def test_no_class_name_is_defined_twice() -> None:
    assert classes_defined_twice(PACKAGE) == []


def test_the_check_catches_a_class_name_of_two_rooms(tmp_path: Path) -> None:
    plant(tmp_path, "store/loader.py", "class Piece:\n    pass\n")
    plant(tmp_path, "text/transcript.py", "class Piece:\n    class Mark:\n        pass\n")
    assert classes_defined_twice(tmp_path) == ["Piece: store/loader.py:1, text/transcript.py:1"]


def test_every_docstring_stands_alone() -> None:
    assert leaning_docstrings(PACKAGE) == []


def test_the_check_catches_docstrings_that_lean_on_another_noun(tmp_path: Path) -> None:
    code = (
        'def size():\n    """Of the file, on these pages."""\n\n\nclass Item:\n    """Items have a size."""\n'
    )
    plant(tmp_path, "store/pages.py", f'"""What is asked?"""\n\n{code}')
    assert leaning_docstrings(tmp_path) == ["store/pages.py:3 Of the file, on these pages."]
