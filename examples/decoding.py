"""The steps of a served model over its `NSACache`: prefill as it comes, decoding on a GPU by CUDA graphs of a few batch sizes."""

from __future__ import annotations

from typing import Any

import torch
from nsa_lm import LanguageModel
from torch import Tensor

from nsa_sel import NSACache


class Engine:
    """A model, and the cache of its sequences.

    Args:
        model: see there; on a GPU its weights become bfloat16.
        device: for the model and the cache.
        pages, page_size: of the cache.
    """

    def __init__(self, model: LanguageModel, device: torch.device, pages: int, page_size: int) -> None:
        self.model, self.device, self.page_size = model.to(device).requires_grad_(False), device, page_size
        if device.type == "cuda":
            model.bfloat16()
        self.cache = NSACache.of([block.attention for block in model.blocks], pages, page_size)
        self.graphs: dict[int, DecodingGraph] = {}

    def logits(self, sequences: list[int], texts: list[bytes]) -> Tensor:
        """Read on.

        Args:
            sequences: B numbers of the cache.
            texts: their next bytes, at least one of each.

        Returns:
            [B,256] float32 on the CPU, after the last byte.

        Raises:
            CacheFull: pages are missing; nothing has changed.
        """
        tokens = [len(text) for text in texts]
        rows = bytearray(b"".join(text.rjust(max(tokens), b" ") for text in texts))  # new bytes are the last ones of a row
        new = torch.frombuffer(rows, dtype=torch.uint8).view(len(texts), -1)
        graph = next((graph for size, graph in self.graphs.items() if size >= len(texts)), None)  # the smallest that fits
        if graph is not None and max(tokens) == 1:
            return graph.run(sequences, new).float().cpu()
        return self.forward(new.to(self.device), self.cache.step(sequences, tokens)).float().cpu()

    @torch.inference_mode()
    def forward(self, new: Tensor, step: Any) -> Tensor:
        """[B,256] of bytes [B,S]."""
        return self.model(new.long(), step)[:, -1]  # type: ignore[no-any-return]

    def warm_up(self, running: int, room: int, chunk: int) -> None:
        """Compile what a prefill of `chunk` bytes needs; on a GPU capture decoding of 1, 2, 4 ... `running` sequences of `room` bytes."""
        first = self.cache.open()
        self.logits([first], [bytes(chunk)])
        self.cache.free(first)
        if self.device.type == "cuda":
            sizes = {min(1 << i, running) for i in range(running.bit_length() + 1)}
            self.graphs = {size: DecodingGraph(self, size, room) for size in sorted(sizes)}


class DecodingGraph:
    """A decoding step of at most `size` sequences as a CUDA graph: one launch by the host instead of a few hundred."""

    EAGER = 2  # calls in which kernels are compiled, and the policy decides

    def __init__(self, engine: Engine, size: int, room: int) -> None:
        self.cache, self.new = engine.cache, torch.zeros(size, 1, dtype=torch.uint8, device=engine.device)
        sequences = [self.cache.open() for _ in range(size)]
        self.step = self.cache.step(sequences, 1, room=room)
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

    def run(self, sequences: list[int], new: Tensor) -> Tensor:
        """Logits [B,256] of bytes new [B,1], on the CPU; the next call overwrites them."""
        self.cache.step(sequences, 1, into=self.step)
        self.new[: len(new)].copy_(new)
        self.graph.replay()
        return self.logits[: len(new)]
