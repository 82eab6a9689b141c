"""The served example's engine: steps over a cache give the model's own logits, and captured ones those of plain steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_sel.errors import CacheFull
from tests.helpers.examples import load

model_file, decoding = load("nsa_lm"), load("decoding")
CPU = torch.device("cpu")


def model(scale: float = 6, **sizes: Any) -> Any:
    """An untrained model with weights made larger: every byte of a text matters to what follows."""
    torch.manual_seed(0)
    made = model_file.LanguageModel(replace(model_file.TINY, **sizes), "sdpa-packed" if not sizes else None)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(scale)
    return made


def texts(*lengths: int) -> list[bytes]:
    return [bytes(torch.randint(256, (length,)).tolist()) for length in lengths]


def alone(of: Any, text: bytes) -> Tensor:
    """Logits [256] after a text, without a cache."""
    with torch.no_grad():
        return of(torch.tensor([list(text)], device=of.head.weight.device))[0, -1].cpu()  # type: ignore[no-any-return]


def test_steps_over_the_cache_give_the_models_own_logits() -> None:
    """Chunks of mixed lengths, then single bytes; and what was put back is prefilled again in one piece."""
    of = model()
    engine = decoding.Engine(of, CPU, pages=16, page_size=16)
    whole = texts(70, 33, 2)
    sequences = [engine.cache.open() for _ in whole]
    for start, end in ((0, 40), (40, 69), (69, 70)):
        live = [(sequence, text[start:end]) for sequence, text in zip(sequences, whole, strict=True) if text[start:end]]
        found = engine.logits(*map(list, zip(*live, strict=True)))
        for row, (sequence, _) in enumerate(live):
            text = whole[sequences.index(sequence)][:end]
            torch.testing.assert_close(found[row], alone(of, text), atol=1e-4, rtol=1e-4)
    engine.cache.free(sequences[0])
    again = engine.logits([engine.cache.open()], whole[:1])
    torch.testing.assert_close(again[0], alone(of, whole[0]), atol=1e-4, rtol=1e-4)
    with pytest.raises(CacheFull):
        engine.logits([engine.cache.open()], [bytes(16 * 16)])


def test_a_cache_in_fp8_gives_nearly_the_models_logits() -> None:
    """The same in chunks, which attend to what is stored, too."""
    of, text = model(2), texts(70)[0]
    engine = decoding.Engine(of, CPU, 16, 16, torch.float8_e4m3fn)
    a, b = engine.cache.open(), engine.cache.open()
    whole = engine.logits([a], [text])[0]
    chunks = [engine.logits([b], [part])[0] for part in (text[:40], text[40:69], text[69:])]
    torch.testing.assert_close(chunks[-1], whole, atol=1e-3, rtol=1e-3)
    own = alone(of, text)
    assert 0 < float((whole - own).norm()) < 0.03 * float(own.norm())


def test_warming_up_leaves_the_cache_empty() -> None:
    engine = decoding.Engine(model(), CPU, pages=8, page_size=16)
    engine.warm_up(4, 128, 20)
    assert engine.cache.free_pages == 8
    assert engine.graphs == {}


@pytest.mark.gpu
def test_captured_steps_decode_as_plain_ones() -> None:
    """Of four sequences, and of the first three of them in the same graph; over a page's end, too."""
    of = model(2, groups=2, heads=4, head_dim=64, block=64, window=64, context=256)
    engine = decoding.Engine(of, torch.device("cuda"), pages=16, page_size=64)
    engine.warm_up(6, 256, 120)
    assert list(engine.graphs) == [(1, 1), (2, 1), (4, 1), (6, 1), (4, 30), (1, 120)]
    assert engine.cache.free_pages == 16
    prompts = texts(100, 62, 30, 2)
    sequences = [engine.cache.open() for _ in prompts]
    logits = torch.cat([engine.logits(sequences[:1], prompts[:1]), engine.logits(sequences[1:], [text[-30:] for text in prompts[1:]])])
    for row, text in zip(logits, (prompts[0], prompts[1][-30:], *prompts[2:]), strict=True):
        torch.testing.assert_close(row, alone(of, text).float(), atol=0.03, rtol=0.03)
    for _ in range(4):
        following = [bytes([int(row.argmax())]) for row in logits]
        first = engine.logits(sequences[:3], following[:3])
        cut(engine, sequences[:3])
        step = engine.cache.step(sequences, 1, room=256)
        plain = engine.forward(torch.tensor([list(byte) for byte in following], device="cuda"), step).float().cpu()
        cut(engine, sequences)
        logits = engine.logits(sequences, following)
        assert torch.equal(logits[:3], first)
        torch.testing.assert_close(logits, plain, atol=1e-2, rtol=1e-2)


def cut(engine: Any, sequences: list[int]) -> None:
    """Forget the last byte of each."""
    for sequence in sequences:
        engine.cache.truncate(sequence, engine.cache.length(sequence) - 1)
