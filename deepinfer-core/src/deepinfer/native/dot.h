/* int8 products in integers: C[mr, panels] (+)= X[mr, k] * W[k, panels], k a multiple of GROUP.
 *
 * Every element is one chain over the groups of 32 k, ascending: acc = fma(s, xs * ws, acc), where
 * s is the exact sum of the group's 32 products of int8 values and xs, ws are its two scales. The
 * sum is an integer, so neither its order nor the instruction set shows.
 */
typedef struct {
    const int8_t *x;       /* row i at x + i * ldx */
    int64_t ldx;
    const float *xs;       /* scales of row i at xs + i * ldx / GROUP */
    const int32_t *fix;    /* -128 times the sum of each group of x, laid out as xs */
    const int8_t *w;       /* panel p at w + p * pstride: [k / 4][NR][4] */
    const uint16_t *ws;    /* panel p at ws + p * pstride / GROUP: [k / GROUP][NR] */
    int64_t pstride, k;
    const int8_t *ahead;   /* laid out as w: fetched into the cache meanwhile */
    float *c;
    int64_t ldc;
    int first;
} dot_args;

#define PV (NR / VW)

/* acc += the products of w (VW columns, 4 k each) and four values of a row, at x. */
INLINE vi dot4(vi acc, vi w, const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
#if ISA == 2 /* of unsigned and signed bytes: w is raised by 128, which `fix` takes off again */
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(four));
#elif ISA == 1 /* |w| times x with the sign of w; pairs stay below 2^15, as no value is -128 */
    __m256i a = _mm256_abs_epi8((__m256i)w), b = _mm256_sign_epi8(_mm256_set1_epi32(four), (__m256i)w);
    __m256i pairs = _mm256_maddubs_epi16(a, b);
    return acc + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
    int8_t v[VBYTES];
    memcpy(v, &w, sizeof v);
    for (int i = 0; i < VW; i++)
        for (int j = 0; j < 4; j++) acc[i] += v[4 * i + j] * x[j];
    return acc;
#endif
}

INLINE void dot_run(const dot_args *t, const int cls, const int mr) {
    const int nv = PV << cls;
    const int64_t ldx = t->ldx, pstride = t->pstride;
    vf acc[12][4 * PV];
#pragma GCC unroll 16
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 16
        for (int v = 0; v < nv; v++)
            acc[i][v] = t->first ? vset(0.0f) : vload(t->c + i * t->ldc + v * VW);
    for (int64_t g = 0; g < t->k / GROUP; g++) {
        const int8_t *w = t->w + g * GROUP * NR, *ahead = t->ahead + g * GROUP * NR;
        vi sum[12][4 * PV];
#pragma GCC unroll 16
        for (int i = 0; i < mr; i++)
#pragma GCC unroll 16
            for (int v = 0; v < nv; v++)
                sum[i][v] = viset(ISA == 2 ? t->fix[i * ldx / GROUP + g] : 0);
#pragma GCC unroll 8
        for (int j = 0; j < GROUP; j += 4) {
            vi b[4 * PV];
#pragma GCC unroll 16
            for (int v = 0; v < nv; v++) {
                memcpy(&b[v], w + (v / PV) * pstride + j * NR + (v % PV) * VBYTES, VBYTES);
                if (ISA == 2) b[v] ^= viset((int32_t)0x80808080u);
            }
#pragma GCC unroll 4
            for (int v = 0; v < 1 << cls; v++)
                __builtin_prefetch(ahead + v * pstride + j * NR, 0, 2);
#pragma GCC unroll 16
            for (int i = 0; i < mr; i++)
#pragma GCC unroll 16
                for (int v = 0; v < nv; v++)
                    sum[i][v] = dot4(sum[i][v], b[v], t->x + i * ldx + g * GROUP + j);
        }
#pragma GCC unroll 16
        for (int v = 0; v < nv; v++) {
            vf scale = vload_scale(t->ws + (v / PV) * (pstride / GROUP) + g * NR + (v % PV) * VW);
#pragma GCC unroll 16
            for (int i = 0; i < mr; i++)
                acc[i][v] = vfma(vfrom_i32(sum[i][v]), vset(t->xs[i * ldx / GROUP + g]) * scale,
                                 acc[i][v]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 16
        for (int v = 0; v < nv; v++) vstore(t->c + i * t->ldc + v * VW, acc[i][v]);
}

#define DOT(cls, mr)                                                                            \
    static void dot_##cls##_##mr(const dot_args *t) { dot_run(t, cls, mr); }
#define DOT_NAME(cls, mr) dot_##cls##_##mr,
/* Column classes as in tile.h; rows of a step by the registers. */
#if ISA == 2
#define DOTS0(X) X(0, 1) X(0, 2) X(0, 3) X(0, 4) X(0, 5) X(0, 6) X(0, 7) X(0, 8) X(0, 9)        \
    X(0, 10) X(0, 11) X(0, 12)
#define DOTS1(X) X(1, 1) X(1, 2) X(1, 3) X(1, 4) X(1, 5) X(1, 6)
#define DOTS2(X) X(2, 1) X(2, 2) X(2, 3)
static const int DOT_ROWS[3] = {12, 6, 3};
#else
#define DOTS0(X) X(0, 1) X(0, 2)
#define DOTS1(X) X(1, 1)
#define DOTS2(X) X(2, 1)
static const int DOT_ROWS[3] = {2, 1, 0};
#endif
DOTS0(DOT)
DOTS1(DOT)
DOTS2(DOT)
static void (*const dots[3][13])(const dot_args *) = {
    {0, DOTS0(DOT_NAME)}, {0, DOTS1(DOT_NAME)}, {0, DOTS2(DOT_NAME)}};

/* mr rows times `panels` panels, as many at once as the registers allow. */
INLINE void dot_panels(dot_args t, int mr, int panels) {
    while (panels > 0) {
        const int cls = panels >= 4 && mr <= DOT_ROWS[2] ? 2 : panels >= 2 && mr <= DOT_ROWS[1];
        for (int i = 0; i < mr; i += DOT_ROWS[cls]) {
            dot_args part = t;
            part.x += i * t.ldx, part.xs += i * t.ldx / GROUP, part.fix += i * t.ldx / GROUP;
            part.c += i * t.ldc;
            dots[cls][mr - i < DOT_ROWS[cls] ? mr - i : DOT_ROWS[cls]](&part);
        }
        panels -= 1 << cls;
        t.w += t.pstride << cls, t.ahead += t.pstride << cls;
        t.ws += t.pstride / GROUP << cls;
        t.c += NR << cls;
    }
}
