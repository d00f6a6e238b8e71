# ruff: noqa: N803 (constants of Triton kernels are in capitals)
"""What `step_ideas.py` tries in place of torch's own: kernels, each beside a reference.

Attention over one class token and a whole number of patch tiles (257 = 1 + 256), read from the
product that makes queries, keys and values and written as the gradient of that product, so nothing
is copied in between. The class token never enters a tile: as a key it is where each softmax starts,
as a query it is a row that one more program computes without the matrix units.
"""

from __future__ import annotations

import ctypes
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _class_query(
    queries, keys, values, into, lse, scale,
    step: tl.constexpr, PATCHES: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, D)
    k0 = tl.load(keys + cols).to(tl.float32)
    v0 = tl.load(values + cols).to(tl.float32)
    q0 = tl.load(queries + cols).to(tl.float32) * (scale * LOG2E)
    s0 = tl.sum(q0 * k0, 0)
    everywhere = (1 + tl.arange(0, PATCHES))[:, None] * step + cols[None, :]
    s = tl.sum(tl.load(keys + everywhere).to(tl.float32) * q0[None, :], 1)
    most = tl.maximum(s0, tl.max(s, 0))
    p0 = tl.exp2(s0 - most)
    p = tl.exp2(s - most)
    total = p0 + tl.sum(p, 0)
    v = tl.load(values + everywhere).to(tl.float32)
    result = (tl.sum(v * p[:, None], 0) + p0 * v0) / total
    tl.store(into + cols, result.to(into.dtype.element_ty))
    tl.store(lse, most + tl.log2(total))


@triton.jit
def _attend(
    qkv, out, lse, scale,
    HEADS: tl.constexpr, PATCHES: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    tile, pair = tl.program_id(0), tl.program_id(1)
    image, head = pair // HEADS, pair % HEADS
    step: tl.constexpr = 3 * HEADS * D
    first = image * (PATCHES + 1)
    queries = qkv + first * step + head * D
    keys, values = queries + HEADS * D, queries + 2 * HEADS * D
    into = out + first * HEADS * D + head * D
    lse += pair * (PATCHES + 1)
    cols = tl.arange(0, D)
    k0 = tl.load(keys + cols).to(tl.float32)
    v0 = tl.load(values + cols).to(tl.float32)
    if tile < PATCHES // BM:
        rows = 1 + tile * BM + tl.arange(0, BM)
        q = tl.load(queries + rows[:, None] * step + cols[None, :])
        most = tl.sum(q.to(tl.float32) * k0[None, :], 1) * (scale * LOG2E)
        total = tl.full([BM], 1.0, tl.float32)
        acc = tl.zeros([BM, D], tl.float32) + v0[None, :]
        for start in range(0, PATCHES, BN):
            there = 1 + start + tl.arange(0, BN)
            k = tl.load(keys + there[:, None] * step + cols[None, :])
            s = tl.dot(q, tl.trans(k)) * (scale * LOG2E)
            higher = tl.maximum(most, tl.max(s, 1))
            p = tl.exp2(s - higher[:, None])
            less = tl.exp2(most - higher)
            total = total * less + tl.sum(p, 1)
            v = tl.load(values + there[:, None] * step + cols[None, :])
            acc = tl.dot(p.to(q.dtype), v, acc * less[:, None])
            most = higher
        result = acc / total[:, None]
        place = into + rows[:, None] * (HEADS * D) + cols[None, :]
        tl.store(place, result.to(out.dtype.element_ty))
        tl.store(lse + rows, most + tl.log2(total))
    else:
        _class_query(queries, keys, values, into, lse, scale, step, PATCHES, D)


@triton.jit
def _back_class(
    queries, keys, values, outs, grads, lse, dq, dk, dv, scale,
    step: tl.constexpr, width: tl.constexpr, PATCHES: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of the class token's query, key and value: sums over all tokens."""
    cols = tl.arange(0, D)
    q0 = tl.load(queries + cols).to(tl.float32)
    k0 = tl.load(keys + cols).to(tl.float32)
    v0 = tl.load(values + cols).to(tl.float32)
    g0 = tl.load(grads + cols).to(tl.float32)
    lse0 = tl.load(lse)
    delta0 = tl.sum(tl.load(outs + cols).to(tl.float32) * g0, 0)
    p0 = tl.exp2(tl.sum(q0 * k0, 0) * (scale * LOG2E) - lse0)  # of the token for itself
    ds0 = p0 * (tl.sum(g0 * v0, 0) - delta0)
    dq0, dk0, dv0 = ds0 * k0, ds0 * q0, p0 * g0
    for start in range(0, PATCHES, ROWS):
        rows = 1 + start + tl.arange(0, ROWS)
        apart = rows[:, None] * step + cols[None, :]
        close = rows[:, None] * width + cols[None, :]
        q = tl.load(queries + apart).to(tl.float32)
        k = tl.load(keys + apart).to(tl.float32)
        v = tl.load(values + apart).to(tl.float32)
        g = tl.load(grads + close).to(tl.float32)
        delta = tl.sum(tl.load(outs + close).to(tl.float32) * g, 1)
        seen = tl.exp2(tl.sum(k * q0[None, :], 1) * (scale * LOG2E) - lse0)  # by the class token
        seen *= tl.sum(v * g0[None, :], 1) - delta0
        dq0 += tl.sum(seen[:, None] * k, 0)
        p = tl.exp2(tl.sum(q * k0[None, :], 1) * (scale * LOG2E) - tl.load(lse + rows))
        dv0 += tl.sum(p[:, None] * g, 0)
        ds = p * (tl.sum(g * v0[None, :], 1) - delta)
        dk0 += tl.sum(ds[:, None] * q, 0)
    kind = dq.dtype.element_ty
    tl.store(dq + cols, (dq0 * scale).to(kind))
    tl.store(dk + cols, (dk0 * scale).to(kind))
    tl.store(dv + cols, dv0.to(kind))


@triton.jit
def _back_keys(
    queries, keys, values, outs, grads, lse, dq, dk, dv, scale, tile,
    step: tl.constexpr, width: tl.constexpr, PATCHES: tl.constexpr, D: tl.constexpr,
    BN: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Keys and values of a tile, over all queries."""
    cols = tl.arange(0, D)
    kind = dq.dtype.element_ty
    there = 1 + tile * BN + tl.arange(0, BN)
    tiled = there[:, None] * step + cols[None, :]
    k, v = tl.load(keys + tiled), tl.load(values + tiled)
    q0 = tl.load(queries + cols).to(tl.float32)
    g0 = tl.load(grads + cols).to(tl.float32)
    delta0 = tl.sum(tl.load(outs + cols).to(tl.float32) * g0, 0)
    p0 = tl.sum(k.to(tl.float32) * q0[None, :], 1) * (scale * LOG2E)
    p0 = tl.exp2(p0 - tl.load(lse))
    ds0 = p0 * (tl.sum(v.to(tl.float32) * g0[None, :], 1) - delta0)
    acc_v = p0[:, None] * g0[None, :]
    acc_k = ds0[:, None] * q0[None, :]
    for start in range(0, PATCHES, SUB):
        rows = 1 + start + tl.arange(0, SUB)
        q = tl.load(queries + rows[:, None] * step + cols[None, :])
        g = tl.load(grads + rows[:, None] * width + cols[None, :])
        o = tl.load(outs + rows[:, None] * width + cols[None, :])
        delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
        p = tl.dot(k, tl.trans(q)) * (scale * LOG2E)
        p = tl.exp2(p - tl.load(lse + rows)[None, :])  # [keys, queries]
        acc_v = tl.dot(p.to(kind), g, acc_v)
        ds = p * (tl.dot(v, tl.trans(g)) - delta[None, :])
        acc_k = tl.dot(ds.to(kind), q, acc_k)
    tl.store(dk + tiled, (acc_k * scale).to(kind))
    tl.store(dv + tiled, acc_v.to(kind))


@triton.jit
def _back_queries(
    queries, keys, values, outs, grads, lse, dq, dk, dv, scale, tile,
    step: tl.constexpr, width: tl.constexpr, PATCHES: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Queries of a tile, over all keys."""
    cols = tl.arange(0, D)
    kind = dq.dtype.element_ty
    rows = 1 + tile * BM + tl.arange(0, BM)
    q = tl.load(queries + rows[:, None] * step + cols[None, :])
    g = tl.load(grads + rows[:, None] * width + cols[None, :])
    o = tl.load(outs + rows[:, None] * width + cols[None, :])
    delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    own = tl.load(lse + rows)
    k0 = tl.load(keys + cols).to(tl.float32)
    v0 = tl.load(values + cols).to(tl.float32)
    p0 = tl.exp2(tl.sum(q.to(tl.float32) * k0[None, :], 1) * (scale * LOG2E) - own)
    ds0 = p0 * (tl.sum(g.to(tl.float32) * v0[None, :], 1) - delta)
    acc = ds0[:, None] * k0[None, :]
    for start in range(0, PATCHES, SUB):
        tiled = (1 + start + tl.arange(0, SUB))[:, None] * step + cols[None, :]
        k, v = tl.load(keys + tiled), tl.load(values + tiled)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * (scale * LOG2E) - own[:, None])
        ds = p * (tl.dot(g, tl.trans(v)) - delta[:, None])
        acc = tl.dot(ds.to(kind), k, acc)
    tl.store(dq + rows[:, None] * step + cols[None, :], (acc * scale).to(kind))


@triton.jit
def _attend_back(
    qkv, out, lse, grad, dqkv, scale,
    HEADS: tl.constexpr, PATCHES: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Programs of a head: key tiles of BN, query tiles of BM, the class token; loops of SUB."""
    tile, pair = tl.program_id(0), tl.program_id(1)
    image, head = pair // HEADS, pair % HEADS
    step: tl.constexpr = 3 * HEADS * D
    width: tl.constexpr = HEADS * D
    first = image * (PATCHES + 1)
    at = first * step + head * D
    queries, keys, values = qkv + at, qkv + at + width, qkv + at + 2 * width
    dq, dk, dv = dqkv + at, dqkv + at + width, dqkv + at + 2 * width
    outs, grads = out + first * width + head * D, grad + first * width + head * D
    lse += pair * (PATCHES + 1)
    if tile < PATCHES // BN:
        _back_keys(
            queries, keys, values, outs, grads, lse, dq, dk, dv, scale, tile,
            step, width, PATCHES, D, BN, SUB,
        )  # fmt: skip
    elif tile < PATCHES // BN + PATCHES // BM:
        _back_queries(
            queries, keys, values, outs, grads, lse, dq, dk, dv, scale, tile - PATCHES // BN,
            step, width, PATCHES, D, BM, SUB,
        )  # fmt: skip
    else:
        _back_class(
            queries, keys, values, outs, grads, lse, dq, dk, dv, scale,
            step, width, PATCHES, D, 32,
        )  # fmt: skip


@triton.jit
def _back_whole(
    queries, keys, values, outs, grads, lse, dq, dk, dv, scale,
    step: tl.constexpr, width: tl.constexpr, PATCHES: tl.constexpr, D: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """All queries of a head stay, keys pass in tiles."""
    cols = tl.arange(0, D)
    kind = dq.dtype.element_ty
    rows = 1 + tl.arange(0, PATCHES)
    q = tl.load(queries + rows[:, None] * step + cols[None, :])
    g = tl.load(grads + rows[:, None] * width + cols[None, :])
    o = tl.load(outs + rows[:, None] * width + cols[None, :])
    delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    own = tl.load(lse + rows)
    k0 = tl.load(keys + cols).to(tl.float32)
    v0 = tl.load(values + cols).to(tl.float32)
    p0 = tl.exp2(tl.sum(q.to(tl.float32) * k0[None, :], 1) * (scale * LOG2E) - own)
    ds0 = p0 * (tl.sum(g.to(tl.float32) * v0[None, :], 1) - delta)
    acc = ds0[:, None] * k0[None, :]
    q0 = tl.load(queries + cols).to(tl.float32)
    g0 = tl.load(grads + cols).to(tl.float32)
    delta0 = tl.sum(tl.load(outs + cols).to(tl.float32) * g0, 0)
    own0 = tl.load(lse)
    for start in range(0, PATCHES, BN):
        tiled = (1 + start + tl.arange(0, BN))[:, None] * step + cols[None, :]
        k, v = tl.load(keys + tiled), tl.load(values + tiled)
        c0 = tl.sum(k.to(tl.float32) * q0[None, :], 1) * (scale * LOG2E)
        c0 = tl.exp2(c0 - own0)
        dc0 = c0 * (tl.sum(v.to(tl.float32) * g0[None, :], 1) - delta0)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * (scale * LOG2E) - own[:, None])
        acc_v = tl.dot(tl.trans(p.to(kind)), g, c0[:, None] * g0[None, :])
        tl.store(dv + tiled, acc_v.to(kind))
        ds = (p * (tl.dot(g, tl.trans(v)) - delta[:, None])).to(kind)
        acc_k = tl.dot(tl.trans(ds), q, dc0[:, None] * q0[None, :])
        tl.store(dk + tiled, (acc_k * scale).to(kind))
        acc = tl.dot(ds, k, acc)
    tl.store(dq + rows[:, None] * step + cols[None, :], (acc * scale).to(kind))


@triton.jit
def _attend_back_whole(
    qkv, out, lse, grad, dqkv, scale,
    HEADS: tl.constexpr, PATCHES: tl.constexpr, D: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One program a head: all queries stay, keys pass in tiles; one more for the class token."""
    pair = tl.program_id(1)
    image, head = pair // HEADS, pair % HEADS
    step: tl.constexpr = 3 * HEADS * D
    width: tl.constexpr = HEADS * D
    first = image * (PATCHES + 1)
    at = first * step + head * D
    queries, keys, values = qkv + at, qkv + at + width, qkv + at + 2 * width
    dq, dk, dv = dqkv + at, dqkv + at + width, dqkv + at + 2 * width
    outs, grads = out + first * width + head * D, grad + first * width + head * D
    lse += pair * (PATCHES + 1)
    if tl.program_id(0) == 0:
        _back_whole(
            queries, keys, values, outs, grads, lse, dq, dk, dv, scale,
            step, width, PATCHES, D, BN,
        )  # fmt: skip
    else:
        _back_class(
            queries, keys, values, outs, grads, lse, dq, dk, dv, scale,
            step, width, PATCHES, D, 32,
        )  # fmt: skip


# tiles of queries and keys, warps, stages; `tune` may choose others
FORWARD = {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 2}
BACKWARD = {"BM": 64, "BN": 64, "SUB": 64, "num_warps": 4, "num_stages": 2}
FORWARDS = [
    {"BM": m, "BN": n, "num_warps": w, "num_stages": s}
    for m, n, w, s in (
        (64, 64, 4, 2), (64, 128, 4, 2), (128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 3),
        (128, 64, 4, 2),
    )
]  # fmt: skip
BACKWARDS = [
    {"BM": m, "BN": n, "SUB": sub, "num_warps": w, "num_stages": s}
    for m, n, sub, w, s in (
        (64, 64, 64, 4, 2), (64, 64, 64, 4, 1), (128, 128, 64, 8, 2), (128, 128, 64, 8, 1),
        (64, 64, 128, 8, 1), (128, 64, 64, 4, 1),
    )
] + [
    {"BN": 64, "num_warps": 8, "num_stages": 1}  # one program a head
]  # fmt: skip


CHOICE: Path | None = None  # a file with the tuned tiles, read at the first call after it is set


def tiles(side: str) -> dict[str, int]:
    """The tiles to use; a tuning process may still be writing them down."""
    global CHOICE, FORWARD, BACKWARD
    if CHOICE is not None:
        until = time.monotonic() + 60
        while not CHOICE.exists() and time.monotonic() < until:
            time.sleep(0.1)
        if CHOICE.exists():
            best = json.loads(CHOICE.read_text())
            FORWARD, BACKWARD = best["forward"], best["backward"]
        CHOICE = None
    return FORWARD if side == "forward" else BACKWARD


def forward(qkv: Tensor, heads: int, how: dict[str, int] | None = None) -> tuple[Tensor, Tensor]:
    """Attention of qkv [B, 1 + patches, 3 * heads * D], and its row sums as log2."""
    how = how or tiles("forward")
    images, tokens, wide = qkv.shape
    out = qkv.new_empty(images, tokens, wide // 3)
    lse = qkv.new_empty(images, heads, tokens, dtype=torch.float32)
    grid = ((tokens - 1) // how["BM"] + 1, images * heads)
    shape = {"HEADS": heads, "PATCHES": tokens - 1, "D": wide // 3 // heads}
    _attend[grid](qkv, out, lse, (wide // 3 // heads) ** -0.5, **shape, **how)
    return out, lse


def backward(
    grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, heads: int,
    how: dict[str, int] | None = None,
) -> Tensor:  # fmt: skip
    """The gradient of qkv."""
    how = how or tiles("backward")
    images, tokens, wide = qkv.shape
    result = torch.empty_like(qkv)
    patches = tokens - 1
    shape = {"HEADS": heads, "PATCHES": patches, "D": wide // 3 // heads}
    args = (qkv, out, lse, grad, result, (wide // 3 // heads) ** -0.5)
    if "SUB" in how:
        grid = (patches // how["BN"] + patches // how["BM"] + 1, images * heads)
        _attend_back[grid](*args, **shape, **how)
    else:
        _attend_back_whole[2, images * heads](*args, **shape, **how)
    return result


def reference(qkv: Tensor, heads: int) -> Tensor:
    """The same by torch's own."""
    images, tokens, wide = qkv.shape
    q, k, v = qkv.reshape(images, tokens, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    return out.transpose(1, 2).reshape(images, tokens, wide // 3)


def distance(one: Tensor, two: Tensor) -> float:
    """Relative to the length of the second; NaN never passes."""
    apart = (one.double() - two.double()).norm() / two.double().norm()
    return float(apart) if math.isfinite(float(apart)) else math.inf


def check(
    device: str, kind: torch.dtype, images: int = 2, patches: int = 256, heads: int = 6,
    d: int = 64, forwards: Any = None, backwards: Any = None,
) -> dict[str, float]:  # fmt: skip
    """Distances of output and gradient from float64's, of each variant and of torch's own."""
    made = torch.Generator().manual_seed(1)
    qkv = torch.randn(images, patches + 1, 3 * heads * d, generator=made) * 1.5
    grad = torch.randn(images, patches + 1, heads * d, generator=made)
    qkv, grad = qkv.to(device, kind), grad.to(device, kind)
    exact = qkv.double().requires_grad_()
    truth = reference(exact, heads)
    truth.backward(grad.double())
    theirs = qkv.clone().requires_grad_()
    plain = reference(theirs, heads)
    plain.backward(grad)
    assert exact.grad is not None
    assert theirs.grad is not None
    far = {"torch forward": distance(plain.detach(), truth.detach())}
    far["torch backward"] = distance(theirs.grad, exact.grad)
    for how in forwards or [FORWARD]:
        out, lse = forward(qkv, heads, how)
        far[f"forward {tuple(how.values())}"] = distance(out, truth.detach())
    for how in backwards or [BACKWARD]:
        got = backward(grad, qkv, out, lse, heads, how)
        far[f"backward {tuple(how.values())}"] = distance(got, exact.grad)
        far[f"  class token {tuple(how.values())}"] = distance(got[:, 0], exact.grad[:, 0])
    return far


# ---- for torch.compile -------------------------------------------------------------------------


@torch.library.custom_op(
    "calm::attend", mutates_args=(), schema="(Tensor qkv, int heads) -> (Tensor, Tensor)"
)
def attend(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    if qkv.is_cuda:
        return forward(qkv, heads)
    images, tokens, wide = qkv.shape
    q, k, _ = qkv.reshape(images, tokens, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    scores = (q.float() @ k.float().mT) * (wide // 3 // heads) ** -0.5
    return reference(qkv, heads), scores.logsumexp(-1) / math.log(2)


@attend.register_fake
def _(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    images, tokens, wide = qkv.shape
    rows = qkv.new_empty(images, heads, tokens, dtype=torch.float32)
    return qkv.new_empty(images, tokens, wide // 3), rows


@torch.library.custom_op(
    "calm::attend_back",
    mutates_args=(),
    schema="(Tensor grad, Tensor qkv, Tensor out, Tensor lse, int heads) -> Tensor",
)
def attend_back(grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, heads: int) -> Tensor:
    if qkv.is_cuda:
        return backward(grad.contiguous(), qkv, out, lse, heads)
    images, tokens, wide = qkv.shape
    q, k, v = qkv.reshape(images, tokens, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    g = grad.reshape(images, tokens, heads, -1).transpose(1, 2)
    scale = (wide // 3 // heads) ** -0.5
    p = (q @ k.mT * scale).softmax(-1)
    dp = g @ v.mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
    result = torch.stack([ds @ k, ds.mT @ q, p.mT @ g])  # 3, images, heads, tokens, width
    return result.permute(1, 3, 0, 2, 4).reshape(qkv.shape)


@attend_back.register_fake
def _(grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, heads: int) -> Tensor:
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0], *output)
    ctx.heads = inputs[1]


def _attend_gradient(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None]:
    return attend_back(grad, *ctx.saved_tensors, ctx.heads), None


attend.register_autograd(_attend_gradient, setup_context=_remember)


def attention_forward(
    self: Any, x: Tensor, attn_mask: Any = None, is_causal: bool = False
) -> Tensor:
    """For timm's Attention."""
    out: Tensor = self.proj(attend(self.qkv(x), self.num_heads)[0])
    return out


# ---- products by cuBLASLt: its best algorithm by trial, the bias's gradient in the epilogue -----

LT = False  # whether the joint pass uses them
FORMS = ("forward", "inputs", "weights")  # X W' + b; G W; G' X with the sums of G
BIAS, BGRADB = 4, 512
BF16, F32, COMPUTE_F32 = 14, 0, 68
SPACE = 64 << 20


class _Heuristic(ctypes.Structure):
    _fields_ = [
        ("algo", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class Product:
    """One shape of one form. Rows m, outputs n, inputs k, all row-major and contiguous.

    cuBLAS counts columns first, so it sees every matrix transposed and the factors swapped.
    """

    library: Any = None
    handle = ctypes.c_void_p()
    space: Tensor

    def __init__(self, form: str, m: int, n: int, k: int) -> None:
        self.load()
        self.desc, self.pref = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cublasLtMatmulDescCreate", ctypes.byref(self.desc), COMPUTE_F32, F32)
        # first factor, second factor, result as (rows, columns) where columns come first
        shapes = {
            "forward": ((k, n), (k, m), (n, m)),
            "inputs": ((k, n), (n, m), (k, m)),
            "weights": ((k, m), (n, m), (k, n)),
        }[form]
        turned = {"forward": (1, 0), "inputs": (0, 0), "weights": (0, 1)}[form]
        self.epilogue = {"forward": BIAS, "inputs": 1, "weights": BGRADB}[form]
        for name, value in ((3, turned[0]), (4, turned[1]), (7, self.epilogue)):
            self.set(name, ctypes.c_int32(value))
        self.layouts = [ctypes.c_void_p() for _ in shapes]
        for layout, (rows, columns) in zip(self.layouts, shapes, strict=True):
            size = (ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows))
            self.call("cublasLtMatrixLayoutCreate", ctypes.byref(layout), BF16, *size)
        self.call("cublasLtMatmulPreferenceCreate", ctypes.byref(self.pref))
        most = ctypes.c_size_t(SPACE)
        how = (self.pref, 1, ctypes.byref(most), ctypes.c_size_t(8))
        self.call("cublasLtMatmulPreferenceSetAttribute", *how)
        if self.epilogue != 1:  # the heuristic reads its alignment
            self.set(8, ctypes.c_void_p(self.space.data_ptr()))
        found, count = (_Heuristic * 32)(), ctypes.c_int()
        a, b, d = self.layouts
        asked = (self.handle, self.desc, a, b, d, d, self.pref, 32, found, ctypes.byref(count))
        self.call("cublasLtMatmulAlgoGetHeuristic", *asked)
        self.found = [found[i] for i in range(count.value) if found[i].state == 0]
        assert self.found, f"cuBLASLt knows no algorithm for {form} {m} {n} {k}"
        self.choice = 0

    @classmethod
    def load(cls) -> None:
        """The library that torch has loaded."""
        if cls.library is not None:
            return
        one = torch.ones(16, 16, device="cuda", dtype=torch.bfloat16)
        torch.addmm(one[0], one, one)
        with Path("/proc/self/maps").open() as lines:
            paths = {line.split()[-1] for line in lines if "libcublasLt.so" in line}
        cls.library = ctypes.CDLL(sorted(paths)[0])
        cls.call("cublasLtCreate", ctypes.byref(cls.handle))
        cls.space = torch.empty(SPACE, dtype=torch.uint8, device="cuda")

    @classmethod
    def call(cls, name: str, *args: Any) -> None:
        status = getattr(cls.library, name)(*args)
        if status:
            raise RuntimeError(f"{name} answered {status}")

    def set(self, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        what = (self.desc, attribute, ctypes.byref(value), size)
        self.call("cublasLtMatmulDescSetAttribute", *what)

    def __call__(self, first: Tensor, second: Tensor, result: Tensor, bias: Tensor | None) -> None:
        if bias is not None:
            self.set(8, ctypes.c_void_p(bias.data_ptr()))
        one, none = ctypes.c_float(1.0), ctypes.c_float(0.0)
        a, b, d = self.layouts
        into = ctypes.c_void_p(result.data_ptr())
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self.call(
            "cublasLtMatmul", self.handle, self.desc, ctypes.byref(one),
            ctypes.c_void_p(first.data_ptr()), a, ctypes.c_void_p(second.data_ptr()), b,
            ctypes.byref(none), into, d, into, d, ctypes.byref(self.found[self.choice].algo),
            ctypes.c_void_p(self.space.data_ptr()), ctypes.c_size_t(SPACE), stream,
        )  # fmt: skip


PRODUCTS: dict[tuple[str, int, int, int], Product] = {}


def product(form: str, m: int, n: int, k: int) -> Product:
    if (form, m, n, k) not in PRODUCTS:
        PRODUCTS[form, m, n, k] = Product(form, m, n, k)
    return PRODUCTS[form, m, n, k]


@torch.library.custom_op(
    "calm::lt_linear", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor bias) -> Tensor"
)
def lt_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if not x.is_cuda:
        return torch.addmm(bias, x, weight.t())
    y = x.new_empty(len(x), len(weight))
    product("forward", len(x), *weight.shape)(weight, x.contiguous(), y, bias)
    return y


@lt_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op(
    "calm::lt_linear_back",
    mutates_args=(),
    schema="(Tensor g, Tensor x, Tensor weight) -> (Tensor, Tensor, Tensor)",
)
def lt_linear_back(g: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if not g.is_cuda:
        return g @ weight, g.t() @ x, g.sum(0)
    g, x = g.contiguous(), x.contiguous()
    dx, dw, db = torch.empty_like(x), torch.empty_like(weight), g.new_empty(len(weight))
    product("inputs", len(g), *weight.shape)(weight, g, dx, None)
    product("weights", len(g), *weight.shape)(x, g, dw, db)
    return dx, dw, db


@lt_linear_back.register_fake
def _(g: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dx, dw = x.new_empty(x.shape), weight.new_empty(weight.shape)
    return dx, dw, g.new_empty(weight.shape[0])


def tune_products(rows: int, learning: int) -> list[list[Any]]:
    """Choose each product's algorithm by trial: form, shape, us of torch, the first, the best.

    Every algorithm that is chosen has been checked against a float32 product.
    """
    table = []
    for n, k in ((1152, 384), (384, 384), (1536, 384), (384, 1536)):
        for form, m in (("forward", rows), ("inputs", learning), ("weights", learning)):
            x, g, w = (torch.randn(s, device="cuda").bfloat16() for s in ((m, k), (m, n), (n, k)))
            b = torch.randn(n, device="cuda").bfloat16()
            this = product(form, m, n, k)
            args, theirs, exact, sums = {
                "forward": (
                    (w, x, g.new_empty(m, n), b),
                    lambda b=b, x=x, w=w: torch.addmm(b, x, w.t()),
                    torch.addmm(b.float(), x.float(), w.float().t()),
                    None,
                ),
                "inputs": (
                    (w, g, g.new_empty(m, k), None),
                    lambda g=g, w=w: g @ w,
                    g.float() @ w.float(),
                    None,
                ),
                "weights": (
                    (x, g, g.new_empty(n, k), g.new_empty(n)),
                    lambda g=g, x=x: (g.t() @ x, g.sum(0)),
                    g.float().t() @ x.float(),
                    g.float().sum(0),
                ),
            }[form]
            times = []
            for place in range(len(this.found)):
                this.choice = place
                try:
                    args[2].fill_(float("nan"))
                    if sums is not None:
                        args[3].fill_(float("nan"))
                    this(*args)
                    torch.cuda.synchronize()
                    far = distance(args[2], exact)
                    far = max(far, distance(args[3], sums) if sums is not None else 0.0)
                    if far < 5e-3:  # bfloat16's rounding alone is 1.7e-3
                        times.append((graph_us(lambda this=this, args=args: this(*args)), place))
                except RuntimeError:
                    continue
            assert times, f"no algorithm is right for {form} {m} {n} {k}"
            first = next((us for us, place in times if place == 0), float("nan"))
            best, this.choice = min(times)
            table.append([form, [m, n, k], graph_us(theirs), first, best, len(times)])
    return table


def graph_us(act: Any, calls: int = 20) -> float:
    """Microseconds of a call in a captured graph, the median of five replays."""
    act()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            act()
    graph.replay()
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / calls)
    return sorted(times)[2]


# ---- views without gradient in the launches of the others --------------------------------------

NAMES = (
    *("norm1.weight", "norm1.bias", "attn.qkv.weight", "attn.qkv.bias"),
    *("attn.proj.weight", "attn.proj.bias", "norm2.weight", "norm2.bias"),
    *("mlp.fc1.weight", "mlp.fc1.bias", "mlp.fc2.weight", "mlp.fc2.bias"),
)
SAVED = 13  # tensors a block keeps for its backward pass


class Joint(torch.autograd.Function):
    """Blocks of a transformer over all views; only the first rows have a backward pass."""

    @staticmethod
    def forward(
        ctx: Any, learning: Tensor, other: Tensor, kept: Tensor, heads: int, eps: float,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        x, n, saved = torch.cat([learning, other]), len(learning), []
        width = (x.shape[-1],)
        for i in range(len(weights) // 12):
            n1, c1, wq, bq, wp, bp, n2, c2, w1, b1, w2, b2 = weights[12 * i : 12 * i + 12]
            y, mean, rstd = torch.native_layer_norm(x, width, n1, c1, eps)
            y = y.to(wq.dtype)
            qkv = _linear(y, wq, bq)
            o, lse = attend(qkv, heads)
            x1 = x + _linear(o, wp, bp) * kept[i, 0]
            y2, mean2, rstd2 = torch.native_layer_norm(x1, width, n2, c2, eps)
            y2 = y2.to(w1.dtype)
            h = _linear(y2, w1, b1)
            a = torch.nn.functional.gelu(h)
            mine = (x, mean, rstd, y, qkv, o, lse, x1, mean2, rstd2, y2, h, a)
            saved += [tensor[:n] for tensor in mine]
            x = x1 + _linear(a, w2, b2) * kept[i, 1]
        ctx.save_for_backward(kept[:, :, :n], *weights, *saved)
        ctx.heads = heads
        return x[:n], x[n:]

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> tuple[Any, ...]:
        kept, *rest = ctx.saved_tensors
        blocks = len(rest) // (12 + SAVED)
        weights, saved = rest[: 12 * blocks], rest[12 * blocks :]
        grads: list[list[Tensor]] = []
        for i in reversed(range(blocks)):
            n1, c1, wq, _bq, wp, _bp, n2, c2, w1, _b1, w2, _b2 = weights[12 * i : 12 * i + 12]
            x, mean, rstd, y, qkv, o, lse, x1, mean2, rstd2, y2, h, a = saved[
                SAVED * i : SAVED * i + SAVED
            ]
            ga, dw2, db2 = _linear_back(g.to(w2.dtype) * kept[i, 1], a, w2)
            gh = torch.ops.aten.gelu_backward(ga, h)
            gy, dw1, db1 = _linear_back(gh, y2, w1)
            dx, dn2, dc2 = torch.ops.aten.native_layer_norm_backward(
                gy.to(x1.dtype), x1, [x1.shape[-1]], mean2, rstd2, n2, c2, [True, True, True]
            )
            g = g + dx
            go, dwp, dbp = _linear_back(g.to(wp.dtype) * kept[i, 0], o, wp)
            gq, dwq, dbq = _linear_back(attend_back(go, qkv, o, lse, ctx.heads), y, wq)
            dx, dn1, dc1 = torch.ops.aten.native_layer_norm_backward(
                gq.to(x.dtype), x, [x.shape[-1]], mean, rstd, n1, c1, [True, True, True]
            )
            g = g + dx
            grads.append([dn1, dc1, dwq, dbq, dwp, dbp, dn2, dc2, dw1, db1, dw2, db2])
        return g, None, None, None, None, *[one for some in reversed(grads) for one in some]


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if LT:
        y: Tensor = lt_linear(x.reshape(-1, x.shape[-1]), weight, bias)
        return y.view(*x.shape[:-1], -1)
    return torch.nn.functional.linear(x, weight, bias)


def _linear_back(g: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = g.reshape(-1, g.shape[-1])
    if LT:
        dx, dw, db = lt_linear_back(rows, x.reshape(-1, x.shape[-1]), weight)
        return dx.view(x.shape), dw, db
    dw = rows.t() @ x.reshape(-1, x.shape[-1])
    return (rows @ weight).view(x.shape), dw, rows.sum(0)


def joint_apart(net: Any, *views: Tensor, grad: Any = None) -> list[Any]:
    """For FixMatch's `apart`: x, weak and strong views, of which the weak do not learn."""
    from calmatch.core import Output
    from calmatch.nets import timm as ours

    assert list(grad) == [True, False, True]
    assert net.training
    x, weak, strong = views
    body, images = net.body, torch.cat([x, strong])
    blocks = list(body.blocks[:-1])
    rates = [getattr(block.drop_path1, "drop_prob", 0.0) for block in blocks]
    count = len(images) + len(weak)
    with torch.autocast(x.device.type, torch.bfloat16, enabled=net.bf16):
        learning = body._pos_embed(body.patch_embed(images))
        with torch.no_grad():
            other = body._pos_embed(body.patch_embed(weak))
        keep = 1 - x.new_tensor(rates)[:, None, None]
        chance = torch.rand(len(rates), 2, count, device=x.device, dtype=x.dtype)
        kept = (chance < keep).to(x.dtype) / keep
        weights = [block.get_parameter(name) for block in blocks for name in NAMES]
        kept = kept.to(weights[2].dtype)[..., None, None]
        first = blocks[0]
        with torch.autocast(x.device.type, enabled=False):
            learning, other = Joint.apply(
                learning, other, kept, first.attn.num_heads, first.norm1.eps, *weights
            )
        ends = []
        for tokens, learns in ((learning, True), (other, False)):
            with torch.set_grad_enabled(learns):
                tokens = tokens if learns else tokens.detach()
                features = body.norm(ours._class_token(body.blocks[-1], tokens))
                ends.append((body.head(features).to(x.dtype), features.to(x.dtype)))
    (logits, features), aside = ends
    b = len(x)
    one, two = (Output(logits[part], features[part]) for part in (slice(b), slice(b, None)))
    return [one, Output(*aside), two]


def plain_query(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One query a head by sums that fuse, for the last block: no attention kernel for one row."""
    low, scale = query.dtype, query.shape[-1] ** -0.5
    scores = (query.float() * key.float()).sum(-1) * scale  # [B, heads, tokens]
    p = scores.softmax(-1)
    return (p[..., None] * value.float()).sum(2, keepdim=True).to(low)
