"""The Triton kernel of the fused CUDA backend: one launch, one pass over memory, for a whole list of tensors.

The lines follow poprisk.optim.rules._population; the coefficients come from poprisk.optim.rules._coefficients. Imported only where
Triton is there.
"""

import triton
import triton.language as tl

RECORD = 8  # six pointers, then tensor and number of elements, then key and place, packed: see `cuda._records`
COLUMNS = 19  # the coefficients, in the order of `poprisk.optim.backends._launch.columns`
NOTES = 4  # of each tensor with a normalized gate: see `cuda._notes`


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
    return tl.load(pointer)


@triton.jit
def _store(pointer, value, mask, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointer, value, mask=mask)
    else:
        tl.store(pointer, value)


@triton.jit
def _divide(x, y):
    """X / y to two units in the last place: times the reciprocal, for divisors that are positive normal numbers.

    A full division handles the ends of the range too, and costs the kernel 8% of its speed.
    """
    if x.dtype == tl.float32:
        return x * tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1
        )
    return x / y


@triton.jit
def _raise_flag(flag, condition):
    """Stores 1 where the condition holds for any element, by a predicated store of each thread that sees one.

    A masked tl.store to one address would make the block exchange its masks through shared memory, and a count would
    cost an atomic operation per element.
    """
    address = flag.to(tl.int64) + tl.zeros(condition.shape, tl.int64)
    tl.inline_asm_elementwise(
        """{ .reg .pred seen; setp.ne.s32 seen, $2, 0; @seen st.global.u32 [$1], 1; mov.u32 $0, 0; }""",
        "=r,l,r",
        [address, condition.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _span(
    w_ptr, g_ptr, m_ptr, v_ptr, s_ptr, x_ptr, offsets, room, noise_start, left_out, inverse,
    g_scale, center, s_new, take_m, take_v, over_beta, m_debias, v_debias, s_debias, alpha, strength,
    gate_eps, gate_given, gate_value, lr, eps, weight_decay, average,
    GATE: tl.constexpr, HAS_S: tl.constexpr, OBSERVED: tl.constexpr, BATCH_SIGNAL: tl.constexpr,
    PLAIN: tl.constexpr, MAY_BE_GIVEN: tl.constexpr, GATED_DECAY: tl.constexpr, SKIP: tl.constexpr,
    NORMALIZED: tl.constexpr, AVERAGED: tl.constexpr, TINY: tl.constexpr, LARGEST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block; returns its gates, for the sum of a normalized gate."""
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
    if AVERAGED:
        mean = _load(x_ptr + offsets, mask, MASKED)
    g = g_in.to(REAL)
    if not PLAIN:
        g = g * g_scale
    w = w_in.to(REAL)
    if SKIP:  # a coordinate without a finite gradient learns nothing and does not move, whatever its gradient says
        ok = tl.abs(g) < LARGEST
        _raise_flag(left_out, mask & ~ok)
        g = tl.where(ok, g, m_prev)
        take_m = tl.where(ok, take_m, 0.0)
        take_v = tl.where(ok, take_v, 0.0)
        s_new = tl.where(ok, s_new, 0.0)
        lr = tl.where(ok, lr, 0.0)
        if OBSERVED:  # what gave no gradient gives no variance either
            squared = tl.where(ok, squared, 0.0)
    deviation = g - m_prev
    if HAS_S:
        if not OBSERVED:
            d = deviation
            if not PLAIN:
                d = g - center * m_prev
            squared = d * d
        s = s_in.to(REAL)
        s += s_new * (squared - s)
    m = m_prev + take_m * deviation
    v = v_in.to(REAL)
    v += take_v * (g * g - v)
    m_hat = m * m_debias
    update = _divide(m_hat, tl.maximum(tl.sqrt(v * v_debias) + eps, TINY))  # no 0/0 where eps is 0
    if GATE > 0:
        if not HAS_S:
            s = tl.maximum((v - m * m) * over_beta, 0.0)
        s_hat = s * s_debias
        power = g * g if BATCH_SIGNAL else m_hat * m_hat
        if BATCH_SIGNAL and SKIP:
            power = tl.where(ok, power, 0.0)
        if GATE == 2:
            q = tl.where(power > alpha * s_hat, 1.0, 0.0).to(REAL)
        else:
            part = power
            if GATE == 1:
                part = tl.maximum(power - alpha * s_hat, 0.0)
            q = _divide(part, tl.maximum(part + (strength * s_hat + gate_eps), TINY))
        if MAY_BE_GIVEN:
            q = tl.where(gate_given != 0.0, gate_value, q)
        gate = q
        if NORMALIZED:
            q = 0.5 + 0.5 * tl.minimum(q * inverse, 1.0)
        update = q * update
    decay = weight_decay
    if GATED_DECAY:
        decay = weight_decay * q
    w_new = w - lr * (update + decay * w)  # (1 - lr·decay)·w would round 1 - lr·decay the same way at every step

    V_LOW: tl.constexpr = v_ptr.dtype.element_ty == tl.bfloat16
    S_LOW: tl.constexpr = HAS_S and s_ptr.dtype.element_ty == tl.bfloat16
    if V_LOW or S_LOW:
        noise = _hash32(offsets.to(tl.uint32) + noise_start)
    w_out = w_new.to(w_ptr.dtype.element_ty)
    v_out = _round_stochastically(v, noise & 0xFFFF) if V_LOW else v
    if HAS_S:
        s_out = _round_stochastically(s, noise >> 16) if S_LOW else s
    _store(w_ptr + offsets, w_out, mask, MASKED)
    _store(m_ptr + offsets, m, mask, MASKED)
    _store(v_ptr + offsets, v_out, mask, MASKED)
    if HAS_S:
        _store(s_ptr + offsets, s_out, mask, MASKED)
    if AVERAGED:  # as torch.lerp
        seen = w_out.to(REAL)
        away = seen - mean
        moved = tl.where(average < 0.5, mean + average * away, seen - (1.0 - average) * away)
        _store(x_ptr + offsets, moved, mask, MASKED)
    if NORMALIZED:
        return tl.where(mask, gate, 0.0)
    return g  # not used


@triton.jit
def _finish(scale, sums, unit, programs, n, q_sum):
    """Adds up the sums of a tensor; the last of its programs writes the mean and leaves the sums at zero.

    Sums are whole numbers of 1/unit, so that they do not depend on the order in which programs finish.
    """
    tl.atomic_add(sums, (q_sum.to(tl.float64) * unit).to(tl.int64), sem="relaxed")
    before = tl.atomic_add(sums + 1, 1, sem="acq_rel")
    if before == programs - 1:
        zero = tl.zeros((), tl.int64)
        total = tl.atomic_xchg(sums, zero, sem="acq_rel")
        tl.atomic_xchg(sums + 1, zero, sem="acq_rel")
        tl.store(scale + 1, tl.load(scale))
        tl.store(scale, total.to(tl.float64) / (unit * n.to(tl.float64)))


@triton.jit
def _tensor_pointer(entry, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(entry).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def fused_step_kernel(
    w_ptr, g_ptr, m_ptr, v_ptr, s_ptr, x_ptr, n, key, records, rows, notes, sums, found_inf, left_out,
    g_scale, center, s_new, take_m, take_v, over_beta, m_debias, v_debias, s_debias, alpha, strength,
    gate_eps, gate_given, gate_value, lr, eps, weight_decay, step, average,
    W: tl.constexpr, V: tl.constexpr, S: tl.constexpr, REAL: tl.constexpr, GATE: tl.constexpr, HAS_S: tl.constexpr,
    OBSERVED: tl.constexpr, BATCH_SIGNAL: tl.constexpr, PLAIN: tl.constexpr, MAY_BE_GIVEN: tl.constexpr,
    GATED_DECAY: tl.constexpr, SKIP: tl.constexpr, SINGLE: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr,
    EVEN: tl.constexpr, SCALED: tl.constexpr, NORMALIZED: tl.constexpr, AVERAGED: tl.constexpr, TINY: tl.constexpr,
    LARGEST: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS_: tl.constexpr, RECORD_: tl.constexpr,
    NOTES_: tl.constexpr,
):  # fmt: skip
    """Each program updates some blocks of one tensor, one after the other.

    SINGLE: there is one tensor, given by its pointers; else the block's record says where it lies.
    ROWS: the coefficients lie on the device, one row per tensor (counters that the host must not wait for); else they
    are the arguments, the same for all tensors. PLAIN: gradients are used as they are, and s is
    centred on the raw m. MAY_BE_GIVEN: the gate may be decided in advance. NORMALIZED: the gate is relative to its
    mean in the last step. AVERAGED: x is the mean of the weights, and follows them.
    """
    if SCALED:
        if tl.load(found_inf) != 0.0:
            return
    tensor = tl.zeros((), tl.int64)
    if SINGLE:
        start = tl.program_id(0).to(tl.int64) * (BLOCK * BLOCKS)
        w_ptr += start
        g_ptr += start
        m_ptr += start
        v_ptr += start
        s_ptr += start
        x_ptr += start
        room = tl.minimum(n - start, BLOCK * BLOCKS).to(tl.int32)
    else:
        record = records + tl.program_id(0).to(tl.int64) * RECORD_
        w_ptr = _tensor_pointer(record + 0, W, ALIGNED)
        g_ptr = _tensor_pointer(record + 1, W, ALIGNED)
        m_ptr = _tensor_pointer(record + 2, REAL, ALIGNED)
        v_ptr = _tensor_pointer(record + 3, V, ALIGNED)
        s_ptr = _tensor_pointer(record + 4, S, ALIGNED)
        x_ptr = _tensor_pointer(record + 5, REAL, ALIGNED)
        place = tl.load(record + 6)
        tensor = place >> 32
        room = place.to(tl.int32)
        place = tl.load(record + 7)
        key = (place >> 32).to(tl.uint32)
        start = place
    if ROWS:
        row = rows + tensor * COLUMNS_
        g_scale = tl.load(row + 0)
        center = tl.load(row + 1)
        s_new = tl.load(row + 2)
        take_m = tl.load(row + 3)
        take_v = tl.load(row + 4)
        over_beta = tl.load(row + 5)
        m_debias = tl.load(row + 6)
        v_debias = tl.load(row + 7)
        s_debias = tl.load(row + 8)
        alpha = tl.load(row + 9)
        strength = tl.load(row + 10)
        gate_eps = tl.load(row + 11)
        gate_given = tl.load(row + 12)
        gate_value = tl.load(row + 13)
        lr = tl.load(row + 14)
        eps = tl.load(row + 15)
        weight_decay = tl.load(row + 16)
        step = tl.load(row + 17)
        average = tl.load(row + 18)
    noise_start = _hash32(step.to(tl.int64).to(tl.uint32) + key.to(tl.uint32)) + start.to(tl.uint32)
    offsets = tl.arange(0, BLOCK)
    if EVEN:  # sizes are multiples of 16, so that a mask does not cut through a vector load
        room = tl.multiple_of(room, 16)
    inverse = 1.0
    if NORMALIZED:
        note = notes + tensor * NOTES_
        scale = tl.load(note).to(tl.pointer_type(tl.float64))
        inverse = 1.0 / tl.maximum(tl.load(scale).to(REAL), TINY)
        q_sum = tl.zeros((BLOCK,), REAL)
    for at in range(0, BLOCK if BLOCKS == 1 else room, BLOCK):
        whole = False if EVEN else at + BLOCK <= room
        if whole:
            q = _span(
                w_ptr, g_ptr, m_ptr, v_ptr, s_ptr, x_ptr, at + offsets, room, noise_start, left_out, inverse,
                g_scale, center, s_new, take_m, take_v, over_beta, m_debias, v_debias, s_debias, alpha,
                strength, gate_eps, gate_given, gate_value, lr, eps, weight_decay, average,
                GATE, HAS_S, OBSERVED, BATCH_SIGNAL, PLAIN, MAY_BE_GIVEN, GATED_DECAY, SKIP, NORMALIZED, AVERAGED,
                TINY, LARGEST, False,
            )  # fmt: skip
        else:
            q = _span(
                w_ptr, g_ptr, m_ptr, v_ptr, s_ptr, x_ptr, at + offsets, room, noise_start, left_out, inverse,
                g_scale, center, s_new, take_m, take_v, over_beta, m_debias, v_debias, s_debias, alpha,
                strength, gate_eps, gate_given, gate_value, lr, eps, weight_decay, average,
                GATE, HAS_S, OBSERVED, BATCH_SIGNAL, PLAIN, MAY_BE_GIVEN, GATED_DECAY, SKIP, NORMALIZED, AVERAGED,
                TINY, LARGEST, True,
            )  # fmt: skip
        if NORMALIZED:
            q_sum += q
    if NORMALIZED:
        unit = (tl.full((), 1, tl.int64) << tl.load(note + 2)).to(tl.float64)
        _finish(scale, sums + tensor * NOTES_, unit, tl.load(note + 3), tl.load(note + 1), tl.sum(q_sum))
