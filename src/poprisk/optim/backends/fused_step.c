/* One pass of the population-risk step over a list of tensors. Compiled per variant with -D flags:
 *   W_TYPE   0 float32, 1 float64, 2 bfloat16   (weights and gradients)
 *   V_BF16   v is bfloat16        S_KIND   0 none (no gate, or s follows from m and v), 1 like the math, 2 bfloat16
 *   GATE     0 none, 1 soft, 2 hard, 3 snr      OBSERVED   variance given from outside
 *   BATCH_SIGNAL, GATED_DECAY, SKIP_NONFINITE   0 or 1
 *   NORMALIZED   the gate is in AdamW's units (optim/rules/_relative.py)      AVERAGED   means of the weights follow
 * The lines follow optim/rules/_population.py; the coefficients come from optim/rules/_coefficients.py. */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if W_TYPE == 1
typedef double real;
#define LARGEST 0x1p510 /* usable_limit of optim/rules/_population.py */
#define SMALLEST DBL_MIN
#define MOST DBL_MAX
#define SQRT sqrt
#define FABS fabs
#else
typedef float real;
#define LARGEST 0x1p62f
#define SMALLEST FLT_MIN
#define MOST FLT_MAX
#define SQRT sqrtf
#define FABS fabsf
#endif
#if W_TYPE == 2
typedef uint16_t weight;
#else
typedef real weight;
#endif
#if V_BF16
typedef uint16_t vmoment;
#else
typedef real vmoment;
#endif
#if S_KIND == 2
typedef uint16_t smoment;
#else
typedef real smoment;
#endif

/* Addresses of w, m, v, s, the given variance, the mean of the weights and the scale of a normalized gate (0 where there
 * is none), then the number of elements, the row of the coefficients, the tensor's key and the place of its first
 * element, for stochastic rounding. */
typedef struct { int64_t w, m, v, s, x, mean, scale, n, coefficients, key, offset; } item;
typedef struct {
    double g_scale, center, s_new, take_m, take_v, over_beta, m_debias, v_debias, s_debias, alpha, strength, gate_eps,
        gate_given, gate_value, lr, eps, weight_decay, step, average;
} coefficients; /* `columns` of optim/backends/_launch.py */

static inline float widen(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline uint32_t bits_of(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}
static inline uint16_t nearest(float f) {
    uint32_t u = bits_of(f);
    uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
    return (uint16_t)(f == f ? rounded : 0x7FC0u);
}
/* up with probability equal to the discarded fraction; infinities and NaN keep their value */
static inline uint16_t stochastic(float f, uint32_t noise) {
    uint32_t u = bits_of(f);
    return (uint16_t)((FABS(f) <= FLT_MAX ? u + noise : u) >> 16);
}
static inline uint32_t hash32(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ (x >> 16);
}

#if W_TYPE == 2
#define LOAD_W(p) widen(p)
#define STORE_W(x) nearest(x)
#else
#define LOAD_W(p) (p)
#define STORE_W(x) (x)
#endif
#if V_BF16
#define LOAD_V(p) widen(p)
#define STORE_V(x) stochastic(x, noise & 0xFFFFu)
#else
#define LOAD_V(p) (p)
#define STORE_V(x) (x)
#endif
#if S_KIND == 2
#define LOAD_S(p) widen(p)
#define STORE_S(x) stochastic(x, noise >> 16)
#else
#define LOAD_S(p) (p)
#define STORE_S(x) (x)
#endif

/* ok ? a : b, by bits: as a plain conditional it becomes masked stores, which cost a third of the speed */
static inline real pick(int ok, real a, real b) {
#if W_TYPE == 1
    uint64_t x, y, mask = -(uint64_t)ok;
#else
    uint32_t x, y, mask = -(uint32_t)ok;
#endif
    memcpy(&x, &a, sizeof x);
    memcpy(&y, &b, sizeof y);
    x = (x & mask) | (y & ~mask);
    memcpy(&a, &x, sizeof x);
    return a;
}

/* Elements lo to hi of a tensor; adds up its gates. */
static int64_t span(const item *it, int64_t gradient, const coefficients *k, int64_t lo, int64_t hi, double *sums) {
    weight *restrict W = (weight *)it->w;
    const weight *restrict G = (const weight *)gradient;
    real *restrict M = (real *)it->m;
    vmoment *restrict V = (vmoment *)it->v;
#if S_KIND
    smoment *restrict S = (smoment *)it->s;
#endif
#if OBSERVED
    const real *restrict X = (const real *)it->x;
#endif
    const real g_scale = k->g_scale, center = k->center, s_keep = 1.0 - k->s_new, s_new = k->s_new;
    const real take_m = k->take_m, beta2 = 1.0 - k->take_v, take_v = k->take_v, over_beta = k->over_beta;
    const real m_debias = k->m_debias, v_debias = k->v_debias, s_debias = k->s_debias;
    const real alpha = k->alpha, strength = k->strength, gate_eps = k->gate_eps;
    const real gate_value = k->gate_value, lr = k->lr, eps = k->eps, weight_decay = k->weight_decay;
    const int gate_given = k->gate_given != 0;
    const uint32_t seed = hash32((uint32_t)(int64_t)k->step + (uint32_t)it->key) + (uint32_t)it->offset;
#if AVERAGED
    real *restrict A = (real *)it->mean;
    const real average = k->average, rest = 1.0 - k->average;
    const int few = k->average < 0.5;
#endif
#if NORMALIZED
    const double *scale = (const double *)it->scale;
    const real inverse = scale[0] > 1.0 / MOST ? 1.0 / scale[0] : MOST;
    real q_sum = 0;
#endif
    (void)center, (void)s_keep, (void)s_new, (void)over_beta, (void)alpha, (void)strength, (void)gate_eps;
    (void)seed, (void)s_debias, (void)gate_value, (void)gate_given, (void)sums;
    int left_out = 0;
#if NORMALIZED
#pragma omp simd reduction(+ : left_out, q_sum)
#else
#pragma omp simd reduction(+ : left_out)
#endif
    for (int64_t i = lo; i < hi; ++i) {
        const real g = (real)LOAD_W(G[i]) * g_scale, w = LOAD_W(W[i]);
        const real m_prev = M[i], v_prev = LOAD_V(V[i]);
#if SKIP_NONFINITE /* kept before the gate, whose mean covers every coordinate */
        const int ok = FABS(g) < LARGEST;
        left_out += !ok;
#define KEEP(new, old) pick(ok, new, old)
#else
#define KEEP(new, old) (new)
#endif
        const real m = KEEP(m_prev + take_m * (g - m_prev), m_prev);
        const real v = KEEP(beta2 * v_prev + take_v * (g * g), v_prev);
        const real m_hat = m * m_debias;
        real q = 1;
#if GATE
#if S_KIND
        const real s_prev = LOAD_S(S[i]);
#if OBSERVED
        const real s = KEEP(s_keep * s_prev + s_new * X[i], s_prev);
#else
        const real d = g - center * m_prev;
        const real s = KEEP(s_keep * s_prev + s_new * (d * d), s_prev);
#endif
#else
        const real difference = (v - m * m) * over_beta;
        const real s = difference > 0 ? difference : 0;
#endif
        const real s_hat = s * s_debias;
#if BATCH_SIGNAL
        const real power = KEEP(g * g, 0);
#else
        const real power = m_hat * m_hat;
#endif
#if GATE == 2
        q = power > alpha * s_hat ? (real)1 : (real)0;
#else
#if GATE == 1
        const real excess = power - alpha * s_hat;
        const real part = excess > 0 ? excess : 0;
#else
        const real part = power;
#endif
        const real whole = part + (strength * s_hat + gate_eps);
        q = part / (whole > SMALLEST ? whole : SMALLEST);
#endif
        q = gate_given ? gate_value : q;
#if NORMALIZED
        const real share = q * inverse, ratio = share < 1 ? share : (real)1;
        q_sum += q;
        q = (real)0.5 + (real)0.5 * ratio;
#endif
#endif
#if V_BF16 || S_KIND == 2
        const uint32_t noise = hash32((uint32_t)i + seed);
#endif
#if GATED_DECAY
        const real decay = weight_decay * q;
#else
        const real decay = weight_decay;
#endif
        const real root = SQRT(v * v_debias) + eps; /* zero where eps is, and there never was a gradient */
        const real w_new = w - lr * (q * (m_hat / (root > SMALLEST ? root : SMALLEST)) + decay * w);
        const weight w_out = STORE_W(KEEP(w_new, w));
        W[i] = w_out;
        M[i] = m;
        V[i] = STORE_V(v);
#if S_KIND
        S[i] = STORE_S(s);
#endif
#if AVERAGED /* as torch.lerp */
        const real seen = LOAD_W(w_out), mean = A[i], away = seen - mean;
        A[i] = few ? mean + average * away : seen - rest * away;
#endif
    }
#if NORMALIZED
    *sums += q_sum;
#endif
    return left_out;
}

enum { BLOCK = 4096 };

/* Elements lo to hi, where lo is a multiple of BLOCK: block by block where sums are kept, each in a place of its own. */
static int64_t stretch(const item *it, int64_t gradient, const coefficients *k, int64_t lo, int64_t hi, double *sums) {
#if NORMALIZED
    int64_t left_out = 0;
    for (int64_t at = lo; at < hi; at += BLOCK)
        left_out += span(it, gradient, k, at, at + BLOCK < hi ? at + BLOCK : hi, sums + at / BLOCK);
    return left_out;
#else
    return span(it, gradient, k, lo, hi, sums);
#endif
}

/* Where a tensor of n elements is cut instead of at x. */
static int64_t cut(int64_t x, int64_t n) {
    return x <= 0 ? 0 : x >= n ? n : x / BLOCK * BLOCK;
}

/* The tensors laid end to end are cut into equal pieces, several per thread, so that a thread that is held up does not
 * hold up the others. Cuts are between blocks of a tensor, and sums are added up in the order of the blocks, so that
 * they do not depend on the number of threads. Returns how many gradient entries were left out, or -1 if there is no
 * memory for the sums. */
int64_t poprisk_step(int64_t count, const item *items, const int64_t *gradients, const coefficients *table,
                     int64_t threads) {
    int64_t total = 0, left_out = 0, blocks = 0;
    for (int64_t j = 0; j < count; ++j) total += items[j].n, blocks += (items[j].n + BLOCK - 1) / BLOCK;
    double *sums = NORMALIZED ? calloc(blocks + 1, sizeof(double)) : NULL;
    if (NORMALIZED && !sums) return -1;
    if (threads < 1 || total < 32768) threads = 1;
    const int64_t most = 1 + total / 65536, wanted = 8 * threads;
    const int64_t pieces = threads == 1 ? 1 : (wanted < most ? wanted : most);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) reduction(+ : left_out) if (threads > 1)
    for (int64_t piece = 0; piece < pieces; ++piece) {
        const int64_t begin = total * piece / pieces, end = total * (piece + 1) / pieces;
        int64_t offset = 0, first = 0;
        for (int64_t j = 0; j < count && offset < end; ++j) {
            const int64_t n = items[j].n;
            const int64_t lo = cut(begin - offset, n), hi = cut(end - offset, n);
            const coefficients *k = &table[items[j].coefficients];
            if (lo < hi) left_out += stretch(&items[j], gradients[j], k, lo, hi, NORMALIZED ? sums + first : NULL);
            offset += n;
            first += (n + BLOCK - 1) / BLOCK;
        }
    }
#if NORMALIZED
    const double *next = sums;
    for (int64_t j = 0; j < count; ++j) {
        double *scale = (double *)items[j].scale, q = 0;
        for (int64_t at = 0; at < items[j].n; at += BLOCK) q += *next++;
        scale[1] = scale[0];
        scale[0] = items[j].n ? q / items[j].n : 0;
    }
    free(sums);
#endif
    return left_out;
}
