"""Logprobs in the forms that OpenAI's API has for them. Computes none."""

from __future__ import annotations

from collections.abc import Sequence

from hearth.control.generation import TokenDelta
from hearth.text.tokenizer import Tokenizer
from hearth.types import TokenLogprobs

#: Stands for minus infinity, which JSON cannot spell; OpenAI does the same.
LEAST = -9999.0


def chat_logprobs(tokenizer: Tokenizer, deltas: Sequence[TokenDelta], num_echoed: int) -> object:
    """Return the logprobs of tokens as chat has them; it echoes nothing, unlike `completion_logprobs`."""
    return {"content": token_logprobs(tokenizer, deltas), "refusal": None}


def token_logprobs(tokenizer: Tokenizer, deltas: Sequence[TokenDelta]) -> list[object]:
    """Return an object per token, as chat and responses have them."""
    content: list[object] = []
    for delta in deltas:
        if delta.logprobs is not None:
            best = [_entry(tokenizer, one.token_id, one.logprob) for one in delta.logprobs.top]
            own = _entry(tokenizer, delta.token, delta.logprobs.logprob)
            content.append({**own, "top_logprobs": best})
    return content


def completion_logprobs(tokenizer: Tokenizer, deltas: Sequence[TokenDelta], num_echoed: int) -> object:
    """Return the logprobs of tokens as completions have them, behind a prompt of `num_echoed` characters."""
    tokens: list[str] = []
    own: list[float] = []
    best: list[dict[str, float]] = []
    offsets: list[int] = []
    for delta in deltas:
        if delta.logprobs is not None:
            tokens.append(_name(tokenizer, delta.token))
            own.append(_bounded(delta.logprobs.logprob))
            best.append(_best(tokenizer, delta.token, delta.logprobs))
            offsets.append(num_echoed + delta.offset)
    return {"tokens": tokens, "token_logprobs": own, "top_logprobs": best, "text_offset": offsets}


def _best(tokenizer: Tokenizer, token: int, logprobs: TokenLogprobs) -> dict[str, float]:
    """Return the most likely tokens, and the chosen one if it is not among them."""
    best = {_name(tokenizer, one.token_id): _bounded(one.logprob) for one in logprobs.top}
    return best | {_name(tokenizer, token): _bounded(logprobs.logprob)}


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, object]:
    spelt = tokenizer.token_bytes(token)
    text = spelt.decode("utf-8", "replace")
    return {"token": text, "logprob": _bounded(logprob), "bytes": list(spelt)}


def _name(tokenizer: Tokenizer, token: int) -> str:
    """Return the token's text; half a character is spelt in bytes, so that no two tokens have one name."""
    spelt = tokenizer.token_bytes(token)
    try:
        return spelt.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelt)


def _bounded(logprob: float) -> float:
    return max(logprob, LEAST)
