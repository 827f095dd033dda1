/* What module.c (argument checks, threads) and the isa_*.c files (arithmetic) agree on.
 *
 * A kernel is a plain function of (arguments, item): one item is a piece of the output that no
 * other item touches, so any thread may run any item in any order and the bits do not change.
 */
#ifndef DEEPINFER_KERNELS_H
#define DEEPINFER_KERNELS_H

#include <stddef.h>
#include <stdint.h>

enum { DT_F32 = 0, DT_BF16 = 1, DT_INT8 = 2 };

enum {
    NR = 16,      /* columns of a weight panel */
    KC = 256,     /* k values per pass when there are many rows; a multiple of GROUP */
    GROUP = 32,   /* k values that share an int8 scale */
    MB = 96,      /* rows of one linear item */
    AHEAD = 1024, /* bytes that a single pass over a weight fetches ahead */
    AHEAD_ITEM = 1 << 18, /* narrow weights, few rows: the whole next item, if at most this long */
    PG = 4,       /* panels of one linear item, at most */
    TILE = 64,    /* KV positions of one softmax step */
    SPAN = 256,   /* KV positions of one online softmax; spans are merged in ascending order */
    ROWS = 48,    /* (query row, head) pairs of one attention item */
    MAX_D = 256
};

typedef struct {
    const float *x;
    const void *w;          /* [panels][K][NR] of type wt; int8 [panels][K / 4][NR][4], K rounded up */
    const uint16_t *scales; /* int8: fp16 [panels][K / GROUP][NR] */
    const int8_t *xq;       /* int8: x in groups of GROUP, [M][K rounded up], with scales xs and */
    const float *xs;        /* fix, -128 times the sum of each group (see dot.h) */
    const int32_t *fix;
    const void *bias;       /* [N] of bias_dt, or NULL */
    void *out;              /* [M, N] of out_dt */
    int64_t m, n, k, ldx, panels, group, row_block;
    int wt, bias_dt, out_dt;
} linear_args;

typedef struct {
    const void *src; /* [n, k] of src_dt with row stride ld */
    void *dst;
    uint16_t *scales;
    int64_t n, k, ld, row0, panels;
    int src_dt, wt;
} pack_args;

typedef struct {
    const int64_t *ids;
    const void *w;
    const uint16_t *scales;
    void *out;
    int64_t t, n, k;
    int wt, out_dt;
} embed_args;

typedef struct {
    const void *x, *res; /* res and new_res: only for the fused addition */
    const float *w32;
    const void *w;
    void *out, *new_res;
    int64_t rows, inner, h, stride_outer, stride_res;
    double eps;
    int dt, w_dt;
} norm_args;

typedef struct {
    const void *x;
    const int64_t *positions;
    const float *cos_sin;
    void *out;
    int64_t t, heads, d, r, stride_t, table_rows;
    int dt, interleaved;
} rope_args;

typedef struct {
    const void *x;
    void *out;
    int64_t t, i, stride_t;
    double limit;
    int dt, has_limit;
} silu_args;

typedef struct {
    const void *k, *v;
    void *k_cache, *v_cache;
    const int64_t *slots;
    int64_t t, width, stride_k, stride_v, capacity;
    int dt, cache_dt;
} kvw_args;

typedef struct {
    int64_t request, row, rows;  /* row: of q */
    int64_t kv_head, kv_heads;
    int64_t head, heads;         /* query heads within each kv head's group */
} attn_item;

typedef struct {
    const void *q, *k_cache, *v_cache;
    const int32_t *table, *cu_q;
    const void *kv_len;
    const float *sink;
    void *out;
    float *lse;
    float *parts;         /* split path: [items][spans][part], else NULL */
    const attn_item *items;
    int64_t n_items, batch, hq, hkv, d, page, max_pages, stride_q, window, spans, pages, part;
    double scale, softcap;
    int dt, cache_dt, len64;
} attn_args;

typedef struct {
    const float *logits, *temp;
    const int64_t *seed, *pos;
    const int32_t *allowed;
    int64_t *out;
    float *part_val;
    int64_t *part_id;
    int64_t m, v, stride, stride_allowed, chunk, chunks;
} gumbel_args;

typedef struct {
    const float *logits;
    const int64_t *chosen;
    int32_t *ids, *rank;
    float *values, *chosen_value;
    int64_t m, v, k, stride;
} logprob_args;

typedef struct {
    const float *logits, *temp, *top_p, *min_p;
    const int64_t *top_k;
    float *out;
    int64_t v, stride;
    int failed;
} filter_args;

/* 64-bit numbers that the filter of a row of v logits works in */
#define FILTER_SCRATCH(v) (2 * (v) + (v) / 64 + 1)

typedef struct {
    int mr_max; /* rows of a tile */
    void (*linear)(const linear_args *, int64_t item);
    void (*to_f32)(const void *src, int dt, float *dst, int64_t n);
    void (*quant)(const void *src, int dt, int64_t k, int8_t *q, float *scale, int32_t *fix);
    void (*pack)(const pack_args *, int64_t panel);
    void (*embed)(const embed_args *, int64_t row);
    void (*norm)(const norm_args *, int64_t row);
    void (*rope)(const rope_args *, int64_t row);
    void (*silu)(const silu_args *, int64_t row, int64_t from, int64_t to);
    void (*kv_write)(const kvw_args *, int64_t row);
    void (*attention)(const attn_args *, int64_t item);
    void (*attention_part)(const attn_args *, int64_t item, int64_t span);
    void (*attention_merge)(const attn_args *, int64_t item);
    void (*gumbel)(const gumbel_args *, int64_t row, int64_t chunk);
    void (*logprobs)(const logprob_args *, int64_t row);
    void (*filter)(const filter_args *, int64_t row, uint64_t *scratch);
    void (*exp)(const float *x, float *y, int64_t n);
} kernel_table;

extern const kernel_table deepinfer_base, deepinfer_avx2, deepinfer_avx512;

#if (defined(__x86_64__) || defined(_M_X64)) && (defined(__GNUC__) || defined(__clang__))
#define HAVE_X86 1
#else
#define HAVE_X86 0
#endif

#endif
