"""The Triton kernel of the fused CUDA backend: one launch, one pass over memory, for a whole list of tensors.

The lines follow poprisk.rules.population; the coefficients come from poprisk.rules.coefficients. Imported only where
Triton is there.
"""

import triton
import triton.language as tl

POINTERS = 8  # w, g, m, v, s, variance, number of elements, rounding seed key
COLUMNS = 18  # the struct `coefficients` of fused_step.c in the same order, and the step count


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
    w_ptr, g_ptr, m_ptr, v_ptr, s_ptr, x_ptr, offsets, n, seed, row, left_out,
    GATE: tl.constexpr, HAS_S: tl.constexpr, OBSERVED: tl.constexpr, BATCH_SIGNAL: tl.constexpr,
    GATED_DECAY: tl.constexpr, SKIP: tl.constexpr, REAL: tl.constexpr, TINY: tl.constexpr, LARGEST: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    g_scale = tl.load(row + 0).to(REAL)
    center = tl.load(row + 1).to(REAL)
    s_keep = tl.load(row + 2).to(REAL)
    s_new = tl.load(row + 3).to(REAL)
    beta1 = tl.load(row + 4)
    beta2 = tl.load(row + 5)
    m_debias = tl.load(row + 6).to(REAL)
    v_debias = tl.load(row + 7).to(REAL)
    s_debias = tl.load(row + 8).to(REAL)
    alpha = tl.load(row + 9).to(REAL)
    strength = tl.load(row + 10).to(REAL)
    gate_eps = tl.load(row + 11).to(REAL)
    gate_given = tl.load(row + 12)
    gate_value = tl.load(row + 13).to(REAL)
    lr = tl.load(row + 14).to(REAL)
    eps = tl.load(row + 15).to(REAL)
    weight_decay = tl.load(row + 16).to(REAL)
    take_m, take_v = (1.0 - beta1).to(REAL), (1.0 - beta2).to(REAL)

    mask = offsets < n
    w_in = _load(w_ptr + offsets, mask, MASKED)
    g = _load(g_ptr + offsets, mask, MASKED).to(REAL) * g_scale
    m_prev = _load(m_ptr + offsets, mask, MASKED).to(REAL)
    v_in = _load(v_ptr + offsets, mask, MASKED)
    w = w_in.to(REAL)
    m = m_prev + take_m * (g - m_prev)
    v = beta2.to(REAL) * v_in.to(REAL) + take_v * (g * g)
    m_hat = m * m_debias
    q = tl.full(m.shape, 1.0, REAL)
    if HAS_S:
        s_in = _load(s_ptr + offsets, mask, MASKED)
        if OBSERVED:
            squared = _load(x_ptr + offsets, mask, MASKED).to(REAL)
        else:
            d = g - center * m_prev
            squared = d * d
        s = s_keep * s_in.to(REAL) + s_new * squared
    else:
        s = tl.maximum((v - m * m) * (1.0 / beta1).to(REAL), 0.0)
    if GATE > 0:
        s_hat = s * s_debias
        power = g * g if BATCH_SIGNAL else m_hat * m_hat
        if GATE == 2:
            q = tl.where(power > alpha * s_hat, 1.0, 0.0).to(REAL)
        else:
            part = power
            if GATE == 1:
                part = tl.maximum(power - alpha * s_hat, 0.0)
            q = part / tl.maximum(part + (strength * s_hat + gate_eps), TINY)
        q = tl.where(gate_given != 0.0, gate_value, q)
    decay = weight_decay
    if GATED_DECAY:
        decay = weight_decay * q
    w_new = w - lr * (q * (m_hat / (tl.sqrt(v * v_debias) + eps)) + decay * w)

    V_LOW: tl.constexpr = v_ptr.dtype.element_ty == tl.bfloat16
    S_LOW: tl.constexpr = HAS_S and s_ptr.dtype.element_ty == tl.bfloat16
    noise = tl.zeros(m.shape, tl.uint32)
    if V_LOW or S_LOW:
        noise = _hash32(offsets.to(tl.uint32) + seed)
    w_out = w_new.to(w_ptr.dtype.element_ty)
    v_out = _round_stochastically(v, noise & 0xFFFF) if V_LOW else v.to(v_ptr.dtype.element_ty)
    if SKIP:
        ok = tl.abs(g) <= LARGEST
        w_out = tl.where(ok, w_out, w_in)
        m = tl.where(ok, m, m_prev)
        v_out = tl.where(ok, v_out, v_in)
        bad = tl.sum(tl.where(ok | (offsets >= n), 0, 1))
        if bad > 0:
            tl.atomic_add(left_out, bad.to(tl.int64))
    _store(w_ptr + offsets, w_out, mask, MASKED)
    _store(m_ptr + offsets, m, mask, MASKED)
    _store(v_ptr + offsets, v_out, mask, MASKED)
    if HAS_S:
        s_out = _round_stochastically(s, noise >> 16) if S_LOW else s.to(s_ptr.dtype.element_ty)
        if SKIP:
            s_out = tl.where(ok, s_out, s_in)
        _store(s_ptr + offsets, s_out, mask, MASKED)


@triton.jit
def fused_step_kernel(
    table, coefficients, block_tensor, block_start, found_inf, left_out,
    W: tl.constexpr, V: tl.constexpr, S: tl.constexpr, REAL: tl.constexpr, GATE: tl.constexpr, HAS_S: tl.constexpr,
    OBSERVED: tl.constexpr, BATCH_SIGNAL: tl.constexpr, GATED_DECAY: tl.constexpr, SKIP: tl.constexpr,
    ALIGNED: tl.constexpr, SCALED: tl.constexpr, TINY: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr,
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
    w_ptr = tl.load(entry + 0).to(tl.pointer_type(W))
    g_ptr = tl.load(entry + 1).to(tl.pointer_type(W))
    m_ptr = tl.load(entry + 2).to(tl.pointer_type(REAL))
    v_ptr = tl.load(entry + 3).to(tl.pointer_type(V))
    s_ptr = tl.load(entry + 4).to(tl.pointer_type(S))
    x_ptr = tl.load(entry + 5).to(tl.pointer_type(REAL))
    n = tl.load(entry + 6)
    key = tl.load(entry + 7).to(tl.uint32)
    if ALIGNED:
        w_ptr = tl.multiple_of(w_ptr, 16)
        g_ptr = tl.multiple_of(g_ptr, 16)
        m_ptr = tl.multiple_of(m_ptr, 16)
        v_ptr = tl.multiple_of(v_ptr, 16)
        s_ptr = tl.multiple_of(s_ptr, 16)
        x_ptr = tl.multiple_of(x_ptr, 16)
    row = coefficients + tensor * COLUMNS_
    step = tl.load(row + COLUMNS_ - 1).to(tl.int64).to(tl.uint32)
    seed = _hash32(step + key)
    start = tl.multiple_of(start, BLOCK)
    offsets = start + tl.arange(0, BLOCK)
    if start + BLOCK <= n:
        _span(
            w_ptr, g_ptr, m_ptr, v_ptr, s_ptr, x_ptr, offsets, n, seed, row, left_out,
            GATE, HAS_S, OBSERVED, BATCH_SIGNAL, GATED_DECAY, SKIP, REAL, TINY, LARGEST, False,
        )  # fmt: skip
    else:
        _span(
            w_ptr, g_ptr, m_ptr, v_ptr, s_ptr, x_ptr, offsets, n, seed, row, left_out,
            GATE, HAS_S, OBSERVED, BATCH_SIGNAL, GATED_DECAY, SKIP, REAL, TINY, LARGEST, True,
        )  # fmt: skip
