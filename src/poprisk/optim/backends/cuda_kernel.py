"""The Triton kernel of the fused CUDA backend: one launch, one pass over memory, for a whole list of tensors.

The lines follow poprisk.rules.population; the coefficients come from poprisk.rules.coefficients. Imported only where
Triton is there.
"""

import triton
import triton.language as tl

POINTERS = 8  # w, g, m, v, s, variance, number of elements, key of the rounding seed
COLUMNS = 20  # see `poprisk.optim.backends.cuda._fill`


@triton.jit
def _hash32(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _round_stochastically(x, noise):
    raw = x.to(tl.uint32, bitcast=True)
    finite = tl.abs(x) <= 3.4028234663852886e38
    raw = tl.where(finite, raw + noise, raw)
    return (raw >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _load(pointer, mask, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointer, mask=mask, other=0.0)
    else:
        return tl.load(pointer)


@triton.jit
def _store(pointer, value, mask, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointer, value, mask=mask)
    else:
        tl.store(pointer, value)


@triton.jit
def _span(
    w_ptr, g_ptr, m_ptr, v_ptr, s_ptr, x_ptr, offsets, room, first, seed, row, left_out,
    GATE: tl.constexpr, HAS_S: tl.constexpr, OBSERVED: tl.constexpr, BATCH_SIGNAL: tl.constexpr,
    GATED_DECAY: tl.constexpr, SKIP: tl.constexpr, TINY: tl.constexpr, LARGEST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    REAL: tl.constexpr = m_ptr.dtype.element_ty
    mask = offsets < room
    w_in = _load(w_ptr + offsets, mask, MASKED)
    g_in = _load(g_ptr + offsets, mask, MASKED)
    m_prev = _load(m_ptr + offsets, mask, MASKED)
    v_in = _load(v_ptr + offsets, mask, MASKED)
    if HAS_S:
        s_in = _load(s_ptr + offsets, mask, MASKED)
    if OBSERVED:
        squared = _load(x_ptr + offsets, mask, MASKED)
    g = g_in.to(REAL) * tl.load(row + 0)
    w = w_in.to(REAL)
    if HAS_S:
        if not OBSERVED:
            d = g - tl.load(row + 1) * m_prev
            squared = d * d
        s = tl.load(row + 2) * s_in.to(REAL) + tl.load(row + 3) * squared
    m = m_prev + tl.load(row + 4) * (g - m_prev)
    v = tl.load(row + 5) * v_in.to(REAL) + tl.load(row + 6) * (g * g)
    m_hat = m * tl.load(row + 8)
    if GATE > 0:
        if not HAS_S:
            s = tl.maximum((v - m * m) * tl.load(row + 7), 0.0)
        s_hat = s * tl.load(row + 10)
        power = g * g if BATCH_SIGNAL else m_hat * m_hat
        if GATE == 2:
            q = tl.where(power > tl.load(row + 11) * s_hat, 1.0, 0.0).to(REAL)
        else:
            part = power
            if GATE == 1:
                part = tl.maximum(power - tl.load(row + 11) * s_hat, 0.0)
            q = part / tl.maximum(part + (tl.load(row + 12) * s_hat + tl.load(row + 13)), TINY)
        q = tl.where(tl.load(row + 14) != 0.0, tl.load(row + 15), q)
    update = m_hat / (tl.sqrt(v * tl.load(row + 9)) + tl.load(row + 17))
    decay = tl.load(row + 18)
    if GATE > 0:
        update = q * update
        if GATED_DECAY:
            decay = decay * q
    w_new = w - tl.load(row + 16) * (update + decay * w)

    V_LOW: tl.constexpr = v_ptr.dtype.element_ty == tl.bfloat16
    S_LOW: tl.constexpr = HAS_S and s_ptr.dtype.element_ty == tl.bfloat16
    if V_LOW or S_LOW:
        noise = _hash32(offsets.to(tl.uint32) + (first + seed))
    w_out = w_new.to(w_ptr.dtype.element_ty)
    v_out = _round_stochastically(v, noise & 0xFFFF) if V_LOW else v
    if HAS_S:
        s_out = _round_stochastically(s, noise >> 16) if S_LOW else s
    if SKIP:
        ok = tl.abs(g) <= LARGEST
        w_out = tl.where(ok, w_out, w_in)
        m = tl.where(ok, m, m_prev)
        v_out = tl.where(ok, v_out, v_in)
        if HAS_S:
            s_out = tl.where(ok, s_out, s_in)
        one = tl.full(offsets.shape, 1, tl.int64)
        tl.atomic_add(left_out + tl.zeros_like(offsets), one, mask=(offsets < room) & ~ok, sem="relaxed")
    _store(w_ptr + offsets, w_out, mask, MASKED)
    _store(m_ptr + offsets, m, mask, MASKED)
    _store(v_ptr + offsets, v_out, mask, MASKED)
    if HAS_S:
        _store(s_ptr + offsets, s_out, mask, MASKED)


@triton.jit
def _tensor_pointer(entry, start, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(entry).to(tl.pointer_type(TYPE)) + start
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def fused_step_kernel(
    table, coefficients, block_tensor, block_start, found_inf, left_out,
    W: tl.constexpr, V: tl.constexpr, S: tl.constexpr, REAL: tl.constexpr, GATE: tl.constexpr, HAS_S: tl.constexpr,
    OBSERVED: tl.constexpr, BATCH_SIGNAL: tl.constexpr, GATED_DECAY: tl.constexpr, SKIP: tl.constexpr,
    ALIGNED: tl.constexpr, EVEN: tl.constexpr, SCALED: tl.constexpr, TINY: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS_: tl.constexpr, POINTERS_: tl.constexpr,
):  # fmt: skip
    """Each program updates one block of one tensor; where that block lies is looked up by its number."""
    block = tl.program_id(0)
    if SCALED:
        if tl.load(found_inf) != 0.0:
            return
    tensor = tl.load(block_tensor + block).to(tl.int64)
    start = tl.load(block_start + block)
    entry = table + tensor * POINTERS_
    w_ptr = _tensor_pointer(entry + 0, start, W, ALIGNED)
    g_ptr = _tensor_pointer(entry + 1, start, W, ALIGNED)
    m_ptr = _tensor_pointer(entry + 2, start, REAL, ALIGNED)
    v_ptr = _tensor_pointer(entry + 3, start, V, ALIGNED)
    s_ptr = _tensor_pointer(entry + 4, start, S, ALIGNED)
    x_ptr = _tensor_pointer(entry + 5, start, REAL, ALIGNED)
    n = tl.load(entry + 6)
    row = coefficients + tensor * COLUMNS_
    step = tl.load(row + 19).to(tl.int64).to(tl.uint32)
    seed = _hash32(step + tl.load(entry + 7).to(tl.uint32))
    first = start.to(tl.uint32)
    offsets = tl.arange(0, BLOCK)
    if EVEN:  # sizes are multiples of 16, so that a mask does not cut through a vector load
        room = tl.multiple_of(tl.minimum(n - start, BLOCK).to(tl.int32), 16)
        _span(
            w_ptr, g_ptr, m_ptr, v_ptr, s_ptr, x_ptr, offsets, room, first, seed, row, left_out,
            GATE, HAS_S, OBSERVED, BATCH_SIGNAL, GATED_DECAY, SKIP, TINY, LARGEST, True,
        )  # fmt: skip
    elif start + BLOCK <= n:
        _span(
            w_ptr, g_ptr, m_ptr, v_ptr, s_ptr, x_ptr, offsets, BLOCK, first, seed, row, left_out,
            GATE, HAS_S, OBSERVED, BATCH_SIGNAL, GATED_DECAY, SKIP, TINY, LARGEST, False,
        )  # fmt: skip
    else:
        _span(
            w_ptr, g_ptr, m_ptr, v_ptr, s_ptr, x_ptr, offsets, (n - start).to(tl.int32), first, seed, row, left_out,
            GATE, HAS_S, OBSERVED, BATCH_SIGNAL, GATED_DECAY, SKIP, TINY, LARGEST, True,
        )  # fmt: skip
