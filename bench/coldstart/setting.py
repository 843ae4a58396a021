"""Settings that the parts of `bench.coldstart` share: models, how large everything is, and services.

Measures nothing but the rate to the device, against which the rest is held.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from bench.llama7b import CONFIG
from bench.load.raw_readers import pinned, to_device_bytes_per_s
from bench.random_model import write_random
from bench.report import step
from bench.service.gpu import Asked, one
from bench.service.process import Service, deploy, serving
from bench.service.streams import Prompts

GIB = 1 << 30
PROMPT_TOKENS, NEW_TOKENS = 128, 16


def _sized(
    hidden: int, inner: int, layers: int, heads: int, vocab: int, **others: object
) -> dict[str, object]:
    return {
        **CONFIG,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": vocab,
        **others,
    }


_QWEN = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of everything; the defaults are those of the real benchmark."""

    #: Configurations by name. The first two differ in their weights alone.
    models: Mapping[str, Mapping[str, object]] = field(
        default_factory=lambda: {
            "m1": CONFIG,
            "m2": CONFIG,
            "0.5B": _sized(1024, 2816, 24, 16, 151936, **_QWEN, tie_word_embeddings=True),
            "4B": _sized(2560, 6912, 40, 20, 151936, **_QWEN),
            "13B": _sized(5120, 13824, 40, 40, 32000),
        }
    )
    dtype: str = "bfloat16"
    kind: str = "cuda"
    host_bytes: int = 41 * 10**9
    copied_bytes: int = 4 * GIB  #: to measure the rate to the device
    flags: tuple[str, ...] = ()
    num_starts: int = 2
    rest_s: float = 8.0  #: for all of host memory to be pinned, once nobody loads


_SMALL = _sized(32, 64, 1, 2, 512, max_position_embeddings=1024)
#: Runs through everything on a CPU; its numbers mean nothing.
TINY = Scale(
    models=dict.fromkeys(("m1", "m2", "0.5B", "4B", "13B"), _SMALL),
    dtype="float32",
    kind="cpu",
    host_bytes=GIB,
    copied_bytes=GIB // 16,
    flags=("--memory", "1GiB"),
    num_starts=1,
    rest_s=0.0,
)


@dataclass(frozen=True)  # no slots: what is measured once is kept
class Setting:
    scale: Scale
    place: Path  #: where models and the data directory are made
    names: list[str] = field(default_factory=list)  #: models that are deployed

    @property
    def data_dir(self) -> Path:
        return self.place / "data"

    @cached_property
    def bytes_per_s(self) -> float:
        """Return the rate from pinned memory to the device, in one copy."""
        num_bytes = self.scale.copied_bytes
        source = torch.frombuffer(pinned(num_bytes).memory(0, num_bytes), dtype=torch.uint8)
        return to_device_bytes_per_s(source, torch.device(self.scale.kind))

    @cached_property
    def is_warm(self) -> bool:
        """Return True when a service has served a model: what is compiled and cached once is."""
        self.have("m1")
        with step("a service that warms up the caches"), self.service() as service:
            self.ask(service, "m1")
        return True

    def have(self, *names: str) -> None:
        """Make and deploy models, unless they are."""
        device = torch.device(self.scale.kind)
        for name in names:
            if name not in self.names:
                with step(f"model {name}"):
                    seed, config = len(self.names), self.scale.models[name]
                    write_random(self.place / name, config, self.scale.dtype, seed, device)
                    deploy(self.data_dir, self.place / name, name)
                self.names.append(name)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # workers take all that is free

    def model_bytes(self, name: str) -> int:
        return (self.place / name / "weights.bin").stat().st_size

    @contextmanager
    def service(self) -> Iterator[Service]:
        """Run a service on one device, with all of its memory."""
        flags = ["--device", self.scale.kind, "--workers", "1", "--host-memory", str(self.scale.host_bytes)]
        with serving(self.data_dir, [*flags, *self.scale.flags]) as service:
            yield service

    def ask(self, service: Service, model: str) -> Asked:
        vocab_size = self.scale.models[model]["vocab_size"]
        assert isinstance(vocab_size, int)
        prompt = Prompts(vocab_size, PROMPT_TOKENS).take(1)[0]
        with asyncio.Runner() as runner:
            return runner.run(one(service, model, prompt, NEW_TOKENS))

    def rest(self) -> None:
        time.sleep(self.scale.rest_s)
