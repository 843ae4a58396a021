"""Formats logprobs as in OpenAI's API, and those of prompts as in vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hearth.control.requests.generation import TokenDelta
from hearth.core.types import PromptLogprobs, SamplingParams, TokenLogprob
from hearth.text.detokenizer import Detokenizer
from hearth.text.tokenizer import Tokenizer

#: Stands for minus infinity, which JSON lacks; as in OpenAI's API.
LEAST = -9999.0


def chat_logprobs(tokenizer: Tokenizer, deltas: Sequence[TokenDelta], num_echoed: int) -> object:
    return {"content": token_logprobs(tokenizer, deltas), "refusal": None}


def token_logprobs(tokenizer: Tokenizer, deltas: Sequence[TokenDelta]) -> list[object]:
    content: list[object] = []
    for delta in deltas:
        if delta.logprobs is not None:
            best = [_entry(tokenizer, one.token_id, one.logprob) for one in delta.logprobs.top]
            own = _entry(tokenizer, delta.token, delta.logprobs.logprob)
            content.append({**own, "top_logprobs": best})
    return content


def completion_logprobs(tokenizer: Tokenizer, deltas: Sequence[TokenDelta], num_echoed: int) -> object:
    return _columns(_output_rows(tokenizer, deltas, num_echoed))


def echoed_logprobs(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    scores: PromptLogprobs,
    sampling: SamplingParams,
    deltas: Sequence[TokenDelta],
    num_echoed: int,
) -> object:
    """`text_offset` never exceeds the echoed text, which may differ from the text of the prompt's tokens."""
    detokenizer = Detokenizer(tokenizer, sampling.skip_special_tokens)
    rows, num_chars, num_top = list[_ScoredToken](), 0, sampling.logprobs or 0
    for token, score in zip(prompt, (None, *scores), strict=True):
        name, offset = _name(tokenizer, token), min(num_chars, num_echoed)
        if score is None:
            rows.append(_ScoredToken(name, None, None, offset))
        else:
            best = _best(tokenizer, token, score.logprob, score.top[:num_top])
            rows.append(_ScoredToken(name, _bounded(score.logprob), best, offset))
        num_chars += len(detokenizer.push(token))
    return _columns(rows + _output_rows(tokenizer, deltas, num_echoed))


def prompt_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[int], scores: PromptLogprobs, num_top: int
) -> object:
    told: list[object] = [None]
    for token, score in zip(prompt[1:], scores, strict=True):
        own = {token: (score.logprob, score.rank)}
        ranked = {best.token_id: (best.logprob, rank) for rank, best in enumerate(score.top[:num_top], 1)}
        told.append(
            {
                str(one): {
                    "logprob": _bounded(logprob),
                    "rank": rank,
                    "decoded_token": tokenizer.token_bytes(one).decode("utf-8", "replace"),
                }
                for one, (logprob, rank) in (own | ranked | own).items()
            }
        )
    return told


@dataclass(frozen=True, slots=True)
class _ScoredToken:
    token: str
    logprob: float | None
    best: dict[str, float] | None
    offset: int


def _output_rows(tokenizer: Tokenizer, deltas: Sequence[TokenDelta], num_echoed: int) -> list[_ScoredToken]:
    return [
        _ScoredToken(
            _name(tokenizer, delta.token),
            _bounded(delta.logprobs.logprob),
            _best(tokenizer, delta.token, delta.logprobs.logprob, delta.logprobs.top),
            num_echoed + delta.offset,
        )
        for delta in deltas
        if delta.logprobs is not None
    ]


def _columns(rows: Sequence[_ScoredToken]) -> object:
    return {
        "tokens": [row.token for row in rows],
        "token_logprobs": [row.logprob for row in rows],
        "top_logprobs": [row.best for row in rows],
        "text_offset": [row.offset for row in rows],
    }


def _best(tokenizer: Tokenizer, token: int, logprob: float, top: Sequence[TokenLogprob]) -> dict[str, float]:
    best = {_name(tokenizer, one.token_id): _bounded(one.logprob) for one in top}
    return best | {_name(tokenizer, token): _bounded(logprob)}


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, object]:
    spelt = tokenizer.token_bytes(token)
    text = spelt.decode("utf-8", "replace")
    return {"token": text, "logprob": _bounded(logprob), "bytes": list(spelt)}


def _name(tokenizer: Tokenizer, token: int) -> str:
    """Return the token's text; incomplete characters as bytes, so that names are unique."""
    spelt = tokenizer.token_bytes(token)
    try:
        return spelt.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelt)


def _bounded(logprob: float) -> float:
    return max(logprob, LEAST)
