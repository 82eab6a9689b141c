"""What was tried on the way to the kernels: predictions beside what came out, from the committed rows of the trials.

The rows are medians of whole calls, plans included, of one run each; in trials 10 and 11 what is not decoding, but for one head in 11,
are single kernels' times by torch's profiler. The code of a variant that lost is not kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tabulate import tabulate

Row = dict[str, Any]


class Trial(NamedTuple):
    """One idea: what it promised, what was learnt, and (trial, case, {label: variants whose times add up})."""

    prediction: str
    outcome: str
    trial: int
    case: str
    variants: dict[str, tuple[str, ...]]


TRIALS = (
    Trial(
        "keys of 192 columns as 128 + 64 save a quarter of the products with keys: tile forward",
        "more: two programs fit a multiprocessor",
        4,
        "random-32k-h16-192",
        {"padded to 256": ("tile fwd",), "128 + 64": ("split tile fwd L64 st2 w4",)},
    ),
    Trial(
        "the same, dQ by tiles, two stages",
        "a tenth",
        4,
        "random-32k-h16-192",
        {"padded": ("tile dq L32 w4 st2",), "128 + 64": ("split tile dq L32 w4 st2",)},
    ),
    Trial(
        "the same, dK and dV",
        "a third, and a larger step helps as much",
        4,
        "random-32k-h16-192",
        {
            "padded, 32 x 32": ("dkdv L32 r32 w4 st1",),
            "padded, 64 x 64": ("dkdv L64 r64 w4 st1",),
            "128 + 64": ("split dkdv L64 r64 w4 st1",),
        },
    ),
    Trial(
        "forced blocks by tiles, the others by blocks or rows, merged by log-sum-exp: forward, h 16",
        "no gain, before the merge is paid",
        4,
        "random-32k-h16",
        {"all by tiles": ("tile fwd",), "3 by tiles + 13 by rows": ("tile fwd forced 3", "group fwd other 13")},
    ),
    Trial(
        "the same, forward, h 4",
        "lost: shorter lists fill the steps of the 13 less well",
        4,
        "random-32k-h4",
        {"all by blocks": ("block fwd",), "3 by tiles + 13 by blocks": ("tile fwd forced 3", "block fwd other 13")},
    ),
    Trial(
        "the same, forward, h 1",
        "lost",
        4,
        "random-32k-h1",
        {"all by blocks": ("block fwd",), "3 by tiles + 13 by blocks": ("tile fwd forced 3", "block fwd other 13")},
    ),
    Trial(
        "the same, backward, h 4",
        "lost",
        4,
        "random-32k-h4",
        {"all by blocks": ("block bwd",), "3 by tiles + 13 by blocks": ("tile bwd forced 3", "block bwd other 13")},
    ),
    Trial(
        "sorting 256 entries at a time instead of 1024 makes the inverted lists cheaper",
        "right: 36 steps of the network instead of 55, and more programs",
        5,
        "random-32k-h4",
        {"1024": ("plan 1024 w8 2048",), "256": ("plan 256 w2 4096",)},
    ),
    Trial(
        "three programs a multiprocessor by steps of 32 keys: tile forward",
        "lost: products of 32 columns use the tensor cores badly",
        3,
        "real-8k-h16",
        {"64 keys": ("tile fwd L64 st3 mrNone",), "32 keys": ("tile fwd L32 st3 mrNone",)},
    ),
    Trial(
        "three programs a multiprocessor by 168 registers: block forward",
        "no gain",
        5,
        "random-32k-h4",
        {"free": ("block fwd",), "168": ("block fwd st1 mr168",)},
    ),
    Trial(
        "fewer register spills are faster: dK and dV with one stage instead of two",
        "wrong",
        2,
        "real-8k-h16",
        {"two stages": ("tile bwd dkdv st2",), "one": ("tile bwd dkdv st1",)},
    ),
    Trial(
        "eight warps share the accumulators of dK and dV",
        "lost: they wait together",
        2,
        "real-8k-h16",
        {"64 rows, 4 warps": ("tile bwd dkdv st2",), "128 rows, 8 warps": ("tile bwd dkdv r128 w8 st2",)},
    ),
    Trial(
        "sections of 2048 rows keep q and do in L2 for dK and dV",
        "lost: more parts to write",
        1,
        "real-8k-h16",
        {"all rows": ("tile bwd dkdv st2",), "2048": ("tile bwd section 2048",)},
    ),
    Trial(
        "wgmma in CUDA C++, a warp copies for two groups of 64 rows that share K and V: half the L2 traffic lets the tensor cores go on",
        "no faster",
        6,
        "real-8k-h16",
        {"triton-tile": ("triton-tile beside it",), "two groups": ("2 groups, q in shared memory",)},
    ),
    Trial(
        "three groups instead of two give the tensor cores more to choose from",
        "a little: level with triton-tile",
        6,
        "real-8k-h16",
        {
            "two": ("2 groups, q in shared memory",),
            "three": ("3 groups, q in shared memory",),
            "three, q and o by bulk copies": ("3 groups, q and o by bulk copies",),
        },
    ),
    Trial(
        "two blocks a step halve what is done once a step",
        "lost: fewer steps lie between a tile's first and last, which nothing overlaps",
        6,
        "real-8k-h16",
        {"64 keys": ("2 groups, q in shared memory",), "128 keys": ("2 groups, 128 keys a step",)},
    ),
    Trial(
        "the next step's logits before this softmax, in CUDA C++",
        "lost: the compiler serialises products that are under way across a branch, and a group must branch over blocks that it skips",
        6,
        "real-8k-h16",
        {"after": ("2 groups, q in registers",), "before": ("2 groups, next logits before this softmax",)},
    ),
    Trial(
        "leave one part out of the kernel of two groups, to see what holds it",
        "no single part does",
        6,
        "real-8k-h16",
        {
            "all": ("kernel alone",),
            "no exponentials": ("kernel alone without exponentials",),
            "no p v": ("kernel alone without p v",),
            "no copies": ("kernel alone without copies",),
            "no q k": ("kernel alone without q k",),
        },
    ),
    Trial(
        "cupy-cuda's tile forward: loose maxima, cut blocks apart, a warp that copies for three groups of warps",
        "right; more steps under way help, fewer groups or q in registers do not",
        7,
        "real-8k-h16",
        {
            "triton-tile": ("forward triton-tile, plan kept",),
            "three groups, 4 stages": ("forward 3 groups, o beside q, 4 stages",),
            "3 stages": ("forward 3 groups, 3 stages",),
            "o in q's place, 5 stages": ("forward 3 groups, o in q's place, 5 stages",),
            "two groups": ("forward 2 groups, 5 stages",),
            "two, q in registers": ("forward 2 groups, q in registers",),
            "three, q in registers": ("forward 3 groups, q in registers",),
        },
    ),
    Trial(
        "groups that a step passes by never look at it: the copying warp gives the stage back for them",
        "lost",
        7,
        "real-8k-h16",
        {
            "look at every step": ("forward 3 groups, o in q's place, 5 stages",),
            "pass by": ("forward groups pass steps by, o in q's place",),
        },
    ),
    Trial(
        "the same where tiles share least",
        "level",
        7,
        "random-32k-h16",
        {
            "look at every step": ("forward 3 groups, o in q's place, 5 stages",),
            "pass by": ("forward groups pass steps by, o in q's place",),
        },
    ),
    Trial(
        "few heads make bulk copies small: dk and dv by 16 bytes a lane, h 4",
        "right",
        7,
        "real-8k-h4",
        {"bulk": ("dkdv, bulk copies",), "16 bytes a lane": ("dkdv, 16 bytes a lane in quads",)},
    ),
    Trial(
        "the same, h 8",
        "lost",
        7,
        "real-8k-h8",
        {"bulk": ("dkdv, bulk copies",), "16 bytes a lane": ("dkdv, 16 bytes a lane in quads",)},
    ),
    Trial(
        "the same, h 16",
        "lost",
        7,
        "real-8k-h16",
        {"bulk": ("dkdv, bulk copies",), "16 bytes a lane": ("dkdv, 16 bytes a lane in quads",)},
    ),
    Trial(
        "the plan's sorting network in registers, of both passes",
        "right",
        7,
        "real-8k-h16",
        {"shared memory": ("both plans, loops over shared memory",), "registers": ("both plans, network in registers",)},
    ),
    Trial(
        "few rows: the parts of a row are read at once, not one after another, when they are joined; the same launch",
        "right",
        8,
        "decode-B1-64k-h16",
        {"one after another": ("before: pointers, L32 w2 st2, parts 32",), "at once": ("pointers, L32 w2 st2, parts 32",)},
    ),
    Trial(
        "16 rows: one program of 8 warps a multiprocessor instead of two of 2 warps",
        "right",
        8,
        "decode-B1-64k-h16-S4",
        {"two": ("pointers, L32 w2 st2, parts 16",), "one": ("pointers, L64 w8 st3, parts 8",)},
    ),
    Trial(
        "the same, 64 rows",
        "right; twice as many would be a little better",
        8,
        "decode-B16-32k-h16",
        {
            "two": ("pointers, L32 w2 st2, parts 4",),
            "one": ("pointers, L64 w8 st3, parts 2",),
            "two of 8 warps": ("pointers, L64 w8 st3, parts 4",),
        },
    ),
    Trial(
        "the same, 128 rows",
        "right: nothing is left to join",
        8,
        "decode-B32-32k-h16",
        {"two": ("pointers, L32 w2 st2, parts 2",), "one": ("pointers, L64 w8 st3, parts 1",)},
    ),
    Trial(
        "pages: where the next step's keys are is read a step ahead",
        "right",
        8,
        "decode-B64-32k-h16",
        {"in its step": ("table read in its step, pages of 64",), "a step ahead": ("table read a step ahead, pages of 64",)},
    ),
    Trial(
        "pages of 16: 32 keys a step through pointers instead of 16 by bulk copies",
        "right",
        8,
        "decode-B256-16k-h16",
        {
            "bulk copies": ("before: as launched, pages of 16",),
            "pointers": ("before: pointers, L32 w2 st3, parts 1, pages of 16",),
        },
    ),
    Trial(
        "few rows: a row's ranges are walked once, not once for how many keys they are and again for where",
        "right",
        9,
        "decode-B1-64k-h16",
        {"twice": ("walked twice",), "once": ("walked once",)},
    ),
    Trial(
        "pages of whole blocks: the table is read while the ranges are laid end to end, not behind that",
        "some of what a page costs",
        9,
        "decode-B1-64k-h16",
        {"behind": ("table behind the walk, pages of 64",), "beside": ("table with the walk, pages of 64",)},
    ),
    Trial(
        "the same for pages smaller than blocks, a page an entry of the walk",
        "lost: four times the entries, which each key looks through",
        9,
        "decode-B1-64k-h16",
        {"behind": ("table behind the walk, pages of 16",), "beside": ("table with the walk, a page an entry, pages of 16",)},
    ),
    Trial(
        "pages of 16: whole blocks through pointers, without a walk; two programs a multiprocessor",
        "right, with steps of 64 keys",
        9,
        "decode-B64-32k-h16",
        {
            "walk": ("ranges through pointers, L32 w2 st3, pages of 16",),
            "32 keys": ("blocks through pointers, L32 w2 st3, pages of 16",),
            "64 keys, 3 stages": ("blocks through pointers, L64 w4 st3, pages of 16",),
            "2 stages": ("blocks through pointers, L64 w4 st2, pages of 16",),
        },
    ),
    Trial(
        "the same, eight programs a multiprocessor",
        "two stages, of which more have room",
        9,
        "decode-B256-16k-h16",
        {
            "walk": ("ranges through pointers, L32 w2 st3, pages of 16",),
            "64 keys, 3 stages": ("blocks through pointers, L64 w4 st3, pages of 16",),
            "2 stages": ("blocks through pointers, L64 w4 st2, pages of 16",),
            "16 keys": ("blocks through pointers, L16 w1 st3, pages of 16",),
        },
    ),
    Trial(
        "CUDA tile forward: some multiprocessors end well before others, because turns are given beforehand",
        "right",
        10,
        "real-8k-h16",
        {
            "beforehand": ("forward, turns given beforehand",),
            "as they are asked for": ("forward, tiles as they are asked for",),
        },
    ),
    Trial(
        "the same with four heads, which are fewer tiles",
        "right; the last tiles are still long ones",
        10,
        "real-8k-h4",
        {
            "beforehand": ("forward, turns given beforehand",),
            "as they are asked for": ("forward, tiles as they are asked for",),
        },
    ),
    Trial(
        "so pairs of batch entry and group in turn where L2 holds them, and the next q copied while o is written, from registers",
        "right",
        10,
        "real-8k-h4",
        {
            "one after another, o through shared memory": ("forward, tiles as they are asked for",),
            "in turn": ("forward, and pairs in turn, o through shared memory",),
            "from registers, 4 bytes a lane": ("forward, o from registers, 4 bytes a lane",),
            "16 bytes a lane": ("forward, o from registers, 16 bytes a lane",),
        },
    ),
    Trial(
        "the same with 16 heads",
        "level; 4 bytes a lane lost: the stores take their time",
        10,
        "real-8k-h16",
        {
            "one after another, o through shared memory": ("forward, tiles as they are asked for",),
            "in turn": ("forward, and pairs in turn, o through shared memory",),
            "from registers, 4 bytes a lane": ("forward, o from registers, 4 bytes a lane",),
            "16 bytes a lane": ("forward, o from registers, 16 bytes a lane",),
        },
    ),
    Trial(
        "pairs in turn where they do not fit the L2 cache",
        "lost: not done there",
        10,
        "random-32k-h16",
        {
            "one after another": ("forward, tiles as they are asked for",),
            "in turn": ("forward, and pairs in turn, o through shared memory",),
        },
    ),
    Trial(
        "much of a group's time goes to finding its next step: look for it before the softmax, beside the products",
        "lost: a group that waits for a step computes no softmax",
        10,
        "random-32k-h16",
        {
            "after": ("forward, turns given beforehand",),
            "before": ("forward, next step looked for before the softmax",),
        },
    ),
    Trial(
        "then after the softmax, before p v is waited for",
        "lost: values are given back later",
        10,
        "real-8k-h16",
        {
            "in its turn": ("forward, next step looked for in its turn",),
            "earlier": ("forward, next step looked for after the softmax",),
        },
    ),
    Trial(
        "keys and values go round stages of their own, so that keys are given back a step earlier",
        "lost: two more waits and arrivals a step",
        10,
        "real-8k-h16",
        {
            "together": ("forward, keys and values share a stage",),
            "apart": ("forward, stages of their own",),
        },
    ),
    Trial(
        "a bit for each token and block instead of a sorting network: the plan of tiles",
        "right",
        10,
        "real-8k-h16",
        {
            "sorted": ("plan, sorted",),
            "bits": ("plan, bits",),
        },
    ),
    Trial(
        "CUDA decoding: a cluster's blocks read each other's results, no second kernel",
        "right; 8 blocks, which every Hopper GPU has, do",
        10,
        "decode-B1-64k-h16",
        {
            "a kernel": ("decode, parts joined by a kernel",),
            "clusters of 4": ("decode, clusters of 4",),
            "8": ("decode, clusters of 8",),
            "16": ("decode, clusters of 16",),
        },
    ),
    Trial(
        "more keys under way, or shorter programs: CUDA decoding of a batch",
        "lost: fewer blocks fit a multiprocessor",
        10,
        "decode-B64-32k-h16",
        {
            "2 stages": ("decode, clusters of 8",),
            "3 stages": ("decode, 3 stages",),
            "4 stages": ("decode, 4 stages",),
            "32 keys a tile": ("decode, 32 keys a tile",),
            "rows cut in two": ("decode, twice the parts",),
        },
    ),
    Trial(
        "what a kernel takes that only reads the selected blocks of a batch that decodes",
        "the aim of 34 us leaves one for all else",
        11,
        "decode-B64-32k-h16",
        {"16-byte loads": ("reading alone, 16-byte loads",), "bulk copies of 16 KiB": ("reading alone, bulk copies of 16 KiB",)},
    ),
    Trial(
        "the same of four times as many rows",
        "nine tenths of the 4.8 TB/s that the memory is sold with",
        11,
        "decode-B256-16k-h16",
        {"16-byte loads": ("reading alone, 16-byte loads",), "bulk copies of 16 KiB": ("reading alone, bulk copies of 16 KiB",)},
    ),
    Trial(
        "decoding a batch: one warp copies by bulk copies for four that compute, instead of each lane for itself",
        "a little",
        11,
        "decode-B256-16k-h16",
        {"each lane": ("decode by rows",), "one warp": ("blocks, joined at the end",)},
    ),
    Trial(
        "blocks of threads that stay; L2 fetches no more than it is asked for, and lets keys that are read once go first",
        "right: o is no longer written to memory in the midst of reading, is our guess",
        11,
        "decode-B256-16k-h16",
        {
            "staying, 256 bytes": ("blocks, staying, 256 bytes",),
            "128 bytes": ("blocks, staying, 128 bytes",),
            "first to go": ("blocks, staying, 128 bytes, first to go",),
            "first to go, not staying": ("blocks, 128 bytes, first to go, one row each",),
        },
    ),
    Trial(
        "warps share the columns of p v instead of the keys, so that nothing is joined at a row's end",
        "right, a little: the end of a row is short, each step has two barriers more",
        11,
        "decode-B64-32k-h16",
        {"keys": ("blocks, staying, 128 bytes, first to go",), "columns": ("blocks, columns shared",)},
    ),
    Trial(
        "the same kernel for text with one head a group",
        "right, and far from what shares blocks between rows",
        11,
        "real-8k-h1",
        {"16 bytes a lane": ("forward by rows",), "bulk copies": ("forward by blocks",)},
    ),
    Trial(
        "CUDA dk and dv: two blocks a multiprocessor instead of two groups of warps in one, which take turns and hand over in the end",
        "right: one begins and ends beside the other, and nothing is handed over",
        11,
        "real-8k-h16",
        {"two groups": ("dk and dv, two groups a block",), "two blocks": ("dk and dv, two blocks",)},
    ),
    Trial(
        "the same with four heads, whose rows come 16 bytes a lane",
        "a little: they wait for their rows",
        11,
        "real-8k-h4",
        {"two groups": ("dk and dv, two groups a block",), "two blocks": ("dk and dv, two blocks",)},
    ),
)


def trials_table(rows: list[Row]) -> str:
    """Predictions, outcomes and the milliseconds behind them."""
    times = {(int(row["trial"].split()[0]), row["case"], row["variant"]): row["ms_median"] for row in rows}
    lines = []
    for trial in TRIALS:
        sums = {label: sum(times[trial.trial, trial.case, name] for name in names) for label, names in trial.variants.items()}
        lines.append((trial.prediction, trial.case, ", ".join(f"{label} {ms:.3g}" for label, ms in sums.items()), trial.outcome))
    return tabulate(lines, headers=["prediction", "case", "ms", "outcome"], tablefmt="github", disable_numparse=True)
