/* Paged attention with an online softmax over KV tiles at absolute positions.
 *
 * One (query row, head) is one chain: spans of SPAN positions ascending, inside a span tiles of
 * TILE positions ascending, inside a tile positions ascending. A tile in which the row sees nothing
 * is no step of the chain, and a position it does not see is no term of it. So a row's bits depend
 * on its position, its q and the K/V it sees: not on chunking, neighbours, pages or threads.
 */
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

INLINE int64_t kv_length(const attn_args *p, int64_t b) {
    return p->len64 ? ((const int64_t *)p->kv_len)[b] : ((const int32_t *)p->kv_len)[b];
}
INLINE int64_t padded(int64_t d) { return (d + NR - 1) / NR * NR; }

/* Absolute position of query row `row` of request b. */
INLINE int64_t row_position(const attn_args *p, int64_t b, int64_t row) {
    return kv_length(p, b) - p->cu_q[b + 1] + row;
}

static void load_queries(const attn_args *p, const attn_item *it, float *q) {
    const size_t es = elem_size(p->dt);
    const int64_t dp = padded(p->d), group = p->hq / p->hkv;
    for (int64_t r = 0; r < it->rows; r++)
        for (int64_t h = 0; h < it->heads; h++) {
            const int64_t head = it->kv_head * group + it->head + h;
            to_f32((const char *)p->q + (size_t)((it->row + r) * p->stride_q + head * p->d) * es,
                   p->dt, q + (r * it->heads + h) * dp, p->d);
        }
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
    for (int r = 0; r < 8; r++) a[r] = load8(row[r], dt, i);
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
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
        _mm256_storeu_ps(kt + (i + r) * TILE, _mm256_permute2f128_ps(a[r], a[r + 4], 0x20));
        _mm256_storeu_ps(kt + (i + r + 4) * TILE, _mm256_permute2f128_ps(a[r], a[r + 4], 0x31));
    }
}
#endif

/* K rows to kt[d][TILE] (positions [lo, hi) rounded out to 16, zero beside) and V rows to v. */
static void load_tile(const attn_args *p, const attn_item *it, int64_t base, int lo, int hi,
                      attn_scratch *w) {
    static const float zeros[MAX_D];
    const size_t es = elem_size(p->cache_dt);
    const int64_t d = p->d, dp = padded(d);
    const int32_t *table = p->table + it->request * p->max_pages;
    const char *k[TILE], *v[TILE];
    const int from = lo / NR * NR, to = (hi + NR - 1) / NR * NR;
    for (int j = from; j < to; j++) {
        const int64_t pos = base + j, slot = pos / p->page;
        k[j] = v[j] = (const char *)zeros;
        if (j < lo || j >= hi || slot >= p->max_pages) continue;
        const int64_t page = table[slot];
        if (page < 0 || page >= p->pages) continue;
        const size_t off =
            (size_t)(((page * p->page + pos % p->page) * p->hkv + it->kv_head) * d) * es;
        k[j] = (const char *)p->k_cache + off;
        v[j] = (const char *)p->v_cache + off;
    }
    for (int j = from; j < to; j += 8) {
        int64_t i = 0;
#if ISA
        for (; i + 8 <= d; i += 8) transpose8(k + j, p->cache_dt, i, w->kt + j);
#endif
        for (; i < d; i++)
            for (int r = 0; r < 8; r++)
                w->kt[i * TILE + j + r] = p->cache_dt == DT_F32
                                              ? ((const float *)k[j + r])[i]
                                              : bf16_to_f32(((const uint16_t *)k[j + r])[i]);
    }
    for (int j = lo; j < hi; j++)
        for (int64_t i = 0; i < d; i += VW)
            vstore_n(w->v + j * dp, DT_F32, i, dp - i, vload_n(v[j], p->cache_dt, i, d - i));
}

/* Scores of one row in place to probabilities; returns their sum, moves *m, sets *alpha. */
INLINE float softmax_row(const attn_args *p, float *s, int lo, int hi, float *m, float *alpha) {
    static const float iota[VW] = {0, 1, 2, 3,
#if VW > 4
                                   4, 5, 6, 7,
#endif
#if VW > 8
                                   8, 9, 10, 11, 12, 13, 14, 15
#endif
    };
    const vf scale = vset((float)p->scale), ninf = vset(-INFINITY);
    vf x[LV], top = ninf;
#pragma GCC unroll 16
    for (int i = 0; i < LV; i++) {
        x[i] = vload(s + i * VW) * scale;
        if (p->softcap > 0.0) { /* cap * tanh(x / cap) */
            const vf cap = vset((float)p->softcap), two = vset(2.0f), one = vset(1.0f);
            x[i] = cap * (one - two / (vexp(x[i] / cap * two) + one));
        }
        if (lo > 0 || hi < TILE) {
            vf at = vload(iota) + vset((float)(i * VW));
            x[i] = vsel_gt(vset((float)hi), at, x[i], ninf);
            x[i] = vsel_gt(vset((float)lo), at, ninf, x[i]);
        }
        top = vmax(x[i], top);
    }
    const float old = *m, row = lanes_max(top), now = row > old ? row : old;
    float e[VW];
    vstore(e, vexp(vset(old - now)));
    *alpha = old == -INFINITY ? 0.0f : e[0];
    *m = now;
#pragma GCC unroll 16
    for (int i = 0; i < LV; i++) {
        x[i] = vexp(x[i] - vset(now));
        vstore(s + i * VW, x[i]);
    }
    return lanes_sum(x);
}

INLINE void scale_row(float *o, int64_t dp, float f) {
    for (int64_t i = 0; i < dp; i += VW) vstore(o + i, vload(o + i) * vset(f));
}

/* One span of one item into st; rows that see nothing in it end with l = 0. */
static void attend_span(const attn_args *p, const attn_item *it, int64_t span, attn_scratch *w,
                        softmax_state *st) {
    const int64_t dp = padded(p->d), rows = it->rows * it->heads;
    const int64_t first = row_position(p, it->request, it->row);
    for (int64_t r = 0; r < rows; r++) st->m[r] = -INFINITY, st->l[r] = 0.0f;
    memset(st->o, 0, (size_t)(rows * dp) * sizeof(float));
    for (int64_t base = span * SPAN; base < (span + 1) * SPAN; base += TILE) {
        int lo[ROWS], hi[ROWS], low = TILE, high = 0;
        for (int64_t r = 0; r < rows; r++) {
            const int64_t pos = first + r / it->heads;
            const int64_t h = pos + 1 - base, l = p->window > 0 ? h - p->window : 0;
            hi[r] = h < 0 ? 0 : h > TILE ? TILE : (int)h;
            lo[r] = l < 0 ? 0 : l > TILE ? TILE : (int)l;
            if (lo[r] >= hi[r]) continue;
            if (lo[r] < low) low = lo[r];
            if (hi[r] > high) high = hi[r];
        }
        if (low >= high) continue;
        load_tile(p, it, base, low, high, w);
        const int from = low / NR, panels = (high + NR - 1) / NR - from;
        const int64_t tiles_r = (rows + MR_MAX - 1) / MR_MAX;
        for (int64_t t = 0; t < tiles_r; t++) {
            const int64_t a = t * rows / tiles_r, mr = (t + 1) * rows / tiles_r - a;
            tile_args ta = {.a = w->q + a * dp, .lda = dp, .b = w->kt + from * NR, .ldb = TILE,
                            .pstride = NR, .k = p->d, .c = w->s + a * TILE + from * NR,
                            .ldc = TILE, .first = 1};
            tile_panels(ta, T_STRIDED, (int)mr, panels);
        }
        for (int64_t r = 0; r < rows; r++) {
            if (lo[r] >= hi[r]) continue;
            float alpha;
            float sum = softmax_row(p, w->s + r * TILE, lo[r], hi[r], &st->m[r], &alpha);
            st->l[r] = st->l[r] * alpha + sum;
            if (alpha != 1.0f) scale_row(st->o + r * dp, dp, alpha);
        }
        for (int64_t r = 0, n; r < rows; r += n) {
            for (n = 1; r + n < rows && n < MR_MAX && lo[r + n] == lo[r] && hi[r + n] == hi[r];)
                n++;
            if (lo[r] >= hi[r]) continue;
            tile_args ta = {.a = w->s + r * TILE + lo[r], .lda = TILE, .b = w->v + lo[r] * dp,
                            .ldb = dp, .pstride = NR, .k = hi[r] - lo[r],
                            .c = st->o + r * dp, .ldc = dp, .first = 0};
            tile_panels(ta, T_STRIDED, (int)n, (int)(dp / NR));
        }
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
    const int64_t head = it->kv_head * (p->hq / p->hkv) + it->head + r % it->heads;
    const int64_t at = (it->row + r / it->heads) * p->hq + head;
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
    const int64_t dp = padded(p->d), rows = it->rows * it->heads;
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
    const int64_t dp = padded(p->d), rows = it->rows * it->heads;
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
    const int64_t dp = padded(p->d), rows = it->rows * it->heads;
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
