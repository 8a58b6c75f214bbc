/* One pass of the population-risk step over a list of tensors. Compiled per variant with -D flags:
 *   W_TYPE   0 float32, 1 float64, 2 bfloat16   (weights and gradients)
 *   V_BF16   v is bfloat16        S_KIND   0 none (no gate, or s follows from m and v), 1 like the math, 2 bfloat16
 *   GATE     0 none, 1 soft, 2 hard, 3 snr      OBSERVED   variance given from outside
 *   BATCH_SIGNAL, GATED_DECAY, SKIP_NONFINITE   0 or 1
 * The lines follow optim/rules/_population.py; the coefficients come from optim/rules/_coefficients.py. */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if W_TYPE == 1
typedef double real;
#define LARGEST 0x1p510 /* usable_limit of optim/rules/_population.py */
#define SMALLEST DBL_MIN
#define SQRT sqrt
#define FABS fabs
#else
typedef float real;
#define LARGEST 0x1p62f
#define SMALLEST FLT_MIN
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

typedef struct { int64_t w, g, m, v, s, x, n, coefficients, seed; } item;
typedef struct {
    double g_scale, center, s_new, take_m, take_v, over_beta, m_debias, v_debias, s_debias, alpha, strength, gate_eps,
        gate_given, gate_value, lr, eps, weight_decay, step;
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

static int64_t span(const item *it, const coefficients *k, int64_t lo, int64_t hi) {
    weight *restrict W = (weight *)it->w;
    const weight *restrict G = (const weight *)it->g;
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
    const uint32_t seed = (uint32_t)it->seed;
    (void)center, (void)s_keep, (void)s_new, (void)over_beta, (void)alpha, (void)strength, (void)gate_eps;
    (void)seed, (void)s_debias, (void)gate_value, (void)gate_given;
    int left_out = 0;
#pragma omp simd reduction(+ : left_out)
    for (int64_t i = lo; i < hi; ++i) {
        const real g = (real)LOAD_W(G[i]) * g_scale, w = LOAD_W(W[i]);
        const real m_prev = M[i], v_prev = LOAD_V(V[i]);
        const real m = m_prev + take_m * (g - m_prev);
        const real v = beta2 * v_prev + take_v * (g * g);
        const real m_hat = m * m_debias;
        real q = 1;
#if GATE
#if S_KIND
        const real s_prev = LOAD_S(S[i]);
#if OBSERVED
        const real s = s_keep * s_prev + s_new * X[i];
#else
        const real d = g - center * m_prev;
        const real s = s_keep * s_prev + s_new * (d * d);
#endif
#else
        const real difference = (v - m * m) * over_beta;
        const real s = difference > 0 ? difference : 0;
#endif
        const real s_hat = s * s_debias;
#if BATCH_SIGNAL
        const real power = g * g;
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
#if SKIP_NONFINITE
        const int ok = FABS(g) < LARGEST;
        left_out += !ok;
#define KEEP(new, old) pick(ok, new, old)
#else
#define KEEP(new, old) (new)
#endif
        W[i] = STORE_W(KEEP(w_new, w));
        M[i] = KEEP(m, m_prev);
        V[i] = STORE_V(KEEP(v, v_prev));
#if S_KIND
        S[i] = STORE_S(KEEP(s, s_prev));
#endif
    }
    return left_out;
}

/* The tensors laid end to end are cut into equal pieces, several per thread, so that a thread that is held up does not
 * hold up the others. Returns how many gradient entries were left out. */
int64_t poprisk_step(int64_t count, const item *items, const coefficients *table, int64_t threads) {
    int64_t total = 0, left_out = 0;
    for (int64_t j = 0; j < count; ++j) total += items[j].n;
    if (threads < 1 || total < 32768) threads = 1;
    const int64_t most = 1 + total / 65536, wanted = 8 * threads;
    const int64_t pieces = threads == 1 ? 1 : (wanted < most ? wanted : most);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) reduction(+ : left_out) if (threads > 1)
    for (int64_t piece = 0; piece < pieces; ++piece) {
        int64_t begin = total * piece / pieces / 64 * 64, end = total * (piece + 1) / pieces / 64 * 64;
        if (piece == pieces - 1) end = total;
        int64_t offset = 0;
        for (int64_t j = 0; j < count && offset < end; offset += items[j++].n) {
            int64_t lo = begin > offset ? begin - offset : 0;
            int64_t hi = end - offset < items[j].n ? end - offset : items[j].n;
            if (lo < hi) left_out += span(&items[j], &table[items[j].coefficients], lo, hi);
        }
    }
    return left_out;
}
