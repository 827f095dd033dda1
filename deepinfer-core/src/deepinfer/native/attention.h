/* Paged attention with an online softmax over KV tiles at absolute positions.
 *
 * One (query row, head) is one chain: spans of SPAN positions ascending, inside a span tiles of
 * TILE positions ascending, inside a tile positions ascending. A tile in which the row sees nothing
 * is no step of the chain, and a position it does not see is no term of it. So a row's bits depend
 * on its position, its q and the K/V it sees: not on chunking, neighbours, pages or threads.
 */
enum { FETCH = 2 }; /* steps (a tile of one kv head) from fetching K and V to reading them */

typedef struct {
    float m[ROWS], l[ROWS];
    float o[ROWS * MAX_D] __attribute__((aligned(64)));
} softmax_state;

typedef struct {
    float q[ROWS * MAX_D] __attribute__((aligned(64)));
    float kt[MAX_D * TILE] __attribute__((aligned(64)));
    float v[TILE * MAX_D] __attribute__((aligned(64)));
    float s[ROWS * TILE] __attribute__((aligned(64)));
} attn_scratch;

/* Where the K and V rows of a tile lie: positions [lo, hi), zeros beside, rounded out to 16. */
typedef struct {
    const char *k[TILE], *v[TILE];
    int lo, hi;
} tile_rows;

INLINE int64_t kv_length(const attn_args *p, int64_t b) {
    return p->len64 ? ((const int64_t *)p->kv_len)[b] : ((const int32_t *)p->kv_len)[b];
}
INLINE int64_t padded(int64_t d) { return (d + NR - 1) / NR * NR; }

/* Absolute position of query row `row` of request b. */
INLINE int64_t row_position(const attn_args *p, int64_t b, int64_t row) {
    return kv_length(p, b) - p->cu_q[b + 1] + row;
}

/* The chains of an item are numbered [kv head][query row][head of the group]. */
INLINE int64_t item_rows(const attn_item *it) { return it->kv_heads * it->rows * it->heads; }
INLINE int64_t query_row(const attn_item *it, int64_t r) {
    return it->row + r / it->heads % it->rows;
}
INLINE int64_t query_head(const attn_args *p, const attn_item *it, int64_t r) {
    const int64_t kv = it->kv_head + r / (it->rows * it->heads);
    return kv * (p->hq / p->hkv) + it->head + r % it->heads;
}

static void load_queries(const attn_args *p, const attn_item *it, float *q) {
    const size_t es = elem_size(p->dt);
    const int64_t dp = padded(p->d), n = item_rows(it);
    for (int64_t r = 0; r < n; r++)
        to_f32((const char *)p->q +
                   (size_t)(query_row(it, r) * p->stride_q + query_head(p, it, r) * p->d) * es,
               p->dt, q + r * dp, p->d);
}

#if ISA
INLINE __m256 load8(const char *p, int dt, int64_t i) {
    if (dt == DT_F32) return _mm256_loadu_ps((const float *)p + i);
    __m128i h = _mm_loadu_si128((const __m128i *)((const uint16_t *)p + i));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
/* Eight K rows, elements i..i+7, to kt[i..i+7][0..7]. */
INLINE void transpose8(const char *const *row, int dt, int64_t i, float *kt) {
    __m256 a[8], b[8];
#pragma GCC unroll 8
    for (int r = 0; r < 4; r++) {
        /* halves of rows r and r + 4 side by side: the loads do the crossing */
        if (dt == DT_F32) {
            const float *p = (const float *)row[r] + i, *q = (const float *)row[r + 4] + i;
            a[r] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)),
                                        _mm_loadu_ps(q), 1);
            a[r + 4] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p + 4)),
                                            _mm_loadu_ps(q + 4), 1);
        } else {
            __m256 p = load8(row[r], dt, i), q = load8(row[r + 4], dt, i);
            a[r] = _mm256_permute2f128_ps(p, q, 0x20);
            a[r + 4] = _mm256_permute2f128_ps(p, q, 0x31);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < 8; r += 2) {
        b[r] = _mm256_unpacklo_ps(a[r], a[r + 1]);
        b[r + 1] = _mm256_unpackhi_ps(a[r], a[r + 1]);
    }
#pragma GCC unroll 2
    for (int r = 0; r < 8; r += 4) {
        a[r] = _mm256_shuffle_ps(b[r], b[r + 2], 0x44);
        a[r + 1] = _mm256_shuffle_ps(b[r], b[r + 2], 0xee);
        a[r + 2] = _mm256_shuffle_ps(b[r + 1], b[r + 3], 0x44);
        a[r + 3] = _mm256_shuffle_ps(b[r + 1], b[r + 3], 0xee);
    }
#pragma GCC unroll 8
    for (int r = 0; r < 8; r++) _mm256_storeu_ps(kt + (i + r) * TILE, a[r]);
}
#endif

static void locate(const attn_args *p, const attn_item *it, int64_t kv_head, int64_t base,
                   tile_rows *t) {
    static const float zeros[MAX_D];
    const size_t row = (size_t)(p->hkv * p->d) * elem_size(p->cache_dt);
    const int32_t *table = p->table + it->request * p->max_pages;
    for (int j = 0; j < t->lo; j++) t->k[j] = t->v[j] = (const char *)zeros;
    for (int j = t->hi; j < TILE; j++) t->k[j] = t->v[j] = (const char *)zeros;
    for (int j = t->lo, n; j < t->hi; j += n) {
        const int64_t slot = (base + j) / p->page, at = (base + j) % p->page;
        const int64_t page = slot < p->max_pages ? table[slot] : -1;
        n = p->page - at < t->hi - j ? (int)(p->page - at) : t->hi - j;
        const int known = page >= 0 && page < p->pages;
        const size_t off = (size_t)((page * p->page + at) * p->hkv + kv_head) *
                           (size_t)p->d * elem_size(p->cache_dt);
        for (int i = 0; i < n; i++) {
            t->k[j + i] = known ? (const char *)p->k_cache + off + i * row : (const char *)zeros;
            t->v[j + i] = known ? (const char *)p->v_cache + off + i * row : (const char *)zeros;
        }
    }
}

/* K rows to kt[d][TILE]; meanwhile a later step's K rows, and its V rows if `values`, are fetched
 * into the cache, a few lines at a time: what a burst of them waits for, nothing can hide. */
static void load_keys(const attn_args *p, const tile_rows *t, const tile_rows *next, int values,
                      float *kt) {
    const int64_t d = p->d;
    for (int j = t->lo / NR * NR; j < t->hi; j += 8) {
        int64_t i = 0;
#if ISA
        const int64_t bytes = d * (int64_t)elem_size(p->cache_dt);
        const int lines = (int)elem_size(p->cache_dt); /* of 8 rows, for 8 elements of each */
        const int last = j + 8 < next->hi ? j + 8 : next->hi;
        int row = j > next->lo ? j : next->lo;
        for (int64_t at = 0; i + 8 <= d; i += 8) {
            transpose8(t->k + j, p->cache_dt, i, kt + j);
            for (int n = 0; n < lines && row < last; n++) {
                __builtin_prefetch(next->k[row] + at, 0, 2);
                if (values) __builtin_prefetch(next->v[row] + at, 0, 2);
                at += 64;
                if (at >= bytes) at = 0, row++;
            }
        }
#endif
        for (; i < d; i++)
            for (int r = 0; r < 8; r++)
                kt[i * TILE + j + r] = p->cache_dt == DT_F32
                                           ? ((const float *)t->k[j + r])[i]
                                           : bf16_to_f32(((const uint16_t *)t->k[j + r])[i]);
    }
}

static void load_values(const attn_args *p, const tile_rows *t, float *v) {
    const int64_t d = p->d, dp = padded(d);
    for (int j = t->lo; j < t->hi; j++)
        for (int64_t i = 0; i < dp; i += VW)
            vstore(v + j * dp + i, i < d ? vload_n(t->v[j], p->cache_dt, i, d - i) : vset(0.0f));
}

static const float iota[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* Scores of one row, scaled, capped and masked in place; returns the highest. */
INLINE float score_row(const attn_args *p, float *s, int lo, int hi) {
    const vf scale = vset((float)p->scale), ninf = vset(-INFINITY);
    vf top = ninf;
#pragma GCC unroll 16
    for (int i = 0; i < LV; i++) {
        vf x = vload(s + i * VW) * scale;
        if (p->softcap > 0.0) { /* cap * tanh(x / cap) */
            const vf cap = vset((float)p->softcap), two = vset(2.0f), one = vset(1.0f);
            x = cap * (one - two / (vexp(x / cap * two) + one));
        }
        if (lo > 0 || hi < TILE) {
            vf at = vload(iota) + vset((float)(i * VW));
            x = vsel_gt(vset((float)hi), at, x, ninf);
            x = vsel_gt(vset((float)lo), at, ninf, x);
        }
        vstore(s + i * VW, x);
        top = vmax(x, top);
    }
    return lanes_max(top);
}

/* Scores to exp(score - m) in place; returns their sum. */
INLINE float exp_row(float *s, float m) {
    vf x[LV];
#pragma GCC unroll 16
    for (int i = 0; i < LV; i++) {
        x[i] = vexp(vload(s + i * VW) - vset(m));
        vstore(s + i * VW, x[i]);
    }
    return lanes_sum(x);
}

INLINE void scale_row(float *o, int64_t dp, float f) {
    for (int64_t i = 0; i < dp; i += VW) vstore(o + i, vload(o + i) * vset(f));
}

/* One tile's scores to weights; moves m, l and o of every row that sees something. */
static void softmax_tile(const attn_args *p, const int *lo, const int *hi, int64_t rows, float *s,
                         softmax_state *st, int64_t at, int64_t dp) {
    float *m = st->m + at, *l = st->l + at, *o = st->o + at * dp;
    float fade[(ROWS + 15) / 16 * 16];
    for (int64_t r = 0; r < rows; r++) {
        fade[r] = 0.0f;
        if (lo[r] >= hi[r]) continue;
        const float old = m[r], top = score_row(p, s + r * TILE, lo[r], hi[r]);
        m[r] = top > old ? top : old;
        fade[r] = old == m[r] ? 0.0f : old - m[r];
    }
    for (int64_t r = rows; r % VW; r++) fade[r] = 0.0f;
    for (int64_t r = 0; r < rows; r += VW) vstore(fade + r, vexp(vload(fade + r)));
    for (int64_t r = 0; r < rows; r++) {
        if (lo[r] >= hi[r]) continue;
        l[r] = l[r] * fade[r] + exp_row(s + r * TILE, m[r]);
        if (fade[r] != 1.0f) scale_row(o + r * dp, dp, fade[r]);
    }
}

/* Where a V row is halved: one half is fetched along with the scores, one with the values. */
INLINE int64_t fetch_half(const attn_args *p) {
    return p->d * (int64_t)elem_size(p->cache_dt) / 128 * 64;
}

/* o of n rows with equal bounds += weights * V, from the copy in v or, without one, the cache. */
static void add_values(const attn_args *p, const tile_rows *t, const tile_rows *next,
                       const float *s, int lo, int hi, int n, const float *v, float *o,
                       int64_t dp) {
    const int64_t row = p->hkv * p->d * 4;
    for (int j = lo, run; j < hi; j += run) {
        for (run = 1; !v && j + run < hi && t->v[j + run] == t->v[j] + run * row;) run++;
        if (v) run = hi - lo;
        tile_args ta = {.a = s + j, .lda = TILE, .b = v ? (const void *)(v + j * dp) : t->v[j],
                        .ldb = v ? dp : p->hkv * p->d, .pstride = NR, .k = run, .c = o, .ldc = dp,
                        .first = 0};
        if (next) {
            ta.fetch = next->v + j, ta.fetches = run;
            ta.fetch_from = fetch_half(p), ta.fetch_to = p->d * (int64_t)elem_size(p->cache_dt);
        }
        tile_panels(ta, T_STRIDED, n, (int)(dp / NR));
    }
}

/* Step i of a span: its tiles ascending, in each the kv heads of the item (neighbours in memory).
 * What the item's rows see of the tile, and where it lies. */
static void open_step(const attn_args *p, const attn_item *it, int64_t span, int64_t i,
                      tile_rows *t) {
    const int64_t base = span * SPAN + i / it->kv_heads * TILE;
    const int64_t first = row_position(p, it->request, it->row);
    const int64_t high = first + it->rows - base, low = first + 1 - p->window - base;
    t->hi = high < 0 ? 0 : high > TILE ? TILE : (int)high;
    t->lo = p->window == 0 || low < 0 ? 0 : low > TILE ? TILE : (int)low;
    if (t->lo >= t->hi) t->lo = t->hi = 0;
    else locate(p, it, it->kv_head + i % it->kv_heads, base, t);
}

/* One tile of one kv head for `rows` chains, whose q, o, m and l start at number `at`. */
static void attend_tile(const attn_args *p, const tile_rows *t, const tile_rows *next, int64_t at,
                        int64_t rows, const int *lo, const int *hi, attn_scratch *w,
                        softmax_state *st) {
    const int64_t dp = padded(p->d), tiles_r = (rows + MR_MAX - 1) / MR_MAX;
    const int copy = rows > MR_MAX || p->cache_dt != DT_F32 || p->d != dp;
    const int from = t->lo / NR, panels = (t->hi + NR - 1) / NR - from;
    /* few rows of fp32 wait for memory: V is fetched later, so that fetches never pause */
    const int few = rows <= MR_MAX && p->cache_dt == DT_F32 && next->lo < next->hi;
    load_keys(p, t, next, !few, w->kt);
    if (copy) load_values(p, t, w->v);
    for (int64_t c = 0; c < tiles_r; c++) {
        const int64_t a = c * rows / tiles_r, mr = (c + 1) * rows / tiles_r - a;
        tile_args ta = {.a = w->q + (at + a) * dp, .lda = dp, .b = w->kt + from * NR,
                        .ldb = TILE, .pstride = NR, .k = p->d,
                        .c = w->s + a * TILE + from * NR, .ldc = TILE, .first = 1};
        if (few)
            ta.fetch = next->v, ta.fetches = p->d < TILE ? p->d : TILE, ta.fetch_to = fetch_half(p);
        tile_panels(ta, T_STRIDED, (int)mr, panels);
    }
    softmax_tile(p, lo, hi, rows, w->s, st, at, dp);
    for (int64_t r = 0, n; r < rows; r += n) {
        for (n = 1; r + n < rows && n < MR_MAX && lo[r + n] == lo[r] && hi[r + n] == hi[r];) n++;
        if (lo[r] < hi[r])
            add_values(p, t, few ? next : NULL, w->s + r * TILE, lo[r], hi[r], (int)n,
                       copy ? w->v : NULL, st->o + (at + r) * dp, dp);
    }
}

/* Fetches a tile that no step before it has fetched: all at once is less than one by one. */
static void fetch_tile(const attn_args *p, const tile_rows *t) {
    const int64_t bytes = p->d * (int64_t)elem_size(p->cache_dt);
    for (int j = t->lo; j < t->hi; j++)
        for (int64_t at = 0; at < bytes; at += 64) {
            __builtin_prefetch(t->k[j] + at, 0, 2);
            __builtin_prefetch(t->v[j] + at, 0, 2);
        }
}

/* One span of one item into st; rows that see nothing in it end with l = 0. */
static void attend_span(const attn_args *p, const attn_item *it, int64_t span, attn_scratch *w,
                        softmax_state *st) {
    const int64_t rows = it->rows * it->heads, all = item_rows(it);
    const int64_t first = row_position(p, it->request, it->row);
    const int64_t steps = SPAN / TILE * it->kv_heads;
    tile_rows ring[FETCH + 1];
    for (int64_t r = 0; r < all; r++) st->m[r] = -INFINITY, st->l[r] = 0.0f;
    memset(st->o, 0, (size_t)(all * padded(p->d)) * sizeof(float));
    for (int64_t i = 0; i < FETCH; i++) {
        open_step(p, it, span, i, &ring[i]);
        fetch_tile(p, &ring[i]);
    }
    for (int64_t i = 0; i < steps; i++) {
        const int64_t base = span * SPAN + i / it->kv_heads * TILE;
        const tile_rows *t = &ring[i % (FETCH + 1)];
        tile_rows *next = &ring[(i + FETCH) % (FETCH + 1)];
        open_step(p, it, span, i + FETCH, next);
        if (t->lo >= t->hi) continue;
        int lo[ROWS], hi[ROWS];
        for (int64_t r = 0; r < rows; r++) {
            const int64_t h = first + r / it->heads + 1 - base, l = p->window ? h - p->window : 0;
            hi[r] = h < 0 ? 0 : h > TILE ? TILE : (int)h;
            lo[r] = l < 0 ? 0 : l > TILE ? TILE : (int)l;
        }
        attend_tile(p, t, next, i % it->kv_heads * rows, rows, lo, hi, w, st);
    }
}

INLINE float exp1(float x) {
    float e[VW];
    vstore(e, vexp(vset(x)));
    return e[0];
}

/* Fold (m, l, o) of the next span into the running (*m0, *l0, o0). */
static void merge_row(float *m0, float *l0, float *o0, float m, float l, const float *o,
                      int64_t dp) {
    if (l == 0.0f) return;
    if (*l0 == 0.0f) {
        *m0 = m, *l0 = l;
        memcpy(o0, o, (size_t)dp * sizeof(float));
        return;
    }
    const float top = m > *m0 ? m : *m0, a = exp1(*m0 - top), b = exp1(m - top);
    *m0 = top;
    *l0 = *l0 * a + l * b;
    for (int64_t i = 0; i < dp; i += VW)
        vstore(o0 + i, vfma(vload(o0 + i), vset(a), vload(o + i) * vset(b)));
}

/* Divide, apply the sink, write o and lse of row r of the item. */
static void finish_row(const attn_args *p, const attn_item *it, int64_t r, float m, float l,
                       const float *o) {
    const int64_t head = query_head(p, it, r), at = query_row(it, r) * p->hq + head;
    float f = 0.0f, lse = -INFINITY;
    if (l != 0.0f) {
        lse = m + logf(l); /* without the sink */
        f = 1.0f / l;
        if (p->sink) {
            const float sink = p->sink[head], top = sink > m ? sink : m, a = exp1(m - top);
            f = a / (l * a + exp1(sink - top));
        }
    }
    if (p->lse) p->lse[at] = lse;
    char *out = (char *)p->out + (size_t)(at * p->d) * elem_size(p->dt);
    for (int64_t i = 0; i < p->d; i += VW)
        vstore_n(out, p->dt, i, p->d - i, l != 0.0f ? vload(o + i) * vset(f) : vset(0.0f));
}

/* Spans that some row of the item sees: [*from, *to). */
static void item_spans(const attn_args *p, const attn_item *it, int64_t *from, int64_t *to) {
    const int64_t first = row_position(p, it->request, it->row), last = first + it->rows - 1;
    const int64_t low = p->window > 0 ? first + 1 - p->window : 0;
    *from = low > 0 ? low / SPAN : 0;
    *to = last < 0 ? 0 : last / SPAN + 1;
}

static void attention_item(const attn_args *p, int64_t item) {
    const attn_item *it = p->items + item;
    const int64_t dp = padded(p->d), rows = item_rows(it);
    attn_scratch w;
    softmax_state total, part;
    int64_t from, to;
    item_spans(p, it, &from, &to);
    for (int64_t r = 0; r < rows; r++) total.l[r] = 0.0f, total.m[r] = -INFINITY;
    if (from < to) load_queries(p, it, w.q);
    for (int64_t s = from; s < to; s++) {
        softmax_state *st = s == from ? &total : &part;
        attend_span(p, it, s, &w, st);
        for (int64_t r = 0; s != from && r < rows; r++)
            merge_row(&total.m[r], &total.l[r], total.o + r * dp, part.m[r], part.l[r],
                      part.o + r * dp, dp);
    }
    for (int64_t r = 0; r < rows; r++)
        finish_row(p, it, r, total.m[r], total.l[r], total.o + r * dp);
}

/* The same work with the spans of an item on several threads: parts[item][span] = m, l, o. */
static void attention_part(const attn_args *p, int64_t item, int64_t span) {
    const attn_item *it = p->items + item;
    const int64_t dp = padded(p->d), rows = item_rows(it);
    float *out = p->parts + (item * p->spans + span) * p->part;
    int64_t from, to;
    item_spans(p, it, &from, &to);
    if (span < from || span >= to) return;
    attn_scratch w;
    softmax_state st;
    load_queries(p, it, w.q);
    attend_span(p, it, span, &w, &st);
    memcpy(out, st.m, (size_t)rows * sizeof(float));
    memcpy(out + ROWS, st.l, (size_t)rows * sizeof(float));
    memcpy(out + 2 * ROWS, st.o, (size_t)(rows * dp) * sizeof(float));
}

static void attention_merge(const attn_args *p, int64_t item) {
    const attn_item *it = p->items + item;
    const int64_t dp = padded(p->d), rows = item_rows(it);
    int64_t from, to;
    item_spans(p, it, &from, &to);
    for (int64_t r = 0; r < rows; r++) {
        float m = -INFINITY, l = 0.0f, o[MAX_D];
        for (int64_t s = from; s < to; s++) {
            const float *part = p->parts + (item * p->spans + s) * p->part;
            merge_row(&m, &l, o, part[r], part[ROWS + r], part + 2 * ROWS + r * dp, dp);
        }
        finish_row(p, it, r, m, l, o);
    }
}
