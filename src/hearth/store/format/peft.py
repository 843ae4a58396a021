"""A directory of PEFT as the source of an adapter: its config, and which tensors are whose factors.

adapter_config.json                       what was trained, and how much it counts
adapter_model.safetensors, or .bin        the factors; which modules have some decides what is adapted

What cannot be served exactly is refused. Converts nothing.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hearth.core.errors import BadCheckpoint, SourceMissing, UnsupportedModel
from hearth.core.model_files import brief, read_object
from hearth.models.adapter import MAX_RANK
from hearth.models.adapter_pack import LoraModule, LoraModules
from hearth.models.layout import Shape
from hearth.models.pack import Checkpoint
from hearth.store.format.hf import read_checkpoint

CONFIG = "adapter_config.json"
SAFETENSORS, PICKLE = "adapter_model.safetensors", "adapter_model.bin"

_HARMLESS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "task_type",
        "peft_type",
        "peft_version",
        "lora_dropout",
        "layers_to_transform",
        "layers_pattern",
        "exclude_modules",
        "target_modules",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "velora_config",
        "megatron_core",
        "qalora_group_size",
        "runtime_config",
        "ensure_weight_tying",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "init_lora_weights",
        "bias",
    }
)
_REASONS = {
    "use_dora": "DoRA scales the weights of the base as well",
    "modules_to_save": "whole layers were trained beside the factors",
    "lora_bias": "its factors have biases",
    "fan_in_fan_out": "its weights are transposed",
    "trainable_token_indices": "embeddings of tokens were trained",
    "target_parameters": "it changes parameters that are no modules",
    "alora_invocation_tokens": "an activated LoRA changes only what follows certain tokens",
}
#: Ways to begin a training that change the base's weights: the factors fit no other.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")

_MERGE = "merge it into its base with PEFT's `merge_and_unload` and deploy that, or train it without"
_FACTOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<factor>[AB])(?:\.default)?\.weight")

#: The longest pattern of module names, and the most repetitions in it: a match tries their combinations.
MAX_PATTERN_CHARS, MAX_REPEATS = 1024, 4
_REPEAT = re.compile(r"[*+{]|(?<!\()\?")
#: The most patterns, and the most modules that they are tried on: several times those of the largest models.
MAX_PATTERNS, MAX_MODULES = 4096, 4096
MAX_NAME_CHARS = 512  #: of a tensor
#: The most ways, over all patterns and modules, to share out the longest name among a pattern's repetitions:
#: a second or so.
MAX_TRIES = 10**10
MAX_ALPHA = 1e6


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    checkpoint: Checkpoint
    modules: LoraModules
    base_name: str | None  #: what it was trained on, as its config has it


def open_peft(directory: Path) -> PeftAdapter:
    """Raises UnsupportedModel, SourceMissing, and BadCheckpoint for files that are missing or wrong."""
    path = directory / CONFIG
    try:
        config = _Config(path, read_object(path, BadCheckpoint))
    except FileNotFoundError:
        raise SourceMissing(
            f"no {CONFIG} in `{directory}`; an adapter is a directory that PEFT's `save_pretrained` wrote"
        ) from None
    config.check()
    checkpoint = read_checkpoint(directory, SAFETENSORS, PICKLE)
    factors = _factors(checkpoint)
    scales = config.scale_of({module: checkpoint[a].shape for module, (a, _) in factors.items()})
    modules = {module: LoraModule(a, b, scales[module]) for module, (a, b) in factors.items()}
    config.check_targets(modules)
    return PeftAdapter(checkpoint, modules, config.base_name)


def _factors(checkpoint: Checkpoint) -> dict[str, tuple[str, str]]:
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name in checkpoint:
        match = _FACTOR.fullmatch(name)
        if match is None:
            raise _unknown_tensor(name)
        if len(name) > MAX_NAME_CHARS:
            raise BadCheckpoint(
                f"the adapter holds `{name:.80}...`, whose name has {len(name)} characters, limit: "
                f"{MAX_NAME_CHARS}"
            )
        factors = found[match["module"]]
        if match["factor"] in factors:
            raise BadCheckpoint(f"the adapter has `{name:.120}` under two names; save it again")
        factors[match["factor"]] = name
    if not 1 <= len(found) <= MAX_MODULES:
        raise BadCheckpoint(
            f"an adapter must have factors for 1 to {MAX_MODULES} modules, given: {len(found)}; save it again"
        )
    for module, factors in found.items():
        if missing := {"A", "B"} - factors.keys():
            raise BadCheckpoint(
                f"the adapter has no `lora_{missing.pop()}` for `{module:.120}`; save or fetch it again"
            )
    return {module: (factors["A"], factors["B"]) for module, factors in found.items()}


def _unknown_tensor(name: str) -> UnsupportedModel:
    if "lora_embedding_" in name:
        reason = "it adapts an embedding"
    elif "lora_magnitude_vector" in name:
        reason = _REASONS["use_dora"]
    elif name.endswith(".bias"):
        reason = _REASONS["lora_bias"]
    else:
        reason = _REASONS["modules_to_save"]
    return UnsupportedModel(f"the adapter holds `{name:.120}`: {reason}, which is not supported; {_MERGE}")


@dataclass(frozen=True, slots=True)
class _Config:
    path: Path
    fields: Mapping[str, object]

    @property
    def base_name(self) -> str | None:
        name = self.fields.get("base_model_name_or_path")
        return name if isinstance(name, str) and name else None

    def check(self) -> None:
        if (kind := self.fields.get("peft_type")) != "LORA":
            raise UnsupportedModel(
                f"`{self.path}` has `peft_type` {brief(kind)}; supported: 'LORA', also with `use_rslora`"
            )
        if (bias := self.fields.get("bias", "none")) != "none":
            raise UnsupportedModel(
                f"`{self.path}` has `bias` {brief(bias)}, so the base's biases were trained; {_MERGE}"
            )
        begun = self.fields.get("init_lora_weights")
        if isinstance(begun, str) and begun.lower().startswith(_CHANGED_BASE):
            raise UnsupportedModel(
                f"`{self.path}` has `init_lora_weights` {brief(begun)}, which changes the base; save it with "
                "PEFT's `path_initial_model_for_weight_conversion`, or merge it"
            )
        for name, value in self.fields.items():
            if name not in _HARMLESS and value not in (None, False, [], {}, "", 0):
                reason = _REASONS.get(name, "nothing is known of it")
                raise UnsupportedModel(
                    f"`{self.path}` has `{name:.80}`, given: {brief(value)}: {reason}, which is not "
                    f"supported; {_MERGE}"
                )

    def check_targets(self, modules: Iterable[str]) -> None:
        targets = self.fields.get("target_modules")
        if not isinstance(targets, list):  # an untrusted pattern is not run; the factors say it all
            return
        named = tuple(f".{target}" for target in targets if isinstance(target, str))
        for module in modules:
            if not f".{module}".endswith(named):
                raise BadCheckpoint(
                    f"the adapter has factors for `{module:.120}`, which `target_modules` of `{self.path}` "
                    f"does not name: {brief(targets)}; save it again"
                )

    def scale_of(self, shapes: Mapping[str, Shape]) -> dict[str, float]:
        ranks = self._by_pattern("rank_pattern", self.fields.get("r", 8), shapes)
        alphas = self._by_pattern("alpha_pattern", self.fields.get("lora_alpha", 8), shapes)
        return {
            module: self._scale(module, shape, ranks.of(module), alphas.of(module))
            for module, shape in shapes.items()
        }

    def _scale(self, module: str, shape: Shape, rank: object, alpha: object) -> float:
        if type(rank) is not int or not 1 <= rank <= MAX_RANK:
            raise BadCheckpoint(
                f"a rank in `{self.path}` must be a whole number from 1 to {MAX_RANK}, given: {brief(rank)}; "
                "merge the adapter into its base with PEFT's `merge_and_unload`, and deploy that"
            )
        if not shape or shape[0] != rank:
            raise BadCheckpoint(
                f"the factors of `{module:.120}` have rank {shape[0] if shape else 0}, `{self.path}` says "
                f"{rank}; save the adapter again"
            )
        if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) <= MAX_ALPHA:
            raise BadCheckpoint(
                f"an alpha in `{self.path}` must be from {-MAX_ALPHA:g} to {MAX_ALPHA:g}, given: "
                f"{brief(alpha)}; save the adapter again"
            )
        return alpha / (math.sqrt(rank) if self.fields.get("use_rslora") else rank)

    def _by_pattern(self, name: str, otherwise: object, modules: Collection[str]) -> _ByPattern:
        patterns = self.fields.get(name) or {}
        if not isinstance(patterns, dict) or len(patterns) > MAX_PATTERNS:
            raise BadCheckpoint(
                f"`{name}` of `{self.path}` must be an object of up to {MAX_PATTERNS} patterns, given: "
                f"{brief(patterns)}"
            )
        longest = max(map(len, modules))
        num_tries = len(modules) * sum(longest ** (1 + len(_REPEAT.findall(one))) for one in patterns)
        if num_tries > MAX_TRIES:
            raise BadCheckpoint(
                f"`{name}` of `{self.path}` is too costly to try on {len(modules)} modules, whose names have "
                f"up to {longest} characters: {brief(patterns)}; write the names of modules instead"
            )
        compiled = [(self._compiled(name, pattern), value) for pattern, value in patterns.items()]
        return _ByPattern(tuple(compiled), otherwise)

    def _compiled(self, name: str, pattern: str) -> re.Pattern[str]:
        """Return a pattern that cannot keep the machine busy: one that repeats what repeats is refused."""
        num_repeats = len(_REPEAT.findall(pattern))
        if len(pattern) > MAX_PATTERN_CHARS or num_repeats > MAX_REPEATS or re.search(r"\)[*+{]", pattern):
            raise BadCheckpoint(
                f"`{name}` of `{self.path}` has a pattern that is too costly to try: {brief(pattern)}; "
                f"limits: {MAX_PATTERN_CHARS} characters, {MAX_REPEATS} repetitions, none of a group; write "
                "the names of modules instead"
            )
        try:
            return re.compile(rf"(.*\.)?({pattern})$")
        except (re.error, RecursionError, OverflowError) as error:
            raise BadCheckpoint(
                f"`{name}` of `{self.path}` has a pattern that is none: {brief(pattern)}: {error}"
            ) from error


@dataclass(frozen=True, slots=True)
class _ByPattern:
    patterns: tuple[tuple[re.Pattern[str], object], ...]
    otherwise: object

    def of(self, module: str) -> object:
        """Return the value of the first pattern that a module's name ends with, as PEFT finds it."""
        found = (value for pattern, value in self.patterns if pattern.match(module))
        return next(found, self.otherwise)
