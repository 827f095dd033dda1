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

/* A norm and the product of its rows. */
typedef struct {
    norm_args norm;
    linear_plan linear;
} normed_linear;

/* A thread that has a row at hand also rounds it for an int8 product: one wait less. */
static void normed_range(void *ctx, int64_t from, int64_t to) {
    normed_linear *p = ctx;
    for (int64_t i = from; i < to; i++) kernels->norm(&p->norm, i);
    if (p->linear.p.wt == DT_INT8) quant_x(&p->linear.x, from, to);
}

static void add_normed_linear(chain *c, normed_linear *b, float *packed) {
    aim_linear(&b->linear, b->norm.out, b->norm.dt, b->norm.h, packed);
    add_job(c, normed_range, b, b->norm.rows, 1 + 4096 / (b->norm.h + 1));
    if (b->linear.p.wt != DT_INT8) add_packing(c, &b->linear);
    add_product(c, &b->linear);
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
    normed_linear in;
    linear_plan o;
    turn_args turn;
    attn_args attn;
    float *packed;
} attention_plan;

/* Gives every step its memory out of s; without s.base it only counts. */
static void place_attention(attention_plan *b, arena *s) {
    norm_args *norm = &b->in.norm;
    linear_args *in = &b->in.linear.p;
    const int64_t t = b->turn.q.t, h = norm->h, d = b->turn.q.d;
    const int64_t hq = b->attn.hq, hkv = b->attn.hkv, wide = hq + 2 * hkv;
    const int dt = norm->dt, apart = b->turn.k.heads != 0;
    const size_t es = dt == DT_F32 ? 4 : 2;
    norm->out = cut(s, t * h, es);
    char *qkv = in->out = cut(s, t * wide * d, es);
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
    const int64_t one = packed_size(t, h, dt, in->wt);
    const int64_t two = packed_size(t, hq * d, dt, b->o.p.wt);
    b->packed = cut(s, one > two ? one : two, sizeof(float));
}

/* The arguments come in these pieces.
 *
 * rows:      x, res, y, new_res, dt, t, h, stride_x, stride_res
 * attention: norm, norm_dt, eps, qkv, w_dt, scales, bias, bias_dt,                           0
 *            q_norm, k_norm, head_norm_dt, head_eps, hq, hkv, d, scale, window,              8
 *            o, w_dt, scales, bias, bias_dt, k_cache, v_cache, cache_dt, pages, page        17
 * step:      cos_sin, r, table_rows, positions, slots, table, max_pages, kv_len, len64, cu_q, batch
 * mlp:       norm, norm_dt, eps, gate_up, w_dt, scales, down, w_dt, scales, inner */
enum { ROWS_ARGS = 9, ATTENTION_ARGS = 27, STEP_ARGS = 11, MLP_ARGS = 10 };

static norm_args first_norm(const arg *rows, const arg *norm) {
    return (norm_args){.x = rows[0].p, .res = rows[1].p, .w = norm[0].p, .new_res = rows[3].p,
                       .rows = rows[5].i, .inner = 1, .h = rows[6].i, .stride_outer = rows[7].i,
                       .stride_res = rows[8].i, .eps = norm[2].d, .dt = (int)rows[4].i,
                       .w_dt = (int)norm[1].i};
}

static const char *plan_attention(attention_plan *b, const arg *rows, const arg *a,
                                  const arg *step) {
    const int dt = (int)rows[4].i, apart = a[8].p != NULL;
    const int64_t t = rows[5].i, h = rows[6].i, hq = a[12].i, hkv = a[13].i, d = a[14].i;
    *b = (attention_plan){
        .in.norm = first_norm(rows, a),
        .in.linear.p = {.w = a[3].p, .scales = a[5].p, .bias = a[6].p, .m = t, .n = (hq + 2 * hkv) * d,
                  .k = h, .wt = (int)a[4].i, .bias_dt = (int)a[7].i, .out_dt = dt},
        .o.p = {.w = a[17].p, .scales = a[19].p, .bias = a[20].p, .out = rows[2].p, .m = t, .n = h,
                .k = hq * d, .wt = (int)a[18].i, .bias_dt = (int)a[21].i, .out_dt = dt},
        .attn = {.k_cache = a[22].p, .v_cache = a[23].p, .table = step[5].p,
                 .kv_len = step[7].p, .len64 = (int)step[8].i, .cu_q = step[9].p, .dt = dt,
                 .cache_dt = (int)a[24].i, .batch = step[10].i, .hq = hq, .hkv = hkv, .d = d,
                 .page = a[26].i, .max_pages = step[6].i, .window = a[16].i, .pages = a[25].i,
                 .scale = a[15].d}};
    turn_args *turn = &b->turn;
    turn->q = (rope_args){.positions = step[3].p, .cos_sin = step[0].p, .dt = dt, .t = t,
                          .heads = apart ? hq : hq + hkv, .d = d, .r = step[1].i,
                          .table_rows = step[2].i};
    turn->kv = (kvw_args){.dt = dt, .k_cache = a[22].p, .v_cache = a[23].p,
                          .cache_dt = (int)a[24].i, .slots = step[4].p, .t = t, .width = hkv * d};
    if (apart) {
        turn->k = turn->q;
        turn->k.heads = hkv, turn->k.stride_t = hkv * d;
        turn->q_norm = (norm_args){.w = a[8].p, .rows = t * hq, .inner = hq, .h = d,
                                   .stride_outer = (hq + 2 * hkv) * d, .eps = a[11].d, .dt = dt,
                                   .w_dt = (int)a[10].i};
        turn->k_norm = turn->q_norm;
        turn->k_norm.w = a[9].p, turn->k_norm.rows = t * hkv, turn->k_norm.inner = hkv;
    }
    for (int64_t i = 0; i < t; i++) {
        if (turn->q.positions[i] < 0 || turn->q.positions[i] >= turn->q.table_rows)
            return "a position is outside cos_sin";
        if (turn->kv.slots[i] >= b->attn.pages * b->attn.page) return "a slot is outside the cache";
    }
    return NULL;
}

static const char *add_attention_jobs(chain *c, attention_plan *b) {
    const int64_t t = b->turn.q.t, wide = b->attn.hq * b->attn.d;
    add_normed_linear(c, &b->in, b->packed);
    add_job(c, turn_range, &b->turn, t, 1 + 4096 / (wide + 1));
    const char *error = add_attention(c, &b->attn, t);
    add_linear(c, &b->o, b->attn.out, b->attn.dt, wide, b->packed);
    return error;
}

typedef struct {
    normed_linear in;
    linear_plan down;
    silu_args silu;
    float *packed;
} mlp_plan;

/* Rows of an int8 product, as in normed_range. */
static void gated_range(void *ctx, int64_t from, int64_t to) {
    mlp_plan *p = ctx;
    for (int64_t i = from; i < to; i++) kernels->silu(&p->silu, i, 0, p->silu.i);
    quant_x(&p->down.x, from, to);
}

static void plan_mlp(mlp_plan *b, const arg *rows, const arg *a) {
    const int dt = (int)rows[4].i;
    const int64_t t = rows[5].i, h = rows[6].i, inner = a[9].i;
    *b = (mlp_plan){
        .in.norm = first_norm(rows, a),
        .in.linear.p = {.w = a[3].p, .scales = a[5].p, .m = t, .n = 2 * inner, .k = h,
                      .wt = (int)a[4].i, .out_dt = dt},
        .down.p = {.w = a[6].p, .scales = a[8].p, .out = rows[2].p, .m = t, .n = h, .k = inner,
                   .wt = (int)a[7].i, .out_dt = dt},
        .silu = {.dt = dt, .t = t, .i = inner, .stride_t = 2 * inner}};
}

/* As place_attention. */
static void place_mlp(mlp_plan *b, arena *s) {
    const int64_t t = b->silu.t, h = b->in.norm.h, inner = b->silu.i;
    const int dt = b->silu.dt;
    const size_t es = dt == DT_F32 ? 4 : 2;
    b->in.norm.out = cut(s, t * h, es);
    b->silu.x = b->in.linear.p.out = cut(s, t * 2 * inner, es);
    b->silu.out = cut(s, t * inner, es);
    const int64_t one = packed_size(t, h, dt, b->in.linear.p.wt);
    const int64_t two = packed_size(t, inner, dt, b->down.p.wt);
    b->packed = cut(s, one > two ? one : two, sizeof(float));
}

static void add_mlp_jobs(chain *c, mlp_plan *b) {
    const int64_t t = b->silu.t, inner = b->silu.i, parts = (inner + SILU_PART - 1) / SILU_PART;
    add_normed_linear(c, &b->in, b->packed);
    aim_linear(&b->down, b->silu.out, b->silu.dt, inner, b->packed);
    if (b->down.p.wt == DT_INT8) {
        add_job(c, gated_range, b, t, 1);
    } else {
        const int64_t chunk = threads_for(2, 2 * t * inner) > 1 ? 2 : t * parts;
        add_job(c, silu_range, &b->silu, t * parts, chunk);
        add_packing(c, &b->down);
    }
    add_product(c, &b->down);
}

/* rows, attention, step, threads */
static const char *op_attention_block(const arg *a) {
    attention_plan b;
    const char *error = plan_attention(&b, a, a + ROWS_ARGS, a + ROWS_ARGS + ATTENTION_ARGS);
    if (error) return error;
    arena s = {NULL, 0};
    place_attention(&b, &s);
    s.base = malloc(s.used), s.used = 0;
    if (!s.base) return "out of memory";
    place_attention(&b, &s);
    job jobs[MAX_JOBS];
    chain c = new_chain(a[ROWS_ARGS + ATTENTION_ARGS + STEP_ARGS].i, SMALL, jobs);
    error = add_attention_jobs(&c, &b);
    if (!error) run_chain(&c);
    attn_free(&b.attn);
    free(s.base);
    return error;
}

/* rows, mlp, threads */
static const char *op_mlp_block(const arg *a) {
    mlp_plan b;
    plan_mlp(&b, a, a + ROWS_ARGS);
    arena s = {NULL, 0};
    place_mlp(&b, &s);
    s.base = malloc(s.used), s.used = 0;
    if (!s.base) return "out of memory";
    place_mlp(&b, &s);
    job jobs[MAX_JOBS];
    chain c = new_chain(a[ROWS_ARGS + MLP_ARGS].i, SMALL, jobs);
    add_mlp_jobs(&c, &b);
    run_chain(&c);
    free(s.base);
    return NULL;
}

typedef struct {
    attention_plan attention;
    mlp_plan mlp;
} layer_plan;

/* Plans of n layers, each from ATTENTION_ARGS + MLP_ARGS numbers at `layers`. y and new_res carry
 * the rows from half to half; all halves work in the same memory. taps[i], if there is one, gets
 * the sum of both behind layer i: that is the residual which the next layer's first norm makes, so
 * it makes it there, and nothing is copied. (Behind the last layer the caller adds.) */
static const char *plan_layers(layer_plan *plans, int64_t n, const arg *a, const arg *layers,
                               const arg *taps, const arg *step) {
    arg rows[ROWS_ARGS];
    memcpy(rows, a, sizeof rows);
    for (int64_t i = 0; i < n; i++, layers += ATTENTION_ARGS + MLP_ARGS) {
        if (taps && i && taps[i - 1].p) rows[3].p = taps[i - 1].p;
        const char *error = plan_attention(&plans[i].attention, rows, layers, step);
        if (error) return error;
        if (!rows[1].p) rows[1].p = rows[0].p; /* the first half of all leaves x as the residual */
        else rows[1].p = rows[3].p;
        rows[0].p = rows[2].p, rows[7].i = rows[8].i = rows[6].i;
        rows[3].p = a[3].p;
        plan_mlp(&plans[i].mlp, rows, layers + ATTENTION_ARGS);
        rows[1].p = rows[3].p;
    }
    return NULL;
}

static size_t place_layers(layer_plan *plans, int64_t n, char *base) {
    size_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        arena one = {base, 0}, two = {base, 0};
        place_attention(&plans[i].attention, &one);
        place_mlp(&plans[i].mlp, &two);
        if (one.used > most) most = one.used;
        if (two.used > most) most = two.used;
    }
    return most;
}

/* rows, layers, number, taps (or NULL), step, threads */
static const char *op_decoder_layers(const arg *a) {
    const arg *layers = a[ROWS_ARGS].p, *taps = a[ROWS_ARGS + 2].p, *step = a + ROWS_ARGS + 3;
    const int64_t n = a[ROWS_ARGS + 1].i;
    layer_plan *plans = malloc((size_t)n * sizeof *plans);
    job *jobs = malloc((size_t)(2 * n * MAX_JOBS) * sizeof *jobs);
    char *base = NULL;
    const char *error = plans && jobs ? NULL : "out of memory";
    if (!error) error = plan_layers(plans, n, a, layers, taps, step);
    int64_t added = 0;
    if (!error) base = malloc(place_layers(plans, n, NULL)), error = base ? NULL : "out of memory";
    if (!error) {
        place_layers(plans, n, base);
        chain c = new_chain(step[STEP_ARGS].i, SMALL, jobs);
        for (; added < n && !error; added++) {
            error = add_attention_jobs(&c, &plans[added].attention);
            add_mlp_jobs(&c, &plans[added].mlp);
        }
        if (!error) run_chain(&c);
    }
    for (int64_t i = 0; i < added; i++) attn_free(&plans[i].attention.attn);
    free(base);
    free(jobs);
    free(plans);
    return error;
}
