"""Files that a stranger has made: whatever they hold, what comes of it is a model or a plain error, soon and
in little memory."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hearth.core.errors import BadCheckpoint, HearthError
from hearth.models.layout import layout_of
from hearth.models.pack import checkpoint_dtype, iter_tensors
from hearth.store.format.convert import convert, open_source
from hearth.store.format.manifest import digest_of, parse_manifest
from hearth.text.tokenizer import Tokenizer
from tests.models.zoo import build
from tests.store.format.gguf_files import byte_level_metadata, sentence_piece_metadata, write_model

#: More than any of these tiny models takes to open, and far less than what a length in it may claim.
MAX_TRACED_BYTES = 32 << 20
NUM_EXAMPLES = 15
CORPUS = ["the quick brown fox jumps over the lazy dog", "a tokenizer of a few words"]

STRING, ARRAY, UINT8, UINT32 = 8, 9, 0, 4


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with everything that a model has, from which each test makes its own."""
    root = tmp_path_factory.mktemp("sound")
    gguf = write_model(
        root / "model.gguf", build("smollm2").model, changes=byte_level_metadata(CORPUS, "qwen2")
    )
    directory = root / "model"
    shutil.copytree(build("smollm2").directory, directory)
    with open_source(gguf) as source:
        for name, content in source.text_files().items():
            (directory / name).write_bytes(content)
    (directory / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return directory


def length(number: int) -> bytes:
    return struct.pack("<Q", number)


def string(content: bytes) -> bytes:
    return length(len(content)) + content


def gguf(fields: bytes = b"", *, num_fields: int = 1, tensors: bytes = b"", num_tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<I", 3) + length(num_tensors) + length(num_fields) + fields + tensors


def field(key: bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def array(kind: int, number: int, items: bytes = b"") -> bytes:
    return field(b"k", ARRAY, struct.pack("<I", kind) + length(number) + items)


def tensor(name: bytes, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return (
        string(name)
        + struct.pack("<I", len(dims))
        + b"".join(map(length, dims))
        + struct.pack("<I", kind)
        + length(offset)
    )


def of_tensors(*tensors: bytes) -> bytes:
    return gguf(num_fields=0, tensors=b"".join(tensors), num_tensors=len(tensors)) + bytes(256)


#: Files of a hundred bytes or so, and what is wrong with them.
GGUFS: dict[str, tuple[bytes, str]] = {
    "strings": (gguf(array(STRING, 2**40)), "too many items, limit: 4194304, with 'k': 1099511627776"),
    "numbers": (gguf(array(UINT8, 2**40)), "too many items"),
    "some-numbers": (gguf(array(UINT32, 2**20)), r"'k' goes to byte 4194\d+, but the file ends at 49"),
    "some-strings": (gguf(array(STRING, 2**20)), "'k' goes to byte 57, but the file ends at 49"),
    "string": (gguf(field(b"k", STRING, length(2**63))), "'k' goes to byte"),
    "big-endian": (
        b"GGUF" + struct.pack(">IQQQsIIQ", 3, 0, 1, 1, b"k", ARRAY, UINT8, 2**40),
        "it is big-endian; supported: little-endian",
    ),
    "nested": (gguf(array(ARRAY, 1, array(ARRAY, 1))), "array of arrays"),
    "fields": (
        gguf(num_fields=2**60),
        "too many fields of metadata, limit: 65536, given: 1152921504606846976",
    ),
    "tensors": (gguf(num_fields=0, num_tensors=2**60), "too many tensors"),
    "twice": (gguf(field(b"k", UINT8, b"1") * 2, num_fields=2), "the key 'k' twice"),
    "unknown-kind": (gguf(field(b"k", 77, b"1")), "'k' is of an unknown kind: 77"),
    "not-text": (gguf(field(b"\xff", UINT8, b"1")), "a key is not UTF-8"),
    "alignment": (gguf(field(b"general.alignment", UINT32, struct.pack("<I", 3))), "must be a power of two"),
    "dims": (of_tensors(tensor(b"t", [1] * 5)), "tensor 't' must have 1 to 4 dimensions, given: 5"),
    "no-dims": (of_tensors(tensor(b"t", [])), "must have 1 to 4 dimensions, given: 0"),
    "zero": (of_tensors(tensor(b"t", [0, 4])), "no dimension may be 0"),
    "overflow": (of_tensors(tensor(b"t", [2**32, 2**32])), "tensor 't' has shape .* but the file ends at"),
    "offset": (of_tensors(tensor(b"t", [4], offset=2**64 - 8)), "but the file ends at"),
    "block": (of_tensors(tensor(b"t", [31], kind=8)), "rows of 31 values; Q8_0 has blocks of 32"),
    "tensor-kind": (of_tensors(tensor(b"t", [4], kind=999)), "tensor 't' is of an unknown kind: 999"),
    "same-name": (of_tensors(tensor(b"t", [4]), tensor(b"t", [4], offset=32)), "the tensor 't' twice"),
    "overlap": (of_tensors(tensor(b"t", [8]), tensor(b"u", [8], offset=16)), "'t' and 'u' overlap"),
    "tensor-name": (of_tensors(tensor(b"\xff", [4])), "a tensor's name is not UTF-8"),
}


def safetensors(header: object, content: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return length(len(text)) + text + content


def stored(shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


#: What is wrong with a safetensors file; all but the lengths the library finds.
SAFETENSORS: dict[str, tuple[bytes, str]] = {
    "header": (length(2**60) + b"{}", "its header has 1152921504606846976 bytes, the rest of the file 2"),
    "large-header": (length(90 << 20) + bytes(90 << 20), "a header that is too large, limit: 16777216 bytes"),
    "overflow": (safetensors({"a": stored([2**40, 2**40], 0, 16)}, bytes(16)), "no safetensors file"),
    "negative": (safetensors({"a": stored([-4], 0, 16)}, bytes(16)), "no safetensors file"),
    "offset": (safetensors({"a": stored([4], 2**60, 2**60 + 16)}, bytes(16)), "no safetensors file"),
    "overlap": (
        safetensors({"a": stored([4], 0, 16), "b": stored([4], 8, 24)}, bytes(24)),
        "no safetensors file",
    ),
    "not-text": (length(10) + b'{"\xff": []}', "no safetensors file"),
    "deep": (length(90000) + b"[" * 90000, "no safetensors file"),
}


def called(function: Callable[..., object], *arguments: object) -> bytes:
    """A pickle that calls a function of those that torch lets it call."""

    class Call:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
            return function, arguments

    return pickle.dumps({"a": Call()}, protocol=2)


def doubled(times: int) -> bytes:
    """A pickle of a few bytes that hex-encodes a byte over and over, each time to twice as many."""
    encode = b"c_codecs\nencode\n"
    return b"\x80\x02}X\x01\x00\x00\x00a" + encode * times + b"U\x01x" + b"U\x03hex\x86R" * times + b"s."


def archive(content: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    file = BytesIO()
    with zipfile.ZipFile(file, "w", compression) as made:
        made.writestr("archive/data.pkl", content)
        made.writestr("archive/byteorder", "little")
        made.writestr("archive/version", "3\n")
    return file.getvalue()


def saved(content: object, *, is_old: bool = False) -> bytes:
    file = BytesIO()
    torch.save(content, file, _use_new_zipfile_serialization=not is_old)
    return file.getvalue()


PICKLES: dict[str, Callable[[], tuple[bytes, str]]] = {
    "bytearray": lambda: (archive(called(bytearray, 2**40)), "could run code: '.*bytearray'"),
    "doubling": lambda: (archive(doubled(40)), "could run code: '_codecs encode'"),
    "old": lambda: (called(bytearray, 2**40), "could run code: '.*bytearray'"),
    "bomb": lambda: (
        archive(bytes(1 << 28), zipfile.ZIP_DEFLATED),
        "data.pkl' is compressed, from 268435456",
    ),
    "large": lambda: (archive(b"]" * (3 << 20)), "its pickle is too large, limit: 2097152, given: 3145728"),
    "tuples": lambda: (
        archive(b"\x80\x02}" + b")" + b"\x85" * 1_000_000 + b"K\x01s."),
        "too many tuples, limit: 32768",
    ),
    "expanded": lambda: (
        saved({"a": torch.zeros(1).expand(2**20, 2**20)}),
        r"`a` has shape \[1048576, 1048576\] and 4398046511104 bytes, stored are 4",
    ),
    "meta": lambda: (saved({"a": torch.zeros(2**20, 2**20, device="meta")}), "could run code"),
    "sparse": lambda: (saved({"a": torch.zeros(4, 4).to_sparse()}), "could run code"),
    "number-as-name": lambda: (saved({1: torch.zeros(4)}), "must have texts as names, given: 1"),
}


def without(name: str) -> Callable[[Path], None]:
    return lambda model: (model / name).unlink()


def edited(name: str, **changes: object) -> Callable[[Path], None]:
    def edit(model: Path) -> None:
        path = model / name
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**content, **changes}))

    return edit


def written(name: str, content: bytes | str) -> Callable[[Path], None]:
    data = content.encode() if isinstance(content, str) else content
    return lambda model: (model / name).write_bytes(data) and None


def instead(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(model: Path) -> None:
        (model / name).unlink()
        make(model / name)

    return replace


def with_model(**changes: object) -> Callable[[Path], None]:
    """A tokenizer.json with fields of its `model` changed."""

    def edit(model: Path) -> None:
        content = json.loads((model / "tokenizer.json").read_text())
        content["model"] |= changes
        (model / "tokenizer.json").write_text(json.dumps(content))

    return edit


NONSENSE = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
UNKNOWN_TOKEN = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "X", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}

#: What is done to a sound directory, and what is then told.
DIRECTORIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "layers": (
        edited("config.json", num_hidden_layers=2**60),
        r"config\.json: `num_hidden_layers` must be at most 10000, given: 1152921504606846976",
    ),
    "types": (edited("config.json", layer_types=["full_attention"] * 9), "`layer_types` has 9 entries for 3"),
    "width": (edited("config.json", hidden_size=2**60), "`hidden_size` must be at most 2147483647"),
    "vocabulary": (edited("config.json", vocab_size=2**31 - 1), r"shape \[160, \d+\], config\.json says"),
    "negative": (edited("config.json", num_attention_heads=-4), "at least 1, given: -4"),
    "fraction": (edited("config.json", hidden_size=64.0), r"must be an integer of at least 1, given: 64\.0"),
    "true": (edited("config.json", num_hidden_layers=True), "must be an integer of at least 1, given: True"),
    "huge-number": (
        edited("config.json", rms_norm_eps=10**400),
        "`rms_norm_eps` must be a number from 1.2e-38",
    ),
    "nan": (
        edited("config.json", rms_norm_eps=float("nan")),
        "must be a number from 1.2e-38 to 3.4e[+]38, given: nan",
    ),
    "infinite": (
        edited("config.json", rms_norm_eps=float("inf")),
        "must be a number from 1.2e-38 to 3.4e[+]38, given: inf",
    ),
    "long-value": (edited("config.json", model_type="x" * 10**6), r"`model_type` is 'xxx.{0,200}; supported"),
    "slow-key": (edited("config.json", **{"expert_" * 30_000 + "\n": 8}), "mixtures of experts"),
    "digits": (written("config.json", '{"hidden_size": ' + "1" * 5000 + "}"), "is not valid JSON"),
    "deep": (written("config.json", '{"a":' * 90_000), "nested deeper than 64 levels"),
    "a-bit-deep": (written("config.json", "[" * 500 + "]" * 500), "nested deeper than 64 levels"),
    "many-lists": (
        written("config.json", "[" + "[]," * 3_000_000 + "[]]"),
        "too many objects and lists, limit",
    ),
    "large": (written("config.json", bytes(13 << 20)), r"config\.json` is too large, limit: 12582912 bytes"),
    "not-text": (written("config.json", b"\xff"), r"config\.json` cannot be read: it is not UTF-8"),
    "fifo": (instead("config.json", os.mkfifo), r"config\.json` is a directory, device or FIFO"),
    "directory": (instead("config.json", Path.mkdir), r"config\.json` is a directory, device or FIFO"),
    "zero": (
        instead("config.json", lambda path: path.symlink_to("/dev/zero")),
        r"config\.json` is a link to `/dev/zero`, outside of the model's directory",
    ),
    "loop": (instead("config.json", lambda path: path.symlink_to(path.name)), "Too many levels of symbolic"),
    "secret": (
        instead("chat_template.jinja", lambda path: path.symlink_to("/etc/hostname")),
        r"chat_template\.jinja` is a link to `/etc/hostname`, outside of the model's directory",
    ),
    "weights-fifo": (instead("model.safetensors", os.mkfifo), r"model\.safetensors` is a directory, device"),
    "weights-zero": (
        instead("model.safetensors", lambda path: path.symlink_to("/dev/zero")),
        r"model\.safetensors` is a directory, device or FIFO",
    ),
    "weights-gone": (
        instead("model.safetensors", lambda path: path.symlink_to("nowhere")),
        r"model\.safetensors` cannot be read: No such file",
    ),
    "token-id": (
        with_model(vocab={"a": 0, "b": 2**32 - 1}, merges=[]),
        r"tokenizer\.json has a token id that is too large, limit: 4194303, given: 4294967295",
    ),
    "tokenizer-depth": (
        written("tokenizer.json", '{"model":' + "[" * 90_000),
        "tokenizer.json cannot be read: recursion",
    ),
    "panic": (edited("tokenizer.json", normalizer=NONSENSE), r"tokenizer\.json cannot be read: Precompiled"),
    "late-panic": (
        edited("tokenizer.json", post_processor=UNKNOWN_TOKEN),
        r"tokenizer\.json is of no use: no entry found",
    ),
    "tokenizer-fifo": (instead("tokenizer.json", os.mkfifo), r"tokenizer\.json` is a directory, device"),
    "listed-id": (
        edited("tokenizer_config.json", added_tokens_decoder={"9" * 5000: {"content": "x"}}),
        r"must map ids up to 4194303 to objects .*found: '999.{0,300}$",
    ),
    "surrogate": (edited("tokenizer_config.json", eos_token="\ud800"), r"tokenizer\.json cannot be read"),
    "end-id": (
        edited("generation_config.json", eos_token_id=2**70),
        "`eos_token_id` in .* must be an id up to",
    ),
    "end-ids": (
        edited("generation_config.json", eos_token_id=[*range(1000)]),
        "or a list of at most 256 ids",
    ),
    "end-list": (edited("generation_config.json", eos_token_id=[[1]]), "or a list of at most 256 ids"),
    "template": (
        written("chat_template.jinja", "a" * (2 << 20)),
        r"chat_template\.jinja` is too large, limit: 1048576 bytes, given: 2097152",
    ),
    "named-template": (
        lambda model: (
            without("chat_template.jinja")(model),
            edited("tokenizer_config.json", chat_template="a" * (2 << 20))(model),
        )[0],
        "chat template `default` in .* is too large, limit: 1048576 characters",
    ),
}


def _made(sound: Path, root: Path) -> Iterator[tuple[Path, str]]:
    """Make every hostile model; yield its path and what must be told of it."""
    for name, (content, message) in GGUFS.items():
        path = root / f"{name}.gguf"
        path.write_bytes(content)
        yield path, f"{name}.gguf` .*{message}"
    for name, (content, message) in SAFETENSORS.items():
        directory = shutil.copytree(sound, root / f"safetensors-{name}")
        (directory / "model.safetensors").write_bytes(content)
        yield directory, rf"model\.safetensors` .*{message}"
    for name, make in PICKLES.items():
        directory = shutil.copytree(sound, root / f"pickle-{name}")
        (directory / "model.safetensors").unlink()
        content, message = make()
        (directory / "pytorch_model.bin").write_bytes(content)
        yield directory, rf"pytorch_model\.bin` cannot be read: .*{message}"
    for name, (damage, message) in DIRECTORIES.items():
        directory = shutil.copytree(sound, root / f"directory-{name}")
        damage(directory)
        yield directory, message


@pytest.mark.e2e
def test_hostile_models_are_refused_by_name_in_little_memory_and_time(sound: Path, tmp_path: Path) -> None:
    """All in one process, which takes seconds to start."""
    expected = {str(path): message for path, message in _made(sound, tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.store.limited_process", str(sound), *expected],
        stdout=subprocess.PIPE,
        env={**os.environ, "RUST_BACKTRACE": "0"},
        check=False,
        timeout=300,
    )

    outcomes = {path: (kind, message) for path, kind, message in map(json.loads, ended.stdout.splitlines())}
    wrong = {
        Path(path).name: outcomes.get(path, ("no outcome", str(ended.returncode)))
        for path, message in expected.items()
        if not _is_told(message, *outcomes.get(path, ("no outcome", "")))
    }
    assert not wrong, json.dumps(wrong, indent=1)


def _is_told(wanted: str, kind: str, message: str) -> bool:
    is_ours = kind in ("BadCheckpoint", "BadTokenizer", "UnsupportedModel")
    return is_ours and re.search(wanted, message, re.DOTALL) is not None and len(message) < 2000


def test_links_of_hugging_faces_cache_are_followed(sound: Path, tmp_path: Path) -> None:
    """A snapshot there consists of links to a directory of blobs."""
    cached = tmp_path / "models--org--name"
    snapshot = cached / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (cached / "blobs").mkdir()
    for file in sound.iterdir():
        shutil.copy(file, cached / "blobs" / f"hash-of-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/hash-of-{file.name}")

    manifest = convert(snapshot, tmp_path / "converted")

    assert {file.name for file in manifest.files} >= {"tokenizer.json", "chat_template.jinja"}


def test_weights_may_be_a_link_to_another_disk(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "elsewhere")
    (tmp_path / "model" / "model.safetensors").symlink_to(tmp_path / "elsewhere")

    manifest = convert(tmp_path / "model", tmp_path / "converted")

    assert manifest.num_bytes > 0


def test_a_tensor_in_two_files_is_refused(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "model")
    whole = tmp_path / "model" / "model.safetensors"
    shutil.copy(whole, whole.with_name("a.safetensors"))
    whole.rename(whole.with_name("b.safetensors"))
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    whole.with_name("model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(BadCheckpoint, match=r"names `a\.safetensors` and `b\.safetensors`, which both hold"):
        convert(tmp_path / "model", tmp_path / "converted")


def test_a_config_that_does_not_fit_its_weights_is_told_before_there_is_room_for_it(
    sound: Path, tmp_path: Path
) -> None:
    shutil.copytree(sound, tmp_path / "model")
    edited("config.json", intermediate_size=2**31 - 1)(tmp_path / "model")

    with pytest.raises(BadCheckpoint, match=r"has shape \[\d+, \d+\], config\.json says \[2147483647"):
        convert(tmp_path / "model", tmp_path / "converted")


# Random damage. Some tensors of an example are read: what can be opened must not break later.

EXTREMES = [0, 1, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**63 - 1, 2**63, 2**64 - 1]


@dataclass(frozen=True, slots=True)
class Cut:
    """Bytes at a place of a file that others take the place of."""

    place: float
    num_bytes: int
    others: bytes


def cuts() -> st.SearchStrategy[list[Cut]]:
    places = st.floats(0.0, 1.0)
    words = st.sampled_from(EXTREMES).map(length)
    return st.lists(
        st.one_of(
            st.builds(lambda place, word: Cut(place, 8, word), places, words),
            st.builds(lambda place, word: Cut(place, 4, word[:4]), places, words),
            st.builds(lambda place, others: Cut(place, len(others), others), places, st.binary(max_size=4)),
            st.builds(Cut, places, st.integers(0, 64), st.binary(max_size=16)),
            st.builds(lambda place: Cut(place, 1 << 30, b""), places),
        ),
        min_size=1,
        max_size=3,
    )


def damaged(data: bytes, damage: list[Cut], *, begin: int = 0, end: int | None = None) -> bytes:
    """Return the data, damaged from `begin` to `end`: in the header, where there is most to break."""
    for cut in damage:
        size = len(data) if end is None else min(end, len(data))
        at = begin + int(cut.place * max(0, size - begin))
        data = data[:at] + cut.others + data[at + cut.num_bytes :]
    return data


def read_all(path: Path) -> None:
    with open_source(path) as source:
        source.text_files()
        layout = layout_of(source.arch, checkpoint_dtype(source.checkpoint))
        for _ in islice(iter_tensors(source.checkpoint, source.arch, layout), 4):
            pass


def check(read: Callable[[], object]) -> None:
    """Have something read: it is right, or it is refused by an error of ours, in little memory."""
    message = ""
    tracemalloc.start()
    try:
        read()
    except HearthError as error:
        message = str(error)
    finally:
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert len(message) < 2000
    assert peak_bytes < MAX_TRACED_BYTES


@pytest.fixture(scope="module", params=["byte-level", "sentence-piece"])
def gguf_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    is_byte_level = request.param == "byte-level"
    texts = byte_level_metadata(CORPUS, "qwen2") if is_byte_level else sentence_piece_metadata(CORPUS)
    return write_model(tmp_path_factory.mktemp("gguf") / "model.gguf", build("smollm2").model, changes=texts)


@settings(max_examples=NUM_EXAMPLES)
@given(damage=cuts())
def test_a_damaged_gguf_file_is_read_or_refused(
    gguf_file: Path, tmp_path_factory: pytest.TempPathFactory, damage: list[Cut]
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    whole = gguf_file.read_bytes()
    path.write_bytes(damaged(whole, damage, end=whole.rindex(b"blk.2.") + 64))

    check(lambda: read_all(path))


@pytest.fixture(scope="module", params=["model.safetensors", "pytorch_model.bin", "old.bin"])
def weights(request: pytest.FixtureRequest, sound: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of weights in a directory of its own."""
    directory = tmp_path_factory.mktemp("weights") / "model"
    shutil.copytree(sound, directory)
    if request.param == "model.safetensors":
        return directory / "model.safetensors"
    (directory / "model.safetensors").unlink()
    path = directory / "pytorch_model.bin"
    tensors = dict(build("smollm2").model.named_parameters())
    path.write_bytes(saved(tensors, is_old=request.param == "old.bin"))
    return path


@settings(max_examples=NUM_EXAMPLES)
@given(damage=cuts(), is_at_the_end=st.booleans())
@example(damage=[Cut(0.09375, 2, b"\x00c")], is_at_the_end=False)  # makes a name with a backslash
def test_a_damaged_file_of_weights_is_read_or_refused(
    weights: Path, damage: list[Cut], is_at_the_end: bool
) -> None:
    """An archive has its directory at the end, all others a header."""
    whole = weights.read_bytes()
    begin = len(whole) - 4096 if is_at_the_end else 0
    weights.write_bytes(damaged(whole, damage, begin=begin, end=begin + 4096))
    try:
        check(lambda: read_all(weights.parent))
    finally:
        weights.write_bytes(whole)


WRONG_VALUES: list[object] = [
    *(None, True, False, -1, 0, 1, 3, 7, 2**31, 2**60, 2**64, 10**400, -(10**30), 0.5, -1.0, 1e308),
    *(float("nan"), float("inf"), "", "x", "x" * 5000, "\ud800", "../x", [], {}, [[]], {"a": {}}, [1, None]),
]


def nodes_of(value: object) -> Iterator[tuple[dict[str, object] | list[object], str | int]]:
    """Yield every place in a JSON value: its object or list, and the key there."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    for key in keys:
        yield value, key  # type: ignore[misc] # JSON is not typed
        yield from nodes_of(value[key])  # type: ignore[index] # JSON is not typed


Changes = list[tuple[float, object]]
changes = st.lists(st.tuples(st.floats(0.0, 1.0), st.sampled_from(WRONG_VALUES)), min_size=1, max_size=2)


def changed(content: object, wanted: Changes) -> object:
    """Return a JSON value with other values in some of its places."""
    content = json.loads(json.dumps(content))
    for place, value in wanted:
        nodes = list(nodes_of(content))
        if nodes:
            holder, key = nodes[int(place * (len(nodes) - 1))]
            holder[key] = deepcopy(value)  # type: ignore[index,call-overload] # JSON is not typed
    return content


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer_config.json", "generation_config.json", "tokenizer.json"]
)
@settings(max_examples=NUM_EXAMPLES)
@given(wanted=changes)
def test_a_json_file_with_other_values_is_read_or_refused(
    sound: Path, tmp_path_factory: pytest.TempPathFactory, name: str, wanted: Changes
) -> None:
    model = tmp_path_factory.getbasetemp() / f"changed-{name}"
    if not model.exists():
        shutil.copytree(sound, model)
    content = json.loads((sound / name).read_text())
    if name == "tokenizer.json":  # most of it is the vocabulary
        content["model"]["vocab"] = {**dict([*content["model"]["vocab"].items()][:300])}
        content["model"]["merges"] = []
    (model / name).write_text(json.dumps(changed(content, wanted)))

    check(lambda: read_all(model))
    check(lambda: Tokenizer.load(model).check())


@settings(max_examples=NUM_EXAMPLES)
@given(wanted=changes)
def test_a_manifest_with_other_values_is_read_or_refused(
    manifest: dict[str, object], wanted: Changes
) -> None:
    raw = changed(manifest, wanted)
    assert isinstance(raw, dict)
    canonical = json.dumps(raw, sort_keys=True, separators=(",", ":"))
    raw["digest"] = digest_of(canonical.encode())

    check(lambda: parse_manifest(json.dumps(raw), "here"))


@pytest.fixture(scope="module")
def manifest(sound: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    made = convert(sound, tmp_path_factory.mktemp("converted") / "model", chunk_bytes=64 << 10)
    raw: dict[str, object] = json.loads(made.to_json())
    del raw["digest"]
    return raw
