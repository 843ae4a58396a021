"""Reads small files of untrusted models: limited in size, and the model's own. Raises the caller's error."""

from __future__ import annotations

import json
import os
import reprlib
import stat
from pathlib import Path

from hearth.core.errors import ModelError

#: The largest JSON file besides tokenizer.json: the manifest of 1.5 TB. Python takes 13 times its memory.
MAX_JSON_BYTES = 12 << 20
#: The most objects and lists in a JSON file: an empty one takes 20 times the memory of its text.
MAX_JSON_NODES = 1 << 17
#: The deepest nesting of a JSON file: whatever goes through it by recursion gets to its end.
MAX_JSON_DEPTH = 64
#: The largest tokenizer.json: four times the largest that is known.
MAX_TOKENIZER_BYTES = 128 << 20
#: The largest chat template: twenty times the largest that is known.
MAX_TEMPLATE_BYTES = 1 << 20

_BRIEF = reprlib.Repr()
_BRIEF.maxlevel, _BRIEF.maxstring, _BRIEF.maxother, _BRIEF.maxlong = 2, 80, 80, 80


def brief(value: object) -> str:
    return _BRIEF.repr(value)[:200]


def read_bytes(path: Path, max_bytes: int, error: type[ModelError]) -> bytes:
    """Return a file's content. Raises `error` where it is none of the model's, and FileNotFoundError.

    A link may lead to the directory's own files, or to those of Hugging Face's cache, which is made of links.
    One that leads elsewhere would hand a file of this machine, of a stranger's choice, to the model's users.
    """
    target, directory = (Path(os.path.realpath(place)) for place in (path, path.parent))
    if not target.is_relative_to(directory) and not _is_cached(target):
        raise error(
            f"`{path}` is a link to `{target}`, outside of the model's directory; put the file itself there"
        )
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO is not waited for
    except (FileNotFoundError, NotADirectoryError) as failure:
        raise FileNotFoundError(failure.errno, failure.strerror, str(path)) from None
    except OSError as failure:
        raise error(f"`{path}` cannot be read: {failure.strerror}; check its permissions") from failure
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise error(f"`{path}` is a directory, device or FIFO; put a file there")
        if found.st_size > max_bytes:
            raise error(f"`{path}` is too large, limit: {max_bytes} bytes, given: {found.st_size}")
        with os.fdopen(file, "rb", closefd=False) as stream:
            return stream.read(found.st_size)
    except OSError as failure:
        raise error(f"`{path}` cannot be read: {failure.strerror}; check the disk") from failure
    finally:
        os.close(file)


def _is_cached(target: Path) -> bool:
    """True for a file of Hugging Face's cache: models--ORG--NAME/blobs/HASH."""
    blobs = target.parent
    return blobs.name == "blobs" and blobs.parent.name.startswith("models--")


def read_text(path: Path, max_bytes: int, error: type[ModelError]) -> str:
    content = read_bytes(path, max_bytes, error)
    try:
        return content.decode()
    except UnicodeDecodeError as failure:
        raise error(f"`{path}` cannot be read: it is not UTF-8: {failure}; fetch it again") from failure


def read_object(path: Path, error: type[ModelError]) -> dict[str, object]:
    content = parse_json(read_text(path, MAX_JSON_BYTES, error), f"`{path}`", error)
    if not isinstance(content, dict):
        raise error(f"`{path}` must hold a JSON object, given: {brief(content)}; fetch it again")
    return content


def parse_json(text: str, where: str, error: type[ModelError]) -> object:
    if len(text) > MAX_JSON_BYTES:
        raise error(f"{where} is too large, limit: {MAX_JSON_BYTES} characters, given: {len(text)}")
    num_nodes = text.count("[") + text.count("{")
    if num_nodes > MAX_JSON_NODES:
        raise error(f"{where} has too many objects and lists, limit: {MAX_JSON_NODES}, given: {num_nodes}")
    try:
        content: object = json.loads(text)
    except RecursionError:
        raise _too_deep(where, error) from None
    except ValueError as failure:
        raise error(f"{where} is not valid JSON: {failure}; fetch it again") from failure
    level = [content]
    for _ in range(MAX_JSON_DEPTH):
        level = [item for node in level for item in _items(node)]
        if not level:
            return content
    raise _too_deep(where, error)


def _items(node: object) -> list[object]:
    items = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [item for item in items if type(item) is dict or type(item) is list]  # as JSON has them


def _too_deep(where: str, error: type[ModelError]) -> ModelError:
    return error(
        f"{where} is not valid JSON: it is nested deeper than {MAX_JSON_DEPTH} levels; fetch it again"
    )
