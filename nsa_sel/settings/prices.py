"""Prices of work on a GPU that nobody measured: those of a measured GPU, each times what its resource costs here over there.

A price of a cost model (policies/cost.py) is the time of a unit of work on one resource of the GPU. Where data sheets say how fast that
resource is on both GPUs, the price carries over. Latency of launches and the host's time do not depend on the GPU.
"""

from __future__ import annotations

import msgspec

from nsa_sel.settings.schema import Costs

RESOURCES = {
    "dram": "bytes from device memory",
    "l2": "bytes from the L2 cache",
    "tensor": "operations of tensor cores",
    "issue": "instructions of all multiprocessors",
    "clock": "steps that one program takes in sequence",
}
# The resource of each term of COST_TERMS ("-wide" as without). Decoding reads keys from device memory; a prefill, whose rows share
# blocks, mostly from the L2 cache. Terms left out are launches.
OF_TERM = {
    "walk": "clock", "split-walk": "clock", "union": "clock",
    "pairs": "issue", "scores": "issue", "ranked": "issue",
    "rows": "dram", "distinct": "dram", "partials": "dram", "listed": "dram", "visited-partials": "dram",
    "few-read": "dram", "busy-read": "dram", "rows-read": "dram",
    "read": "l2", "reread": "l2", "gathered": "l2", "loaded": "l2",
    "tile": "tensor", "exact": "tensor", "visited": "tensor", "compressed": "tensor",
}  # fmt: skip
FROM_L2 = ("forward", "backward")  # phases of which "l2" holds


def resource_of(term: str, phase: str) -> str | None:
    """The resource that a term of a model of `phase` is the price of; None for launches."""
    found = OF_TERM.get(term.removesuffix("-wide"))
    return "dram" if found == "l2" and phase not in FROM_L2 else found


def carried_over(costs: Costs, factors: dict[str, float], tensor_ms: float, provenance: str) -> Costs:
    """The cost models of another GPU at the prices of this one.

    Args:
        costs: of the measured GPU.
        factors: by name of RESOURCES: the time of a unit of its work here over that there.
        tensor_ms: least ms of a TFLOP here. Where the other GPU's tensor cores were idle most of the time, no price tells of them.
        provenance: where the factors come from, in words.
    """
    models = {}
    for name, model in costs.models.items():
        phase = name.partition("/")[2]
        by_term = {term: factors.get(resource_of(term, phase) or "", 1.0) for term in model.terms}
        terms = {term: float(f"{price * by_term[term]:.4g}") for term, price in model.terms.items()}
        models[name] = msgspec.structs.replace(model, terms=terms)
    told = f"{provenance}; the other GPU's: {costs.provenance}"
    return msgspec.structs.replace(costs, models=models, tensor_ms=tensor_ms, provenance=told)
