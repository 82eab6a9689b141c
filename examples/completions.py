"""Completions of text by a byte-level model: what is asked for, by OpenAI's fields, and how a byte is sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from nsa_sel.errors import ArgumentError


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """JSON of a request, with OpenAI's names and defaults.

    `model` and `user` change nothing, and the fields after them are taken with the value that changes nothing. Others are refused.
    """

    prompt: str
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] = 16
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 1.0
    stream: bool = False
    stop: str | list[str] | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] | None = None
    model: str | None = None
    user: str | None = None
    n: Literal[1] = 1
    best_of: Literal[1] = 1
    top_p: Annotated[float, msgspec.Meta(ge=1, le=1)] = 1.0
    presence_penalty: Annotated[float, msgspec.Meta(ge=0, le=0)] = 0.0
    frequency_penalty: Annotated[float, msgspec.Meta(ge=0, le=0)] = 0.0
    logprobs: None = None
    suffix: None = None

    def stop_bytes(self) -> bytes:
        """The bytes that end a completion. Raises ArgumentError for text of other lengths."""
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        for text in texts:
            if len(text.encode()) != 1:
                raise ArgumentError("stop", repr(text), "characters of one byte", "leave it out, and cut the completion yourself")
        return "".join(texts).encode()


class Finished(NamedTuple):
    """The end of a completion: "stop" after a stop byte, "length" after max_tokens, or "error" with its message."""

    reason: str
    message: str = ""


@dataclass(eq=False)
class Request:
    """A completion that a scheduler works on.

    Args:
        prompt: at least one byte.
        max_tokens: bytes of the completion, at most.
        emit: gets every byte, and at last a Finished, from the scheduler's thread.
        temperature: 0 for the likeliest byte.
        seed: of the sampling; None for another one every time.
        stop: any of these bytes ends the completion, and is left out.
    """

    prompt: bytes
    max_tokens: int
    emit: Callable[[int | Finished], None]
    temperature: float = 0.0
    seed: int | None = None
    stop: bytes = b""
    text: bytearray = field(init=False)  # the prompt, and what was generated
    sequence: Any = field(init=False, default=None)  # the cache's, while it runs
    started: bool = field(init=False, default=False)
    canceled: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.text = bytearray(self.prompt)
        self.random = torch.Generator()
        if self.seed is None:
            self.random.seed()
        else:
            self.random.manual_seed(self.seed)

    def sample(self, logits: Tensor) -> int:
        """A byte, by logits [256] float32 on the CPU."""
        if self.temperature == 0:
            return int(logits.argmax())
        below = (logits - logits.max()).double() / self.temperature  # 0 at most: however low the temperature, nothing becomes NaN
        return int(torch.multinomial(below.softmax(-1), 1, generator=self.random))
