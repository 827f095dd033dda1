/* top-k, top-p and min-p of one row: which ids stay.
 *
 * Only the best ids are ever put in order. Each block of 64 ids has its highest logit noted; the
 * k-th highest of those is a bar that at least k ids reach, and blocks below it are not read again.
 * If the ids above a bar do not settle the question, a lower one does; the last bar takes the row.
 *
 * Weights are exp(z/T - peak/T): quotients in float32, the rest in double as in the reference. Sums
 * run in that order, a whole row's total in 32 lanes (id i in lane i % 32).
 */
#define DW (VW / 2) /* doubles in a vector */
#define DLANES 32
#define NEGLIGIBLE -46.0f /* e^-46: a whole vocabulary of these is below the total's rounding */

typedef float vh __attribute__((vector_size(DW * 4)));
typedef int32_t vhi __attribute__((vector_size(DW * 4)));
typedef float vh_mem __attribute__((vector_size(DW * 4), aligned(4), may_alias));
typedef double vd __attribute__((vector_size(DW * 8)));
typedef int64_t vdi __attribute__((vector_size(DW * 8)));
typedef double vd_mem __attribute__((vector_size(DW * 8), aligned(8), may_alias));

#if ISA == 2
INLINE vd vdset(double x) { return (vd)_mm512_set1_pd(x); }
INLINE vd vdfma(vd a, vd b, vd c) {
    return (vd)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
}
/* a > b ? a : b, also for NaN */
INLINE vd vdmax(vd a, vd b) { return (vd)_mm512_max_pd((__m512d)a, (__m512d)b); }
INLINE vh vhmax(vh a, vh b) { return (vh)_mm256_max_ps((__m256)a, (__m256)b); }
#elif ISA == 1
INLINE vd vdset(double x) { return (vd)_mm256_set1_pd(x); }
INLINE vd vdfma(vd a, vd b, vd c) {
    return (vd)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
}
INLINE vd vdmax(vd a, vd b) { return (vd)_mm256_max_pd((__m256d)a, (__m256d)b); }
INLINE vh vhmax(vh a, vh b) { return (vh)_mm_max_ps((__m128)a, (__m128)b); }
#else
INLINE vd vdset(double x) { return (vd){x, x}; }
INLINE vd vdfma(vd a, vd b, vd c) { return a * b + c; }
INLINE vd vdmax(vd a, vd b) {
    const vdi m = (vdi)(a > b);
    return (vd)((m & (vdi)a) | (~m & (vdi)b));
}
INLINE vh vhmax(vh a, vh b) {
    const vhi m = (vhi)(a > b);
    return (vh)((m & (vhi)a) | (~m & (vhi)b));
}
#endif

/* e^x for x <= 0 within 1 ulp; below -708 the value there (3e-308), which is as good as 0 here:
 * it changes no sum that holds the best id's 1, and no float32 min_p is smaller. NaN for NaN. */
INLINE vd vdexp(vd x) {
    static const double q[] = {
        0x1.289185613a3d6p-22, 0x1.71de0dae63bb3p-19, 0x1.a019b90d2ae7ap-16, 0x1.a01a01a7c41d5p-13,
        0x1.6c16c1788bd90p-10, 0x1.11111111109b3p-7,  0x1.5555555553d63p-5,  0x1.5555555555556p-3,
        0x1p-1};
    const vd magic = vdset(0x1.8p52); /* adding it rounds to an integer */
    const vd c = vdmax(vdset(-708.0), x); /* in this order a NaN comes through */
    const vd t = vdfma(c, vdset(0x1.71547652b82fep+0), magic), n = t - magic;
    vd r = vdfma(n, vdset(-0x1.62e42fefa3800p-1), c);
    r = vdfma(n, vdset(-0x1.ef35793c76730p-45), r);
    vd p = vdset(0x1.af38a9b0ec855p-26);
#pragma GCC unroll 9
    for (int i = 0; i < 9; i++) p = vdfma(p, r, vdset(q[i]));
    p = vdfma(p * r, r, r) + vdset(1.0);
    return p * (vd)((((vdi)t - (vdi)magic) + 1023) << 52);
}

INLINE vh vhset(float x) {
    vh r;
    for (int i = 0; i < DW; i++) r[i] = x;
    return r;
}

/* exp(z/T - peak/T) of DW logits; 1 where z is the peak, even an infinite one; a NaN is -inf.
 * `finite`: peak/T is, so that the difference at the peak is 0 by itself. */
INLINE vd weight_of(vh z, vh t, vh peak, vh scaled, const int finite) {
    z = vhmax(z, vhset(-INFINITY));
    vh distance = z / t - scaled;
    if (!finite) distance = (vh)(~(vhi)(z == peak) & (vhi)distance);
    return vdexp(__builtin_convertvector(distance, vd));
}

typedef struct {
    float t, peak;
    double top_p, min_p;
    int64_t top_k, v; /* top_k 0: all */
} filter_row;

static void weights_of(const filter_row *p, const float *z, double *w) {
    const vh t = vhset(p->t), peak = vhset(p->peak), scaled = vhset(p->peak / p->t);
    for (int i = 0; i < LANES; i += DW)
        *(vd_mem *)(w + i) = weight_of((vh) * (const vh_mem *)(z + i), t, peak, scaled, 0);
}

INLINE double sum_weights(const filter_row *p, const float *z, const float *tops,
                          const int finite) {
    const vh t = vhset(p->t), peak = vhset(p->peak), scaled = vhset(p->peak / p->t);
    vd acc[DLANES / DW];
    for (int l = 0; l < DLANES / DW; l++) acc[l] = vdset(0.0);
    for (int64_t b = 0; b * LANES < p->v; b++) {
        if (tops[b] < p->peak && tops[b] / p->t - p->peak / p->t < NEGLIGIBLE) continue;
        const float *x = z + b * LANES;
        float pad[LANES];
        if (p->v - b * LANES < LANES) {
            for (int i = 0; i < LANES; i += VW) vstore(pad + i, vload_pad(z, b * LANES + i, p->v));
            x = pad;
        }
#pragma GCC unroll 2
        for (int i = 0; i < LANES; i += DLANES)
#pragma GCC unroll 16
            for (int l = 0; l < DLANES / DW; l++) {
                const vh y = (vh) * (const vh_mem *)(x + i + l * DW);
                acc[l] = acc[l] + weight_of(y, t, peak, scaled, finite);
            }
    }
    double lanes[DLANES], sum = 0.0;
    for (int l = 0; l < DLANES / DW; l++) *(vd_mem *)(lanes + l * DW) = acc[l];
    for (int l = 0; l < DLANES; l++) sum += lanes[l];
    return sum;
}

/* The sum over the row; `tops` are the highest logits of the blocks. */
static double total_weight(const filter_row *p, const float *z, const float *tops) {
    if (p->peak == -INFINITY) return (double)p->v; /* all alike */
    return isfinite(p->peak / p->t) ? sum_weights(p, z, tops, 1) : sum_weights(p, z, tops, 0);
}

/* A logit (no NaN) and its id as one number; ascending: the higher logit, then the lower id. */
INLINE uint64_t key_of(float z, int64_t id) {
    int32_t u;
    z = z + 0.0f; /* -0 ties with 0 */
    memcpy(&u, &z, 4);
    u ^= ~(u >> 31) & 0x7fffffff;
    return (uint64_t)(uint32_t)u << 32 | (uint64_t)id;
}
INLINE float key_logit(uint64_t key) {
    int32_t u = (int32_t)(key >> 32);
    float z;
    u ^= ~(u >> 31) & 0x7fffffff;
    memcpy(&z, &u, 4);
    return z;
}

/* Ascending by the upper half; the lower halves ascend already. The result is in a or in b. */
static uint64_t *sort_keys(uint64_t *a, uint64_t *b, int64_t n) {
    uint32_t count[4][256];
    memset(count, 0, sizeof count);
    for (int64_t i = 0; i < n; i++)
        for (int d = 0; d < 4; d++) count[d][a[i] >> (32 + 8 * d) & 255]++;
    for (int d = 0; d < 4 && n > 0; d++) {
        const int shift = 32 + 8 * d;
        if (count[d][a[0] >> shift & 255] == n) continue;
        uint32_t at = 0;
        for (int j = 0; j < 256; j++) {
            const uint32_t c = count[d][j];
            count[d][j] = at;
            at += c;
        }
        for (int64_t i = 0; i < n; i++) b[count[d][a[i] >> shift & 255]++] = a[i];
        uint64_t *swap = a;
        a = b, b = swap;
    }
    return a;
}

/* Keys of all ids with a logit of at least `bar`, ids ascending; returns their number. */
static int64_t collect(const filter_row *p, const float *z, const float *tops, float bar,
                       uint64_t *keys) {
    int64_t n = 0;
    for (int64_t b = 0; b * LANES < p->v; b++) {
        if (tops[b] < bar) continue;
        const int64_t end = (b + 1) * LANES < p->v ? (b + 1) * LANES : p->v;
        for (int64_t v = b * LANES; v < end; v += VW) {
            float x[VW];
            const vf y = vsel_ord(vload_pad(z, v, end), vset(-INFINITY));
            if (!vany_ge(y, vset(bar))) continue;
            vstore(x, y);
            for (int64_t j = 0; j < VW && v + j < end; j++) {
                keys[n] = key_of(x[j], v + j);
                n += x[j] >= bar;
            }
        }
    }
    return n;
}

/* How many of the n best ids stay, or -1 if ids behind them might. The total that top_p refers to
 * is the row's, or (total < 0) that of the top_k best. */
static int64_t survivors(const filter_row *p, const uint64_t *keys, int64_t n, double total) {
    double w[LANES], sum = 0.0;
    float z[LANES] = {0};
    const int64_t limit = p->top_k && p->top_k < n ? p->top_k : n;
    for (int pass = total < 0.0 && p->top_p < 1.0 ? 0 : 1; pass < 2; pass++) {
        sum = 0.0;
        for (int64_t i = 0; i < limit; i++) {
            const int j = (int)(i % LANES);
            if (j == 0) {
                for (int64_t l = 0; l < LANES && i + l < limit; l++) z[l] = key_logit(keys[i + l]);
                weights_of(p, z, w);
            }
            if (pass && i && !((p->top_p >= 1.0 || sum < p->top_p * total) && w[j] >= p->min_p))
                return i;
            sum += w[j];
        }
        if (!pass) total = sum;
    }
    return limit == p->top_k || n == p->v ? limit : -1;
}

/* scratch: FILTER_SCRATCH(v) numbers. */
static void filter_row_top(const filter_args *a, int64_t row, uint64_t *scratch) {
    const int64_t v = a->v, blocks = (v + LANES - 1) / LANES;
    const float *z = a->logits + row * a->stride;
    float *out = a->out + row * v, *tops = (float *)(scratch + 2 * v);
    filter_row p = {.t = a->temp[row], .top_p = a->top_p[row], .min_p = a->min_p[row],
                    .top_k = a->top_k[row] > 0 ? (a->top_k[row] < v ? a->top_k[row] : v) : 0,
                    .v = v, .peak = -INFINITY};
    if (p.t == 0.0f || !(p.top_k || p.top_p < 1.0 || p.min_p > 0.0)) {
        memcpy(out, z, (size_t)v * sizeof(float));
        return;
    }
    const vf ninf = vset(-INFINITY);
    for (int64_t b = 0; b < blocks; b++) {
        vf top = ninf;
        for (int i = 0; i < LANES; i += VW) {
            if (b * LANES + i >= v) break;
            top = vmax(vload_pad(z, b * LANES + i, v), top); /* a NaN leaves top as it is */
        }
        tops[b] = lanes_max(top);
        if (tops[b] > p.peak) p.peak = tops[b];
    }
    double total = -1.0;
    if (!p.top_k && p.top_p < 1.0) total = total_weight(&p, z, tops);
    for (int64_t b = 0; b < blocks; b++) scratch[b] = key_of(tops[b], b);
    uint64_t *order = sort_keys(scratch, scratch + v, blocks);
    int64_t at[4] = {64, blocks / 2, blocks - blocks / 32, v}, kept = -1;
    float bar[4];
    if (p.top_k) at[0] = p.top_k;
    for (int i = 0; i < 4; i++)
        bar[i] = at[i] > 0 && at[i] <= blocks ? key_logit(order[at[i] - 1]) : -INFINITY;
    uint64_t *keys = scratch;
    for (int i = 0; kept < 0; i = p.top_k ? 3 : i + 1) {
        const int64_t n = collect(&p, z, tops, bar[i], scratch);
        keys = sort_keys(scratch, scratch + v, n);
        kept = survivors(&p, keys, n, total);
    }
    for (int64_t i = 0; i < v; i += VW) vstore_n(out, DT_F32, i, v - i, ninf);
    for (int64_t i = 0; i < kept; i++) {
        const uint32_t id = (uint32_t)keys[i];
        memcpy(out + id, z + id, sizeof(float)); /* a NaN too stays what it was */
    }
}
