/* The one inner loop of all matrix products but those with int8 weights: C[mr, cols] (+)= A[mr, k] * B[k, cols].
 *
 * Every element of C is one chain acc = fma(a[k], b[k], acc) over ascending k, whatever mr and
 * cols are and whichever instruction set runs; stopping after some k, storing C as fp32 and going
 * on later does not change it. A tile shape is therefore free to follow the number of rows.
 */
typedef struct {
    const float *a;   /* packed: [k][mr]; strided: row i at a + i * lda */
    int64_t lda;
    const void *b;    /* row k of panel p at b + p * pstride + k * ldb, in elements */
    int64_t ldb, pstride;
    int64_t k;
    const void *ahead; /* what is read next, laid out as b: fetched into the cache meanwhile, */
    int64_t ahead_step; /* this many bytes per k (fp32), so that several tiles share the work */
    float *c;
    int64_t ldc;
    int first;        /* start from zero instead of C */
    const char *const *fetch; /* strided only: at step j < fetches, bytes [fetch_from, fetch_to) */
    int64_t fetches, fetch_from, fetch_to; /* of fetch[j] are fetched into the cache */
} tile_args;

typedef void (*tile_fn)(const tile_args *);

enum { T_F32 = DT_F32, T_BF16 = DT_BF16, T_STRIDED = 2, TILE_TYPES = 3 };

/* Column classes 0, 1, 2 are 16, 32, 64 wide; MR_CLASS bounds the rows by the registers.
 * COL_CLASS is the class for many rows. */
#if ISA == 2
#define MR_MAX 12
#define COL_CLASS 1
static const int MR_CLASS[3] = {12, 12, 6};
#elif ISA == 1
#define MR_MAX 6
#define COL_CLASS 0
static const int MR_CLASS[3] = {6, 3, 1};
#else
#define MR_MAX 2
#define COL_CLASS 0
static const int MR_CLASS[3] = {2, 1, 1};
#endif

INLINE void tile_run(const tile_args *t, const int type, const int cls, const int mr) {
    const int nv = PV << cls;
    const int esize = type == T_BF16 ? 2 : 4;
    const int64_t k = t->k, lda = t->lda, ahead_step = t->ahead_step;
    const int64_t ldb = (type == T_F32 || type == T_STRIDED ? t->ldb : NR) * esize;
    const int64_t pstride = t->pstride * esize;
    const float *a = t->a;
    const char *b = (const char *)t->b, *ahead = (const char *)t->ahead;
    vf acc[MR_MAX][4 * PV]; /* fixed sizes: only these become registers */

#pragma GCC unroll 16
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 16
        for (int v = 0; v < nv; v++)
            acc[i][v] = t->first ? vset(0.0f) : vload(t->c + i * t->ldc + v * VW);

    const int narrow = type == T_BF16;
    const int64_t step = narrow ? GROUP : k;
    for (int64_t k0 = 0; k0 < k; k0 += step) {
        if (narrow && mr > 4)
#pragma GCC unroll 4
            for (int v = 0; v < 1 << cls; v++)
#pragma GCC unroll 16
                for (int i = 0; i < GROUP * NR * esize; i += 64)
                    __builtin_prefetch(ahead + v * pstride + i);
        const int64_t end = k - k0 < step ? k : k0 + step;
#pragma GCC unroll 4
        for (int64_t j = k0; j < end; j++) {
            vf bv[4 * PV];
#pragma GCC unroll 16
            for (int v = 0; v < nv; v++) {
                const char *p = b + (v / PV) * pstride + (v % PV) * VW * esize;
                if (type == T_BF16) bv[v] = vload_bf16((const uint16_t *)p);
                else bv[v] = vload((const float *)p);
            }
            b += ldb;
            if (narrow && mr <= 4) { /* few rows wait for memory: fetches spread evenly */
                const uint64_t line = (uint64_t)(j - k0) * (unsigned)(esize << cls) / 4;
#pragma GCC unroll 2
                for (unsigned i = 0; i < 1 || i < (unsigned)(esize << cls) / 4; i++) {
                    const uint64_t v = (line + i) / (8 * esize), at = (line + i) % (8 * esize);
                    __builtin_prefetch(ahead + (int64_t)v * pstride + at * 64, 0, 2);
                }
            }
            if (type == T_STRIDED && j < t->fetches)
                for (int64_t i = t->fetch_from; i < t->fetch_to; i += 64)
                    __builtin_prefetch(t->fetch[j] + i, 0, 2);
            if (type == T_F32 && mr > MR_CLASS[2]) { /* fewer in wide tiles: the processor does */
#pragma GCC unroll 4
                for (int v = 0; v < 1 << cls; v++) __builtin_prefetch(ahead + v * pstride);
                ahead += ahead_step;
            }
#pragma GCC unroll 16
            for (int i = 0; i < mr; i++) {
                vf av = vset(type == T_STRIDED ? a[i * lda + j] : a[j * mr + i]);
#pragma GCC unroll 16
                for (int v = 0; v < nv; v++) acc[i][v] = vfma(av, bv[v], acc[i][v]);
            }
        }
        if (narrow) ahead += GROUP * NR * esize;
    }
#pragma GCC unroll 16
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 16
        for (int v = 0; v < nv; v++) vstore(t->c + i * t->ldc + v * VW, acc[i][v]);
}

#define TILE(type, cls, mr)                                                                     \
    static void tile_##type##_##cls##_##mr(const tile_args *t) { tile_run(t, type, cls, mr); }
#define NAME(type, cls, mr) tile_##type##_##cls##_##mr

#if ISA == 2
#define EACH12(X, t, c)                                                                         \
    X(t, c, 1) X(t, c, 2) X(t, c, 3) X(t, c, 4) X(t, c, 5) X(t, c, 6) X(t, c, 7) X(t, c, 8)     \
    X(t, c, 9) X(t, c, 10) X(t, c, 11) X(t, c, 12)
#define EACH6(X, t, c) X(t, c, 1) X(t, c, 2) X(t, c, 3) X(t, c, 4) X(t, c, 5) X(t, c, 6)
#define TILES(X, t) EACH12(X, t, 0) EACH12(X, t, 1) EACH6(X, t, 2)
#define LIST(X, t) {{0, EACH12(X, t, 0)}, {0, EACH12(X, t, 1)}, {0, EACH6(X, t, 2)}}
#elif ISA == 1
#define EACH6(X, t, c) X(t, c, 1) X(t, c, 2) X(t, c, 3) X(t, c, 4) X(t, c, 5) X(t, c, 6)
#define EACH3(X, t, c) X(t, c, 1) X(t, c, 2) X(t, c, 3)
#define TILES(X, t) EACH6(X, t, 0) EACH3(X, t, 1) X(t, 2, 1)
#define LIST(X, t) {{0, EACH6(X, t, 0)}, {0, EACH3(X, t, 1)}, {0, X(t, 2, 1)}}
#else
#define TILES(X, t) X(t, 0, 1) X(t, 0, 2) X(t, 1, 1) X(t, 2, 1)
#define LIST(X, t) {{0, X(t, 0, 1) X(t, 0, 2)}, {0, X(t, 1, 1)}, {0, X(t, 2, 1)}}
#endif

TILES(TILE, T_F32)
TILES(TILE, T_BF16)
TILES(TILE, T_STRIDED)

#define ENTRY(type, cls, mr) NAME(type, cls, mr),
static const tile_fn tiles[TILE_TYPES][3][MR_MAX + 1] = {
    LIST(ENTRY, T_F32), LIST(ENTRY, T_BF16), LIST(ENTRY, T_STRIDED)};

/* mr rows times `panels` panels of B, in the widest tiles the registers allow. */
INLINE void tile_panels(tile_args t, int type, int mr, int panels) {
    const size_t esize = type == T_BF16 ? 2 : 4;
    const int four = mr <= MR_CLASS[2];
    while (panels > 0) {
        int cls = panels >= 4 && four ? 2 : panels >= 2 && mr <= MR_CLASS[1] ? 1 : 0;
        tiles[type][cls][mr](&t);
        panels -= 1 << cls;
        t.b = (const char *)t.b + ((size_t)t.pstride << cls) * esize;
        t.ahead = (const char *)t.ahead + ((size_t)t.pstride << cls) * esize;
        t.c += NR << cls;
    }
}
