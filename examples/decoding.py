"""Decode and prefill steps of a served model over its `NSACache`. On a GPU they are CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch
from batch_scheduler import PREFILL_BATCH
from nsa_lm import LanguageModel
from torch import Tensor

from nsa_sel import NSACache


class Engine:
    """A model and the cache of its sequences.

    Args:
        model: the language model. On a GPU its weights are converted to bfloat16.
        device: for the model and the cache.
        pages, page_size, kv_dtype: of the cache.
    """

    def __init__(
        self, model: LanguageModel, device: torch.device, pages: int, page_size: int, kv_dtype: torch.dtype | None = None
    ) -> None:  # fmt: skip
        self.model, self.device, self.page_size = model.to(device).requires_grad_(False), device, page_size
        if device.type == "cuda":
            model.bfloat16()
        self.cache = NSACache.of([block.attention for block in model.blocks], pages, page_size, kv_dtype=kv_dtype)
        self.graphs: dict[tuple[int, int], StepGraph] = {}  # by sequences and rows, the smallest first

    def logits(self, sequences: list[int], texts: list[bytes]) -> Tensor:
        """Append bytes to sequences and compute the logits after the last one.

        Args:
            sequences: B ids of the cache.
            texts: the next bytes of each sequence, at least one.

        Returns:
            [B,256] float32 on the CPU.

        Raises:
            CacheFull: too few free pages; nothing has changed.
        """
        tokens, B = [len(text) for text in texts], len(texts)
        S = max(tokens)
        new = torch.frombuffer(bytearray(b"".join(text.rjust(S) for text in texts)), dtype=torch.uint8).view(B, S)  # right-aligned
        graph = next((graph for (size, rows), graph in self.graphs.items() if size >= B and rows >= S), None)
        if graph is not None:
            return graph.run(sequences, tokens, new).float().cpu()
        return self.forward(new.to(self.device), self.cache.step(sequences, tokens)).float().cpu()

    @torch.inference_mode()
    def forward(self, new: Tensor, step: Any) -> Tensor:
        """Return logits [B,256] after bytes [B,S]."""
        return self.model(new.long(), step)[:, -1]  # type: ignore[no-any-return]

    def warm_up(self, running: int, room: int, chunk: int) -> None:
        """Compile kernels. On a GPU, capture all steps of a scheduler: decoding of 1, 2, 4 ... `running` sequences, and
        prefill.

        Args:
            running: maximum number of sequences of a decode step.
            room: maximum bytes of a sequence.
            chunk: maximum bytes of a prefill step.
        """
        first = self.cache.open()
        self.logits([first], [bytes(chunk)])
        self.cache.free(first)
        if self.device.type == "cuda":
            decoding = [(min(1 << i, running), 1) for i in range(running.bit_length() + 1)]
            prefill = [(PREFILL_BATCH, max(1, chunk // PREFILL_BATCH)), (1, chunk)]
            self.graphs = {sizes: StepGraph(self, *sizes, room) for sizes in dict.fromkeys([*decoding, *prefill])}


class StepGraph:
    """A CUDA graph of a step of at most `size` sequences with `rows` new bytes each: one launch instead of hundreds."""

    EAGER = 2  # calls before the capture, in which kernels compile and the policy decides

    def __init__(self, engine: Engine, size: int, rows: int, room: int) -> None:
        self.cache, self.new = engine.cache, torch.zeros(size, rows, dtype=torch.uint8, device=engine.device)
        sequences = [self.cache.open() for _ in range(size)]
        self.step = self.cache.step(sequences, [rows] + [0] * (size - 1), room=room)
        stream, self.graph = torch.cuda.Stream(engine.device), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(self.EAGER):
                engine.forward(self.new, self.step)
            with torch.cuda.graph(self.graph, stream=stream):
                self.logits = engine.forward(self.new, self.step)
        torch.cuda.current_stream().wait_stream(stream)
        for sequence in sequences:
            self.cache.free(sequence)

    def run(self, sequences: list[int], tokens: list[int], new: Tensor) -> Tensor:
        """Return logits [B,256] after the last `tokens` bytes of each row of new [B,S] (CPU).

        The next call overwrites them.
        """
        self.cache.step(sequences, tokens, into=self.step)
        B, S = new.shape
        self.new[:B, -S:].copy_(new)
        self.graph.replay()
        return self.logits[:B]
