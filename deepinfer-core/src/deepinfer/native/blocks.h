/* Halves of a decoder layer in one call each: the jobs of their ops in one chain. The kernels and
 * their order are those of the ops, so are the bits. Included by module.c.
 */

/* One allocation, cut up in the order of the calls. */
typedef struct {
    char *base;
    size_t used;
} arena;

static void *cut(arena *a, int64_t n, size_t size) {
    void *p = a->base ? a->base + a->used : NULL;
    a->used += ((size_t)n * size + 63) / 64 * 64;
    return p;
}

static void add_norm(chain *c, norm_args *p) {
    add_job(c, norm_range, p, p->rows, 1 + 4096 / (p->h + 1));
}

/* Head norms, rotation and KV write of a token. */
typedef struct {
    norm_args q_norm, k_norm;
    rope_args q, k; /* without head norms q holds the keys too */
    kvw_args kv;
} turn_args;

static void turn_range(void *ctx, int64_t from, int64_t to) {
    const turn_args *p = ctx;
    for (int64_t t = from; t < to; t++) {
        for (int64_t i = 0; i < p->q_norm.inner; i++)
            kernels->norm(&p->q_norm, t * p->q_norm.inner + i);
        for (int64_t i = 0; i < p->k_norm.inner; i++)
            kernels->norm(&p->k_norm, t * p->k_norm.inner + i);
        kernels->rope(&p->q, t);
        if (p->k.heads) kernels->rope(&p->k, t);
        if (p->kv.slots[t] >= 0) kernels->kv_write(&p->kv, t);
    }
}

typedef struct {
    norm_args norm;
    linear_plan qkv, o;
    turn_args turn;
    attn_args attn;
    float *packed;
} attention_plan;

/* Gives every step its memory out of s; without s.base it only counts. */
static void place_attention(attention_plan *b, arena *s) {
    const int64_t t = b->turn.q.t, h = b->norm.h, d = b->turn.q.d;
    const int64_t hq = b->attn.hq, hkv = b->attn.hkv, wide = hq + 2 * hkv;
    const int dt = b->norm.dt, apart = b->turn.k.heads != 0;
    const size_t es = dt == DT_F32 ? 4 : 2;
    b->norm.out = cut(s, t * h, es);
    char *qkv = b->qkv.p.out = cut(s, t * wide * d, es);
    b->turn.q.x = qkv, b->turn.q.stride_t = wide * d;
    if (apart) {
        b->turn.q_norm.x = qkv;
        b->turn.k_norm.x = qkv + (size_t)(hq * d) * es;
        b->turn.q.x = b->turn.q_norm.out = cut(s, t * hq * d, es);
        b->turn.k.x = b->turn.k_norm.out = cut(s, t * hkv * d, es);
        b->turn.q.stride_t = hq * d;
    }
    char *q = b->turn.q.out = cut(s, t * b->turn.q.heads * d, es);
    char *k = apart ? b->turn.k.out = cut(s, t * hkv * d, es) : q + (size_t)(hq * d) * es;
    b->turn.kv.k = k, b->turn.kv.stride_k = apart ? hkv * d : (hq + hkv) * d;
    b->turn.kv.v = qkv + (size_t)((hq + hkv) * d) * es, b->turn.kv.stride_v = wide * d;
    b->attn.q = q, b->attn.stride_q = b->turn.q.heads * d;
    b->attn.out = cut(s, t * hq * d, es);
    const int64_t one = packed_size(t, h, dt, b->qkv.p.wt);
    const int64_t two = packed_size(t, hq * d, dt, b->o.p.wt);
    b->packed = cut(s, one > two ? one : two, sizeof(float));
}

/* x, res, y, new_res, dt, t, h, stride_x, stride_res,                               0
 * norm, norm_dt, eps, qkv, w_dt, scales, bias, bias_dt, q_norm, k_norm, head_norm_dt, 9
 * hq, hkv, d, scale, window, o, w_dt, scales, bias, bias_dt,                       20
 * cos_sin, r, table_rows, positions, slots,                                        30
 * table, max_pages, kv_len, len64, cu_q, batch, k_cache, v_cache, cache_dt,        35
 * pages, page, head_eps, threads                                                   44 */
static const char *op_attention_block(const arg *a) {
    const int dt = (int)a[4].i, apart = a[17].p != NULL;
    const int64_t t = a[5].i, h = a[6].i, hq = a[20].i, hkv = a[21].i, d = a[22].i;
    attention_plan b = {
        .norm = {.x = a[0].p, .res = a[1].p, .w = a[9].p, .new_res = a[3].p, .rows = t,
                 .inner = 1, .h = h, .stride_outer = a[7].i, .stride_res = a[8].i,
                 .eps = a[11].d, .dt = dt, .w_dt = (int)a[10].i},
        .qkv.p = {.w = a[12].p, .scales = a[14].p, .bias = a[15].p, .m = t,
                  .n = (hq + 2 * hkv) * d, .k = h, .wt = (int)a[13].i,
                  .bias_dt = (int)a[16].i, .out_dt = dt},
        .o.p = {.w = a[25].p, .scales = a[27].p, .bias = a[28].p, .out = a[2].p, .m = t, .n = h,
                .k = hq * d, .wt = (int)a[26].i, .bias_dt = (int)a[29].i, .out_dt = dt},
        .attn = {.k_cache = a[41].p, .v_cache = a[42].p, .table = a[35].p, .kv_len = a[37].p,
                 .len64 = (int)a[38].i, .cu_q = a[39].p, .dt = dt, .cache_dt = (int)a[43].i,
                 .batch = a[40].i, .hq = hq, .hkv = hkv, .d = d, .page = a[45].i,
                 .max_pages = a[36].i, .window = a[24].i, .pages = a[44].i, .scale = a[23].d}};
    turn_args *turn = &b.turn;
    turn->q = (rope_args){.positions = a[33].p, .cos_sin = a[30].p, .dt = dt, .t = t,
                          .heads = apart ? hq : hq + hkv, .d = d, .r = a[31].i,
                          .table_rows = a[32].i};
    turn->kv = (kvw_args){.dt = dt, .k_cache = a[41].p, .v_cache = a[42].p,
                          .cache_dt = (int)a[43].i, .slots = a[34].p, .t = t, .width = hkv * d};
    if (apart) {
        turn->k = turn->q;
        turn->k.heads = hkv, turn->k.stride_t = hkv * d;
        turn->q_norm = (norm_args){.w = a[17].p, .rows = t * hq, .inner = hq, .h = d,
                                   .stride_outer = (hq + 2 * hkv) * d, .eps = a[46].d, .dt = dt,
                                   .w_dt = (int)a[19].i};
        turn->k_norm = turn->q_norm;
        turn->k_norm.w = a[18].p, turn->k_norm.rows = t * hkv, turn->k_norm.inner = hkv;
    }
    for (int64_t i = 0; i < t; i++) {
        if (turn->q.positions[i] < 0 || turn->q.positions[i] >= turn->q.table_rows)
            return "a position is outside cos_sin";
        if (turn->kv.slots[i] >= b.attn.pages * b.attn.page) return "a slot is outside the cache";
    }
    arena s = {NULL, 0};
    place_attention(&b, &s);
    s.base = malloc(s.used), s.used = 0;
    if (!s.base) return "out of memory";
    place_attention(&b, &s);
    chain c;
    c.threads = a[47].i, c.n = 0;
    add_norm(&c, &b.norm);
    add_linear(&c, &b.qkv, b.norm.out, dt, h, b.packed);
    add_job(&c, turn_range, turn, t, 1 + 4096 / (hq * d + 1));
    const char *error = add_attention(&c, &b.attn, t);
    add_linear(&c, &b.o, b.attn.out, dt, hq * d, b.packed);
    if (!error) run_chain(&c);
    attn_free(&b.attn);
    free(s.base);
    return error;
}

/* x, res, y, new_res, dt, t, h, stride_x, stride_res, norm, norm_dt, eps,
 * gate_up, w_dt, scales, down, w_dt, scales, inner, threads */
static const char *op_mlp_block(const arg *a) {
    const int dt = (int)a[4].i;
    const int64_t t = a[5].i, h = a[6].i, inner = a[18].i;
    const size_t es = dt == DT_F32 ? 4 : 2;
    norm_args norm = {.x = a[0].p, .res = a[1].p, .w = a[9].p, .new_res = a[3].p, .rows = t,
                      .inner = 1, .h = h, .stride_outer = a[7].i, .stride_res = a[8].i,
                      .eps = a[11].d, .dt = dt, .w_dt = (int)a[10].i};
    linear_plan gate_up = {.p = {.w = a[12].p, .scales = a[14].p, .m = t, .n = 2 * inner, .k = h,
                                 .wt = (int)a[13].i, .out_dt = dt}};
    linear_plan down = {.p = {.w = a[15].p, .scales = a[17].p, .out = a[2].p, .m = t, .n = h,
                              .k = inner, .wt = (int)a[16].i, .out_dt = dt}};
    silu_args silu = {.dt = dt, .t = t, .i = inner, .stride_t = 2 * inner};
    float *packed = NULL;
    arena s = {NULL, 0};
    for (int placed = 0; placed < 2; placed++) {
        norm.out = cut(&s, t * h, es);
        gate_up.p.out = cut(&s, t * 2 * inner, es);
        silu.x = gate_up.p.out, silu.out = cut(&s, t * inner, es);
        packed = cut(&s, packed_size(t, h > inner ? h : inner, dt, gate_up.p.wt),
                     sizeof(float));
        if (placed) break;
        s.base = malloc(s.used), s.used = 0;
        if (!s.base) return "out of memory";
    }
    chain c;
    c.threads = a[19].i, c.n = 0;
    add_norm(&c, &norm);
    add_linear(&c, &gate_up, norm.out, dt, h, packed);
    const int64_t parts = (inner + SILU_PART - 1) / SILU_PART;
    add_job(&c, silu_range, &silu, t * parts, threads_for(2, 2 * t * inner) > 1 ? 2 : t * parts);
    add_linear(&c, &down, silu.out, dt, inner, packed);
    run_chain(&c);
    free(s.base);
    return NULL;
}
