/* Row kernels: norms, rotary embedding, gated SiLU, KV write. A row is independent of the rest. */

static void exp_array(const float *x, float *y, int64_t n) {
    for (int64_t i = 0; i < n; i += VW) vstore_n(y, DT_F32, i, n - i, vexp(vload_n(x, 0, i, n - i)));
}

/* Row r of the output; r counts [outer][inner]. Sum of squares over 64 lanes, a function of h. */
static void norm_row(const norm_args *p, int64_t r) {
    const size_t es = elem_size(p->dt);
    const int64_t outer = r / p->inner, in = r % p->inner, h = p->h;
    const void *x = (const char *)p->x + (size_t)(outer * p->stride_outer + in * h) * es;
    void *y = (char *)p->out + (size_t)(r * h) * es;
    vf acc[LV];
    for (int i = 0; i < LV; i++) acc[i] = vset(0.0f);
    if (p->res) {
        const void *res = (const char *)p->res + (size_t)(r * p->stride_res) * es;
        void *sum = (char *)p->new_res + (size_t)(r * h) * es;
        for (int64_t i = 0; i < h; i += VW)
            vstore_n(sum, p->dt, i, h - i,
                     vload_n(x, p->dt, i, h - i) + vload_n(res, p->dt, i, h - i));
        x = sum;
    }
    int64_t i = 0;
    for (; i + LANES <= h; i += LANES)
        for (int l = 0; l < LV; l++) {
            vf v = vload_any(x, p->dt, i + l * VW);
            acc[l] = vfma(v, v, acc[l]);
        }
    for (int l = 0; i < h; i += VW, l++) {
        vf v = vload_n(x, p->dt, i, h - i);
        acc[l] = vfma(v, v, acc[l]);
    }
    const float scale = 1.0f / sqrtf(lanes_sum(acc) / (float)h + (float)p->eps);
    for (i = 0; i < h; i += VW) {
        vf v = vload_n(x, p->dt, i, h - i) * vset(scale);
        if (p->w) v = v * vload_n(p->w, p->w_dt, i, h - i);
        vstore_n(y, p->dt, i, h - i, v);
    }
}

/* All heads of token t. Element pairs: (j, j + r/2), or (2j, 2j + 1) when interleaved. */
static void rope_row(const rope_args *p, int64_t t) {
    const size_t es = elem_size(p->dt);
    const int64_t half = p->r / 2;
    const float *cs = p->cos_sin + p->positions[t] * p->r;
    for (int64_t n = 0; n < p->heads; n++) {
        const char *x = (const char *)p->x + (size_t)(t * p->stride_t + n * p->d) * es;
        char *y = (char *)p->out + (size_t)((t * p->heads + n) * p->d) * es;
        for (int64_t j = 0; j < half; j += VW) {
            const int64_t left = half - j;
            const int w = left < VW ? (int)left : VW;
            vf c = vload_n(cs, DT_F32, j, left), s = vload_n(cs, DT_F32, half + j, left), a, b;
            float pa[VW] = {0}, pb[VW] = {0};
            if (p->interleaved) {
                float both[2 * VW];
                to_f32(x + (size_t)(2 * j) * es, p->dt, both, 2 * w);
                for (int i = 0; i < w; i++) pa[i] = both[2 * i], pb[i] = both[2 * i + 1];
                a = vload(pa), b = vload(pb);
            } else {
                a = vload_n(x, p->dt, j, left), b = vload_n(x, p->dt, half + j, left);
            }
            vf u = vfma(a, c, -(b * s)), v = vfma(b, c, a * s);
            if (p->interleaved) {
                float both[2 * VW];
                vstore(pa, u), vstore(pb, v);
                for (int i = 0; i < w; i++) both[2 * i] = pa[i], both[2 * i + 1] = pb[i];
                for (int i = 0; i < 2 * w; i += VW)
                    vstore_n(y, p->dt, 2 * j + i, 2 * w - i, vload(both + i));
            } else {
                vstore_n(y, p->dt, j, left, u);
                vstore_n(y, p->dt, half + j, left, v);
            }
        }
        memcpy(y + (size_t)p->r * es, x + (size_t)p->r * es, (size_t)(p->d - p->r) * es);
    }
}

/* Columns [from, to) of row t of silu(gate) * up; from is a multiple of 64. */
static void silu_part(const silu_args *p, int64_t t, int64_t from, int64_t to) {
    const size_t es = elem_size(p->dt);
    const char *gate = (const char *)p->x + (size_t)(t * p->stride_t) * es;
    const char *up = gate + (size_t)p->i * es;
    char *y = (char *)p->out + (size_t)(t * p->i) * es;
    const vf lim = vset((float)p->limit), one = vset(1.0f);
    for (int64_t i = from; i < to; i += VW) {
        vf g = vload_n(gate, p->dt, i, to - i), u = vload_n(up, p->dt, i, to - i);
        if (p->has_limit) { /* operand order: a NaN stays a NaN */
            g = vmin(lim, g);
            u = vmax(-lim, vmin(lim, u));
        }
        vstore_n(y, p->dt, i, to - i, g / (one + vexp(-g)) * u);
    }
}

static void kv_write_one(const void *src, int dt, void *dst, int cache_dt, int64_t n) {
    if (dt == cache_dt) {
        memcpy(dst, src, (size_t)n * elem_size(dt));
        return;
    }
    for (int64_t i = 0; i < n; i += VW)
        vstore_n(dst, cache_dt, i, n - i, vload_n(src, dt, i, n - i));
}

/* Token t to its slot; negative slots were filtered by the caller. */
static void kv_write_row(const kvw_args *p, int64_t t) {
    const size_t es = elem_size(p->dt), cs = elem_size(p->cache_dt);
    const size_t to = (size_t)(p->slots[t] * p->width) * cs;
    kv_write_one((const char *)p->k + (size_t)(t * p->stride_k) * es, p->dt,
                 (char *)p->k_cache + to, p->cache_dt, p->width);
    kv_write_one((const char *)p->v + (size_t)(t * p->stride_v) * es, p->dt,
                 (char *)p->v_cache + to, p->cache_dt, p->width);
}
