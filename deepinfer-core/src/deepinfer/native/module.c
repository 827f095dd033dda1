/* The extension module: argument marshalling, choice of instruction set, threads.
 *
 * Every function takes plain numbers (addresses, sizes, strides in elements); ops.py has checked
 * them. The GIL is released while a kernel of some length runs. Threads are those of the OpenMP runtime which
 * torch has loaded: ops.py passes the address of its GOMP_parallel, so there is one pool, and
 * neither a compiler flag nor a library to link. Without it everything runs on the caller.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"

/* Goes with INTERFACE in __init__.py: raise both when what a function takes or gives changes, so
 * that an extension compiled before is refused and not called. */
#define INTERFACE 3

typedef union {
    int64_t i;
    double d;
    void *p;
} arg;

#define MAX_ARGS 48

/* Constant after start-up, but for tests that force a lower instruction set. */
static const kernel_table *kernels = &deepinfer_base;
static int best_isa, isa;
static void (*gomp_parallel)(void (*)(void *), void *, unsigned, unsigned);

static void choose(int level) {
    isa = level < best_isa ? level : best_isa;
    kernels = &deepinfer_base;
#if HAVE_X86
    if (isa == 1) kernels = &deepinfer_avx2;
    if (isa == 2) kernels = &deepinfer_avx512;
#endif
}

static void detect(void) {
    best_isa = 0;
#if HAVE_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) best_isa = 1;
    if (best_isa && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vnni"))
        best_isa = 2;
#endif
    choose(best_isa);
}

/* ---- threads ---------------------------------------------------------------------------- */

#define SHARES 8
#define LINE 64 /* counters that different threads move lie at least this far apart */

/* Items of a job that one thread takes before it helps others: neighbours, so that what it fetches
 * ahead is its own. */
typedef struct {
    int64_t next, end;
    char apart[LINE - 2 * sizeof(int64_t)];
} share;

typedef struct {
    void (*fn)(void *ctx, int64_t from, int64_t to);
    void *ctx;
    int64_t n, chunk;
    const char *reads; /* what its items read, side by side, item_bytes each; or NULL */
    int64_t item_bytes;
    share shares[SHARES];
    int64_t done;
    char apart[LINE];
    int32_t over, asleep;
} job;

#define MAX_JOBS 12 /* of half a layer */

/* Jobs in order: one begins when the one before is done. A thread takes its share of a job, then
 * what is left of the others', then waits until all items are done, by whomever: one that comes
 * late or never is not waited for. It spins at first and sleeps then, for whoever holds the last
 * item may have lost its processor. */
typedef struct {
    int64_t threads, shares, entered;
    int quick; /* not worth letting other Python threads in */
    int n;
    job *jobs;
} chain;

#define AHEAD_WAIT (1 << 16) /* bytes of a job to come that a thread fetches while it waits */
#define SPINS 3000 /* some 50 us: longer than a step between jobs takes when nobody else runs */

static void finish(job *j, int64_t items) {
    if (__atomic_add_fetch(&j->done, items, __ATOMIC_ACQ_REL) < j->n) return;
    __atomic_store_n(&j->over, 1, __ATOMIC_SEQ_CST);
#ifdef __linux__
    if (__atomic_load_n(&j->asleep, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, &j->over, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
#endif
}

/* What a thread will read of a job to come. */
typedef struct {
    const char *at, *end;
} region;

static void wait_for(job *j, region *next) {
    for (int i = 0; i < SPINS; i++) {
        if (__atomic_load_n(&j->over, __ATOMIC_ACQUIRE)) return;
        for (int n = 0; n < 4 && next->at < next->end; n++, next->at += LINE)
            __builtin_prefetch(next->at, 0, 2);
#if HAVE_X86
        if (next->at >= next->end) __builtin_ia32_pause();
#endif
    }
#ifdef __linux__
    __atomic_store_n(&j->asleep, 1, __ATOMIC_SEQ_CST);
    while (!__atomic_load_n(&j->over, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, &j->over, FUTEX_WAIT_PRIVATE, 0, NULL, NULL, 0);
#else
    while (!__atomic_load_n(&j->over, __ATOMIC_ACQUIRE)) sched_yield();
#endif
}

/* Items of a share that nobody has taken; returns how many this thread did. */
static int64_t work_off(job *j, share *s) {
    int64_t did = 0, from;
    while (__atomic_load_n(&s->next, __ATOMIC_RELAXED) < s->end &&
           (from = __atomic_fetch_add(&s->next, j->chunk, __ATOMIC_RELAXED)) < s->end) {
        const int64_t to = from + j->chunk < s->end ? from + j->chunk : s->end;
        j->fn(j->ctx, from, to);
        did += to - from;
    }
    return did;
}

/* The start of a share of the next job after i that reads a lot; *seen: the last one asked for. */
static void look_ahead(const chain *c, int i, int64_t share, int *seen, region *next) {
    int at = i + 1;
    while (at < c->n && !c->jobs[at].reads) at++;
    if (at == c->n || at <= *seen) return;
    const job *j = &c->jobs[at];
    const int64_t size = (j->shares[share].end - j->shares[share].next) * j->item_bytes;
    *seen = at;
    next->at = j->reads + j->shares[share].next * j->item_bytes;
    next->end = next->at + (size < AHEAD_WAIT ? size : AHEAD_WAIT);
}

static void chain_part(void *data) {
    chain *c = data;
    const int64_t me = __atomic_fetch_add(&c->entered, 1, __ATOMIC_RELAXED) % c->shares;
    region next = {NULL, NULL};
    int seen = -1;
    for (int i = 0; i < c->n; i++) {
        job *j = &c->jobs[i];
        int64_t did = 0;
        for (int64_t s = 0; s < c->shares; s++) did += work_off(j, &j->shares[(me + s) % c->shares]);
        if (i + 1 == c->n) return;
        if (did) finish(j, did);
        look_ahead(c, i, me, &seen, &next);
        if (j->n > 0) wait_for(j, &next);
    }
}

/* A chain for so much work (element visits), without jobs yet. Little work wakes no thread. */
#define SMALL 16384
static int64_t threads_for(int64_t threads, int64_t work) { return work < SMALL ? 1 : threads; }

static chain new_chain(int64_t threads, int64_t work, job *jobs) {
    threads = threads_for(threads, work);
    return (chain){.threads = threads, .shares = threads < SHARES ? threads : SHARES,
                   .quick = work < SMALL, .jobs = jobs};
}

/* fn over [0, n) in pieces of `chunk`, after the jobs that c has. */
static void add_job(chain *c, void (*fn)(void *, int64_t, int64_t), void *ctx, int64_t n,
                    int64_t chunk) {
    job *j = &c->jobs[c->n++];
    j->reads = NULL;
    j->fn = fn, j->ctx = ctx, j->n = n, j->chunk = chunk < 1 ? 1 : chunk;
    const int64_t pieces = (n + j->chunk - 1) / j->chunk;
    for (int64_t s = 0; s < c->shares; s++) {
        const int64_t end = (s + 1) * pieces / c->shares * j->chunk;
        j->shares[s].next = s * pieces / c->shares * j->chunk;
        j->shares[s].end = end < n ? end : n;
    }
    j->done = 0, j->over = j->asleep = 0;
}

/* All jobs, by at most c->threads threads. Other Python threads run meanwhile. */
static void run_chain(chain *c) {
    int64_t pieces = 1;
    for (int i = 0; i < c->n; i++) {
        const int64_t n = (c->jobs[i].n + c->jobs[i].chunk - 1) / c->jobs[i].chunk;
        if (n > pieces) pieces = n;
    }
    if (c->threads < pieces) pieces = c->threads;
    PyThreadState *python = c->quick ? NULL : PyEval_SaveThread();
    if (pieces > 1 && gomp_parallel) gomp_parallel(chain_part, c, (unsigned)pieces, 0);
    else
        for (int i = 0; i < c->n; i++)
            if (c->jobs[i].n > 0) c->jobs[i].fn(c->jobs[i].ctx, 0, c->jobs[i].n);
    if (python) PyEval_RestoreThread(python);
}

/* fn over [0, n) in pieces of `chunk`, `work` element visits in all. */
static void parallel(int64_t threads, int64_t work, int64_t n, int64_t chunk,
                     void (*fn)(void *, int64_t, int64_t), void *ctx) {
    job only;
    chain c = new_chain(threads, work, &only);
    add_job(&c, fn, ctx, n, chunk);
    run_chain(&c);
}

#define OVER(name, type, call)                                                                  \
    static void name(void *ctx, int64_t from, int64_t to) {                                     \
        const type *p = ctx;                                                                    \
        for (int64_t i = from; i < to; i++) kernels->call;                                      \
    }

/* ---- linear ----------------------------------------------------------------------------- */

/* k rounded up to whole groups */
static int64_t deep(int64_t k) { return (k + GROUP - 1) / GROUP * GROUP; }

typedef struct {
    const void *x;
    float *to;
    int64_t m, k, ld;
    int dt, mr_max;
} pack_x_args;

/* Row tile t of x as fp32 [k][mr], in pieces that stay in the first cache. */
#define PACK_K 128

static void pack_x(void *ctx, int64_t from, int64_t to) {
    const pack_x_args *p = ctx;
    const int64_t tiles = (p->m + p->mr_max - 1) / p->mr_max;
    const size_t es = p->dt == DT_F32 ? 4 : 2;
    for (int64_t t = from; t < to; t++) {
        const int64_t a = t * p->m / tiles, mr = (t + 1) * p->m / tiles - a;
        float *dst = p->to + a * p->k, line[PACK_K];
        for (int64_t k0 = 0; k0 < p->k; k0 += PACK_K)
            for (int64_t r = 0; r < mr; r++) {
                const int64_t n = p->k - k0 < PACK_K ? p->k - k0 : PACK_K;
                const char *src = (const char *)p->x + (size_t)((a + r) * p->ld + k0) * es;
                const float *row = (const float *)(const void *)src;
                if (mr == 1) {
                    kernels->to_f32(src, p->dt, dst + k0, n);
                    continue;
                }
                if (p->dt != DT_F32) kernels->to_f32(src, p->dt, line, n), row = line;
                for (int64_t j = 0; j < n; j++) dst[(k0 + j) * mr + r] = row[j];
            }
    }
}

/* Row r of x as int8, for int8 weights. */
static void quant_x(void *ctx, int64_t from, int64_t to) {
    const pack_x_args *p = ctx;
    const int64_t kp = deep(p->k), groups = kp / GROUP;
    int8_t *q = (int8_t *)p->to;
    float *scales = (float *)(void *)(q + p->m * kp);
    int32_t *fix = (int32_t *)(void *)(scales + p->m * groups);
    for (int64_t r = from; r < to; r++)
        kernels->quant((const char *)p->x + (size_t)(r * p->ld) * (p->dt == DT_F32 ? 4 : 2), p->dt,
                       p->k, q + r * kp, scales + r * groups, fix + r * groups);
}

OVER(linear_range, linear_args, linear(p, i))

typedef struct {
    linear_args p;
    pack_x_args x;
} linear_plan;

/* Numbers that x is packed into; 0: it is read where it is. */
static int64_t packed_size(int64_t m, int64_t k, int dt, int wt) {
    if (wt == DT_INT8) return m * (deep(k) / 4 + 2 * deep(k) / GROUP);
    return m > 1 || dt != DT_F32 ? m * k : 0;
}

/* Where a product whose p has m, n, k, the weight, the bias and the output finds its rows. */
static void aim_linear(linear_plan *l, const void *x, int dt, int64_t ldx, float *packed) {
    linear_args *p = &l->p;
    l->x = (pack_x_args){x, packed, p->m, p->k, ldx, dt, p->wt == DT_INT8 ? 1 : kernels->mr_max};
    p->x = packed_size(p->m, p->k, dt, p->wt) ? packed : x;
    if (p->wt == DT_INT8) {
        const int64_t kp = deep(p->k);
        p->xq = (const int8_t *)packed;
        p->xs = packed + p->m * kp / 4;
        p->fix = (const int32_t *)(const void *)(p->xs + p->m * kp / GROUP);
    }
}

static void add_packing(chain *c, linear_plan *l) {
    const pack_x_args *x = &l->x;
    const int64_t tiles = (x->m + x->mr_max - 1) / x->mr_max;
    if (l->p.wt == DT_INT8) add_job(c, quant_x, &l->x, x->m, 1 + 8192 / (deep(x->k) + 1));
    else if (l->p.x != x->x)
        add_job(c, pack_x, &l->x, tiles, threads_for(2, x->m * x->k / 4) > 1 ? 1 : tiles);
}

static void add_product(chain *c, linear_plan *l) {
    linear_args *p = &l->p;
    const int64_t m = p->m, tiles = kernels->mr_max, tiles_m = (m + tiles - 1) / tiles;
    p->panels = (p->n + NR - 1) / NR;
    p->row_block = MB / tiles;
    p->group = m <= tiles ? 2 : PG;
    const int64_t blocks = (tiles_m + p->row_block - 1) / p->row_block;
    const int64_t items = (p->panels + p->group - 1) / p->group * blocks;
    add_job(c, linear_range, p, items, items / (16 * c->threads));
    if (m <= tiles) {
        const int64_t width = p->wt == DT_INT8 ? 1 : p->wt == DT_BF16 ? 2 : 4;
        job *j = &c->jobs[c->n - 1];
        j->reads = p->w;
        j->item_bytes = p->group * NR * (p->wt == DT_INT8 ? deep(p->k) : p->k) * width;
    }
}

static void add_linear(chain *c, linear_plan *l, const void *x, int dt, int64_t ldx,
                       float *packed) {
    aim_linear(l, x, dt, ldx, packed);
    add_packing(c, l);
    add_product(c, l);
}

/* x, x_dt, ldx, m, n, k, w, w_dt, scales, bias, bias_dt, out, out_dt, threads */
static const char *op_linear(const arg *a) {
    const int64_t m = a[3].i, n = a[4].i, k = a[5].i, size = packed_size(m, k, (int)a[1].i, (int)a[7].i);
    linear_plan l = {.p = {.w = a[6].p, .scales = a[8].p, .bias = a[9].p, .out = a[11].p,
                           .m = m, .n = n, .k = k, .wt = (int)a[7].i, .bias_dt = (int)a[10].i,
                           .out_dt = (int)a[12].i}};
    if (m == 0 || n == 0) return NULL;
    float small[4096], *packed = size <= 4096 ? small : malloc((size_t)size * sizeof(float));
    if (!packed) return "out of memory";
    job jobs[MAX_JOBS];
    chain c = new_chain(a[13].i, m * k * n / 4, jobs);
    add_linear(&c, &l, a[0].p, (int)a[1].i, a[2].i, packed);
    run_chain(&c);
    if (packed != small) free(packed);
    return NULL;
}

OVER(pack_range, pack_args, pack(p, i))

/* src, src_dt, ld, rows, k, first row, dst, w_dt, scales, threads */
static const char *op_pack(const arg *a) {
    pack_args p = {.src = a[0].p, .dst = a[6].p, .scales = a[8].p, .n = a[3].i, .k = a[4].i,
                   .ld = a[2].i, .row0 = a[5].i, .panels = (a[3].i + NR - 1) / NR,
                   .src_dt = (int)a[1].i, .wt = (int)a[7].i};
    parallel(a[9].i, p.n * p.k, p.panels, 8, pack_range, &p);
    return NULL;
}

OVER(embed_range, embed_args, embed(p, i))

/* ids, t, w, w_dt, scales, n, k, out, out_dt, threads */
static const char *op_embedding(const arg *a) {
    embed_args p = {.ids = a[0].p, .w = a[2].p, .scales = a[4].p, .out = a[7].p, .t = a[1].i,
                    .n = a[5].i, .k = a[6].i, .wt = (int)a[3].i, .out_dt = (int)a[8].i};
    for (int64_t i = 0; i < p.t; i++)
        if (p.ids[i] < 0 || p.ids[i] >= p.n) return "an id is outside the table";
    parallel(a[9].i, p.t * p.k * 4, p.t, 4, embed_range, &p);
    return NULL;
}

/* ---- rows ------------------------------------------------------------------------------- */

OVER(norm_range, norm_args, norm(p, i))

/* x, res, w, w_dt, out, new_res, dt, rows, inner, h, stride_outer, stride_res, eps, threads */
static const char *op_norm(const arg *a) {
    norm_args p = {.x = a[0].p, .res = a[1].p, .w = a[2].p, .out = a[4].p, .new_res = a[5].p,
                   .rows = a[7].i, .inner = a[8].i, .h = a[9].i, .stride_outer = a[10].i,
                   .stride_res = a[11].i, .eps = a[12].d, .dt = (int)a[6].i,
                   .w_dt = (int)a[3].i};
    parallel(a[13].i, p.rows * p.h, p.rows, 1 + 4096 / (p.h + 1), norm_range, &p);
    return NULL;
}

OVER(rope_range, rope_args, rope(p, i))

/* x, positions, cos_sin, out, dt, t, heads, d, r, stride_t, table_rows, interleaved, threads */
static const char *op_rope(const arg *a) {
    rope_args p = {.x = a[0].p, .positions = a[1].p, .cos_sin = a[2].p, .out = a[3].p,
                   .dt = (int)a[4].i, .t = a[5].i, .heads = a[6].i, .d = a[7].i, .r = a[8].i,
                   .stride_t = a[9].i, .table_rows = a[10].i, .interleaved = (int)a[11].i};
    for (int64_t i = 0; i < p.t; i++)
        if (p.positions[i] < 0 || p.positions[i] >= p.table_rows)
            return "a position is outside cos_sin";
    const int64_t row = p.heads * p.d;
    parallel(a[12].i, p.t * row, p.t, 1 + 4096 / (row + 1), rope_range, &p);
    return NULL;
}

#define SILU_PART 1024

static void silu_range(void *ctx, int64_t from, int64_t to) {
    const silu_args *p = ctx;
    const int64_t parts = (p->i + SILU_PART - 1) / SILU_PART;
    for (int64_t i = from; i < to; i++) {
        const int64_t c = i % parts * SILU_PART, e = c + SILU_PART;
        kernels->silu(p, i / parts, c, e < p->i ? e : p->i);
    }
}

/* x, out, dt, t, i, stride_t, has_limit, limit, threads */
static const char *op_silu(const arg *a) {
    silu_args p = {.x = a[0].p, .out = a[1].p, .dt = (int)a[2].i, .t = a[3].i, .i = a[4].i,
                   .stride_t = a[5].i, .has_limit = (int)a[6].i, .limit = a[7].d};
    const int64_t parts = (p.i + SILU_PART - 1) / SILU_PART;
    parallel(a[8].i, 2 * p.t * p.i, p.t * parts, 2, silu_range, &p);
    return NULL;
}

static void kv_range(void *ctx, int64_t from, int64_t to) {
    const kvw_args *p = ctx;
    for (int64_t i = from; i < to; i++)
        if (p->slots[i] >= 0) kernels->kv_write(p, i);
}

/* k, v, dt, k_cache, v_cache, cache_dt, slots, t, width, stride_k, stride_v, capacity, threads */
static const char *op_kv_write(const arg *a) {
    kvw_args p = {.k = a[0].p, .v = a[1].p, .dt = (int)a[2].i, .k_cache = a[3].p,
                  .v_cache = a[4].p, .cache_dt = (int)a[5].i, .slots = a[6].p, .t = a[7].i,
                  .width = a[8].i, .stride_k = a[9].i, .stride_v = a[10].i, .capacity = a[11].i};
    for (int64_t i = 0; i < p.t; i++)
        if (p.slots[i] >= p.capacity) return "a slot is outside the cache";
    parallel(a[12].i, p.t * p.width, p.t, 16, kv_range, &p);
    return NULL;
}

/* ---- attention -------------------------------------------------------------------------- */

OVER(attention_range, attn_args, attention(p, i))
OVER(merge_range, attn_args, attention_merge(p, i))

static void part_range(void *ctx, int64_t from, int64_t to) {
    const attn_args *p = ctx;
    for (int64_t i = from; i < to; i++) kernels->attention_part(p, i / p->spans, i % p->spans);
}

/* Items into out (NULL: only their number). With `merge` an item of few rows takes several kv
 * heads, whose keys lie side by side in memory. */
static int64_t attn_plan(const attn_args *p, int merge, attn_item *out) {
    const int64_t group = p->hq / p->hkv, heads = group < ROWS ? group : ROWS;
    const int64_t limit = ROWS / heads;
    int64_t n = 0;
    for (int64_t b = 0; b < p->batch; b++) {
        const int64_t end = p->cu_q[b + 1], len = end - p->cu_q[b];
        const int64_t rows = len < limit ? len : limit;
        const int64_t fit = merge && heads == group && rows ? ROWS / (rows * heads) : 1;
        for (int64_t r = p->cu_q[b]; r < end; r += rows)
            for (int64_t h = 0; h < p->hkv; h += fit)
                for (int64_t g = 0; g < group; g += heads, n++)
                    if (out)
                        out[n] = (attn_item){.request = b, .row = r,
                                             .rows = end - r < rows ? end - r : rows,
                                             .kv_head = h,
                                             .kv_heads = p->hkv - h < fit ? p->hkv - h : fit,
                                             .head = g,
                                             .heads = group - g < heads ? group - g : heads};
    }
    return n;
}

/* Rows that no request owns, counted from the first of them. */
static void clear_range(void *ctx, int64_t from, int64_t to) {
    const attn_args *p = ctx;
    const int64_t first = p->cu_q[p->batch] + from, n = (to - from) * p->hq;
    const size_t row = (size_t)p->d * (p->dt == DT_F32 ? 4 : 2);
    memset((char *)p->out + (size_t)(first * p->hq) * row, 0, (size_t)n * row);
    for (int64_t i = 0; p->lse && i < n; i++) p->lse[first * p->hq + i] = -(float)INFINITY;
}

/* Checks the step and adds its jobs; attn_free afterwards. */
static const char *add_attention(chain *c, attn_args *p, int64_t tokens) {
    int64_t last = 0, longest = 0;
    for (int64_t b = 0; b < p->batch; b++) {
        const int64_t len =
            p->len64 ? ((const int64_t *)p->kv_len)[b] : ((const int32_t *)p->kv_len)[b];
        if (p->cu_q[b] != last || p->cu_q[b + 1] < last || p->cu_q[b + 1] > tokens)
            return "cu_q must start at 0, not decrease and stay within q";
        last = p->cu_q[b + 1];
        if (len > p->max_pages * p->page) return "kv_lengths exceed the block table";
        if (len > longest) longest = len;
    }
    if (last < tokens) add_job(c, clear_range, p, tokens - last, tokens);
    int merge = 1;
    p->n_items = attn_plan(p, merge, NULL);
    if (p->n_items < 4 * c->threads) p->n_items = attn_plan(p, merge = 0, NULL);
    if (!p->n_items) return NULL;
    attn_item *items = malloc((size_t)p->n_items * sizeof *items);
    if (!items) return "out of memory";
    attn_plan(p, merge, items);
    p->items = items;
    p->spans = (longest + SPAN - 1) / SPAN;
    for (int64_t i = 0; i < p->n_items; i++) {
        int64_t need = 2 * ROWS + items[i].kv_heads * items[i].rows * items[i].heads *
                                      ((p->d + NR - 1) / NR * NR);
        if (need > p->part) p->part = need;
    }
    if (c->threads > 1 && p->n_items < 4 * c->threads && p->spans > 1)
        p->parts = malloc((size_t)(p->n_items * p->spans * p->part) * sizeof(float));
    if (p->parts) {
        add_job(c, part_range, p, p->n_items * p->spans, 1);
        add_job(c, merge_range, p, p->n_items, p->n_items);
    } else {
        const int64_t work = last * p->hq * longest * p->d;
        add_job(c, attention_range, p, p->n_items, threads_for(2, work) > 1 ? 1 : p->n_items);
    }
    return NULL;
}

static void attn_free(attn_args *p) {
    free(p->parts);
    free((void *)p->items);
}

/* q, k_cache, v_cache, table, kv_len, len64, cu_q, sink, out, lse, dt, cache_dt, tokens, batch,
 * hq, hkv, d, page, max_pages, stride_q, window, pages, scale, softcap, threads */
static const char *op_attention(const arg *a) {
    attn_args p = {.q = a[0].p, .k_cache = a[1].p, .v_cache = a[2].p, .table = a[3].p,
                   .kv_len = a[4].p, .len64 = (int)a[5].i, .cu_q = a[6].p, .sink = a[7].p,
                   .out = a[8].p, .lse = a[9].p, .dt = (int)a[10].i, .cache_dt = (int)a[11].i,
                   .batch = a[13].i, .hq = a[14].i, .hkv = a[15].i, .d = a[16].i,
                   .page = a[17].i, .max_pages = a[18].i, .stride_q = a[19].i,
                   .window = a[20].i, .pages = a[21].i, .scale = a[22].d, .softcap = a[23].d};
    job jobs[MAX_JOBS];
    chain c = new_chain(a[24].i, SMALL, jobs);
    const char *error = add_attention(&c, &p, a[12].i);
    if (!error && c.n) run_chain(&c);
    attn_free(&p);
    return error;
}

#include "blocks.h"

/* ---- sampling --------------------------------------------------------------------------- */

static void gumbel_range(void *ctx, int64_t from, int64_t to) {
    const gumbel_args *p = ctx;
    for (int64_t i = from; i < to; i++) kernels->gumbel(p, i / p->chunks, i % p->chunks);
}

/* logits, stride, m, v, temperature, seed, position, allowed, stride_allowed, out, threads */
static const char *op_gumbel(const arg *a) {
    gumbel_args p = {.logits = a[0].p, .stride = a[1].i, .m = a[2].i, .v = a[3].i,
                     .temp = a[4].p, .seed = a[5].p, .pos = a[6].p, .allowed = a[7].p,
                     .stride_allowed = a[8].i, .out = a[9].p};
    const int64_t threads = a[10].i;
    p.chunk = p.m >= 2 * threads ? (p.v + 63) / 64 * 64 : 8192;
    p.chunks = (p.v + p.chunk - 1) / p.chunk;
    p.part_val = malloc((size_t)(p.m * p.chunks) * sizeof(float));
    p.part_id = malloc((size_t)(p.m * p.chunks) * sizeof(int64_t));
    if (p.part_val && p.part_id) {
        parallel(threads, p.m * p.v, p.m * p.chunks, 1, gumbel_range, &p);
        for (int64_t r = 0; r < p.m; r++) {
            float best = -(float)INFINITY;
            int64_t id = -1;
            for (int64_t c = 0; c < p.chunks; c++)
                if (p.part_val[r * p.chunks + c] > best) {
                    best = p.part_val[r * p.chunks + c];
                    id = p.part_id[r * p.chunks + c];
                }
            const int32_t *mask = p.allowed ? p.allowed + r * p.stride_allowed : NULL;
            for (int64_t v = 0; id < 0 && mask && v < p.v; v++)
                if (mask[v >> 5] >> (v & 31) & 1) id = v;
            p.out[r] = id < 0 ? 0 : id;
        }
    }
    const char *error = p.part_val && p.part_id ? NULL : "out of memory";
    free(p.part_val);
    free(p.part_id);
    return error;
}

OVER(logprobs_range, logprob_args, logprobs(p, i))

/* logits, stride, m, v, k, chosen, ids, values, chosen_value, rank, threads */
static const char *op_logprobs(const arg *a) {
    logprob_args p = {.logits = a[0].p, .stride = a[1].i, .m = a[2].i, .v = a[3].i, .k = a[4].i,
                      .chosen = a[5].p, .ids = a[6].p, .values = a[7].p,
                      .chosen_value = a[8].p, .rank = a[9].p};
    for (int64_t i = 0; i < p.m; i++)
        if (p.chosen[i] < 0 || p.chosen[i] >= p.v) return "a chosen id is outside the vocabulary";
    parallel(a[10].i, p.m * p.v, p.m, 1, logprobs_range, &p);
    return NULL;
}

static void filter_range(void *ctx, int64_t from, int64_t to) {
    filter_args *p = ctx;
    uint64_t *scratch = malloc((size_t)FILTER_SCRATCH(p->v) * sizeof *scratch);
    if (!scratch) __atomic_store_n(&p->failed, 1, __ATOMIC_RELAXED);
    for (int64_t i = from; scratch && i < to; i++) kernels->filter(p, i, scratch);
    free(scratch);
}

/* logits, stride, m, v, temperature, top_k, top_p, min_p, out, threads */
static const char *op_filter(const arg *a) {
    filter_args p = {.logits = a[0].p, .stride = a[1].i, .v = a[3].i, .temp = a[4].p,
                     .top_k = a[5].p, .top_p = a[6].p, .min_p = a[7].p, .out = a[8].p};
    parallel(a[9].i, a[2].i * p.v, a[2].i, 1, filter_range, &p);
    return p.failed ? "out of memory" : NULL;
}

/* x, y, n */
static const char *op_exp(const arg *a) {
    kernels->exp(a[0].p, a[1].p, a[2].i);
    return NULL;
}

/* address of GOMP_parallel */
static const char *op_set_threads(const arg *a) {
    memcpy(&gomp_parallel, &a[0].p, sizeof gomp_parallel);
    return NULL;
}

/* ---- Python ----------------------------------------------------------------------------- */

static PyObject *call(const char *(*op)(const arg *), Py_ssize_t want, PyObject *const *args,
                      Py_ssize_t n) {
    arg a[MAX_ARGS];
    if (n != want) return PyErr_Format(PyExc_TypeError, "%zd arguments, not %zd", want, n);
    for (Py_ssize_t i = 0; i < n; i++) {
        if (PyFloat_Check(args[i])) a[i].d = PyFloat_AsDouble(args[i]);
        else if (args[i] == Py_None) a[i].i = 0;
        else a[i].i = PyLong_AsLongLong(args[i]);
        if (a[i].i == -1 && PyErr_Occurred()) return NULL;
    }
    const char *error = op(a);
    if (error) {
        PyErr_SetString(PyExc_ValueError, error);
        return NULL;
    }
    Py_RETURN_NONE;
}

#define METHOD(name, count)                                                                     \
    static PyObject *py_##name(PyObject *self, PyObject *const *args, Py_ssize_t n) {           \
        (void)self;                                                                             \
        return call(op_##name, count, args, n);                                                 \
    }
METHOD(linear, 14)
METHOD(pack, 10)
METHOD(embedding, 10)
METHOD(norm, 14)
METHOD(rope, 13)
METHOD(silu, 9)
METHOD(kv_write, 13)
METHOD(attention, 25)
METHOD(attention_block, 48)
METHOD(mlp_block, 20)
METHOD(decoder_layers, 24)
METHOD(gumbel, 11)
METHOD(logprobs, 11)
METHOD(filter, 10)
METHOD(exp, 3)
METHOD(set_threads, 1)

/* set_isa(level): at most this level (0 baseline, 1 AVX2, 2 AVX-512) from now on; for tests. */
static PyObject *py_set_isa(PyObject *self, PyObject *level) {
    (void)self;
    long want = PyLong_AsLong(level);
    if (want == -1 && PyErr_Occurred()) return NULL;
    choose((int)want);
    return PyLong_FromLong(isa);
}

#define ENTRY(name) {#name, (PyCFunction)(void (*)(void))py_##name, METH_FASTCALL, NULL}
static PyMethodDef methods[] = {
    ENTRY(linear),   ENTRY(pack),      ENTRY(embedding), ENTRY(norm),     ENTRY(rope),
    ENTRY(silu),     ENTRY(kv_write),  ENTRY(attention), ENTRY(gumbel),   ENTRY(logprobs),
    ENTRY(filter),   ENTRY(exp),       ENTRY(set_threads),
    ENTRY(attention_block), ENTRY(mlp_block), ENTRY(decoder_layers),
    {"set_isa", py_set_isa, METH_O, NULL},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernels", NULL, -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void) {
    detect();
    PyObject *m = PyModule_Create(&module);
    if (m && (PyModule_AddIntConstant(m, "interface", INTERFACE) ||
              PyModule_AddIntConstant(m, "best_isa", best_isa) ||
              PyModule_AddIntConstant(m, "is_x86", HAVE_X86))) {
        Py_DECREF(m);
        return NULL;
    }
    return m;
}
