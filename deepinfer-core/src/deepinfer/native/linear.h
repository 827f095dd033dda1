/* Packed weights: layout, products, rows of the embedding table. */

static void to_f32(const void *src, int dt, float *dst, int64_t n) {
    for (int64_t i = 0; i < n; i += VW) {
        vf v = vload_n(src, dt, i, n - i);
        if (n - i >= VW) vstore(dst + i, v);
        else vstore_part(dst, DT_F32, i, (int)(n - i), v);
    }
}

/* x is packed by module.c as row tiles [k][mr]; tile t holds rows t*m/tiles .. (t+1)*m/tiles. */
static void linear_item(const linear_args *p, int64_t item) {
    const int64_t tiles_m = (p->m + MR_MAX - 1) / MR_MAX;
    const int64_t blocks = (tiles_m + p->row_block - 1) / p->row_block;
    const int64_t p0 = item / blocks * p->group, t0 = item % blocks * p->row_block;
    const int64_t t1 = t0 + p->row_block < tiles_m ? t0 + p->row_block : tiles_m;
    const int panels = (int)(p->panels - p0 < p->group ? p->panels - p0 : p->group);
    const int64_t r0 = t0 * p->m / tiles_m, r1 = t1 * p->m / tiles_m;
    const int64_t kp = p->wt == DT_INT8 ? (p->k + GROUP - 1) / GROUP * GROUP : p->k;
    const size_t esize = p->wt == DT_F32 ? 4 : p->wt == DT_BF16 ? 2 : 1;
    const int64_t size = p->group * kp * NR * (int64_t)esize;
    const int64_t k = p->wt == DT_INT8 ? kp : p->k, kc = p->m <= MR_MAX ? k : KC;
    float c[MB * PG * NR] __attribute__((aligned(64)));

    const int wide = p->m <= MR_MAX ? panels : 1 << COL_CLASS; /* few rows: one wide pass */
    for (int64_t k0 = 0; k0 < k; k0 += kc)
        for (int64_t q = 0; q < panels; q += wide) {
            const int width = panels - q < wide ? (int)(panels - q) : wide;
            const int64_t panel = p0 + q;
            const char *b = (const char *)p->w + (size_t)(panel * kp + k0) * NR * esize, *next;
            if (p->m <= 4 && p->wt != DT_F32 && size <= AHEAD_ITEM) next = b + size;
            else if (p->m <= MR_MAX) next = b + AHEAD;
            else if (q + wide < panels) next = b + (size_t)(wide * kp * NR) * esize;
            else if (k0 + kc < k)
                next = b + (size_t)((kc - (panel - p0) * kp) * NR) * esize;
            else next = (const char *)p->w + (size_t)((p0 + p->group) * kp * NR) * esize;
            for (int64_t t = t0; t < t1; t++) {
                const int64_t a = t * p->m / tiles_m, mr = (t + 1) * p->m / tiles_m - a;
                const int64_t kn = k - k0 < kc ? k - k0 : kc;
                const char *ahead = next + (size_t)((t - t0) * kn / (t1 - t0) * NR) * esize;
                float *to = c + (a - r0) * PG * NR + q * NR;
                if (p->wt == DT_INT8) {
                    const int64_t at = (a * kp + k0) / GROUP;
                    dot_args da = {
                        .x = p->xq + a * kp + k0, .ldx = kp, .xs = p->xs + at,
                        .fix = p->fix + at, .w = (const int8_t *)b,
                        .ws = p->scales + (panel * kp + k0) / GROUP * NR, .pstride = kp * NR,
                        .k = kn, .ahead = (const int8_t *)ahead, .c = to, .ldc = PG * NR,
                        .first = k0 == 0};
                    dot_panels(da, (int)mr, width);
                    continue;
                }
                tile_args ta = {
                    .a = p->x + a * p->k + k0 * mr, .b = b, .ldb = NR, .pstride = kp * NR,
                    .k = kn, .ahead = ahead, .ahead_step = 64 / (t1 - t0), .c = to,
                    .ldc = PG * NR, .first = k0 == 0};
                tile_panels(ta, p->wt, (int)mr, width);
            }
        }
    for (int64_t r = r0; r < r1; r++)
        for (int64_t j = 0; j < panels * NR; j += VW) {
            const int64_t col = p0 * NR + j, left = p->n - col;
            if (left <= 0) break;
            vf v = vload(c + (r - r0) * PG * NR + j);
            if (p->bias) v = v + vload_n(p->bias, p->bias_dt, col, left);
            vstore_n((char *)p->out + (size_t)(r * p->n) * elem_size(p->out_dt), p->out_dt, col,
                     left, v);
        }
}

/* Round half to even, |x| < 2^22. */
INLINE float round_even(float x) {
    return (x + 12582912.0f) - 12582912.0f;
}

/* A row of x to int8 values, a scale for each group (its largest magnitude / 127) and -128 times
 * the group's sum. A group that holds NaN or infinity has such a scale and zeros: 0 * inf is NaN. */
static void quant_row(const void *src, int dt, int64_t k, int8_t *q, float *scale, int32_t *fix) {
    const vf magic = vset(12582912.0f), most = vset(127.0f);
    for (int64_t g = 0; g < k; g += GROUP) {
        vf v[GROUP / VW];
        vi top = viset(0), sum = viset(0);
#pragma GCC unroll 8
        for (int i = 0; i < GROUP / VW; i++) {
            const int64_t at = g + i * VW;
            v[i] = at < k ? vload_n(src, dt, at, k - at) : vset(0.0f);
            top = imax((vi)v[i] & viset(0x7fffffff), top); /* magnitudes order as integers */
        }
        const int32_t bits = lanes_imax(top);
        float s;
        memcpy(&s, &bits, 4);
        s /= 127.0f;
        const int whole = s > 0.0f && s < INFINITY;
#pragma GCC unroll 8
        for (int i = 0; i < GROUP / VW; i++) {
            const vf r = vmin(most, vmax(-most, whole ? v[i] / vset(s) : vset(0.0f)));
            const vi n = (vi)(r + magic) - (vi)magic;
            vstore_i8(q + g + i * VW, n);
            sum = sum + n;
        }
        scale[g / GROUP] = s;
        fix[g / GROUP] = -128 * lanes_isum(sum);
    }
}

/* fp32 >= 0 to fp16 bits, at most 65504: to nearest even, but up below 2^-14, where the steps are
 * coarse and a scale rounded down would clip. */
static uint16_t f32_to_f16(float f) {
    if (!(f < 65504.0f)) return 0x7bff;
    if (f < 6.103515625e-05f) return (uint16_t)ceilf(f * 16777216.0f);
    uint32_t u;
    memcpy(&u, &f, 4);
    u += 0xfff + ((u >> 13) & 1);
    return (uint16_t)((u >> 13) - (112u << 10));
}

static float f16_to_f32(uint16_t h) {
    uint32_t u = (uint32_t)h << 13;
    float f;
    memcpy(&f, &u, 4);
    return f * 5.192296858534828e33f;
}

/* One panel: rows row0 + panel*NR ... of src, columns become NR-wide rows; padding is zero. */
static void pack_panel(const pack_args *p, int64_t panel) {
    const int64_t n0 = panel * NR;
    const int rows = (int)(p->n - n0 < NR ? p->n - n0 : NR);
    const int64_t kp = p->wt == DT_INT8 ? (p->k + GROUP - 1) / GROUP * GROUP : p->k;
    const int64_t base = (p->row0 / NR + panel) * kp * NR;
    for (int64_t g = 0; g < kp; g += GROUP) {
        const int len = (int)(p->k - g < GROUP ? p->k - g : GROUP);
        float t[NR][GROUP];
        memset(t, 0, sizeof t);
        for (int r = 0; r < rows; r++)
            to_f32((const char *)p->src + (size_t)((n0 + r) * p->ld + g) * elem_size(p->src_dt),
                   p->src_dt, t[r], len);
        if (p->wt == DT_INT8) {
            int8_t *dst = (int8_t *)p->dst + base + g * NR;
            for (int r = 0; r < NR; r++) {
                float top = 0.0f;
                for (int j = 0; j < GROUP; j++) {
                    float m = fabsf(t[r][j]);
                    top = m > top ? m : top;
                }
                uint16_t h = f32_to_f16(top / 127.0f);
                float s = f16_to_f32(h);
                p->scales[base / GROUP + g / GROUP * NR + r] = h;
                for (int j = 0; j < GROUP; j++) {
                    float q = s > 0.0f ? t[r][j] / s : 0.0f;
                    q = q > 127.0f ? 127.0f : q < -127.0f ? -127.0f : q;
                    dst[j / 4 * 4 * NR + r * 4 + j % 4] = (int8_t)round_even(q);
                }
            }
        } else {
            for (int j = 0; j < len; j++) {
                float line[NR];
                for (int r = 0; r < NR; r++) line[r] = t[r][j];
                for (int r = 0; r < NR; r += VW)
                    vstore_any(p->dst, p->wt, base + (g + j) * NR + r, vload(line + r));
            }
        }
    }
}

/* Row ids[row] of the table [n, k], unpacked; ids were checked. */
static void embed_row(const embed_args *p, int64_t row) {
    const int64_t id = p->ids[row];
    const int64_t kp = p->wt == DT_INT8 ? (p->k + GROUP - 1) / GROUP * GROUP : p->k;
    const int64_t base = id / NR * kp * NR + id % NR;
    void *out = (char *)p->out + (size_t)(row * p->k) * elem_size(p->out_dt);
    for (int64_t g = 0; g < p->k; g += GROUP) {
        const int len = (int)(p->k - g < GROUP ? p->k - g : GROUP);
        float t[GROUP];
        if (p->wt == DT_F32)
            for (int j = 0; j < len; j++) t[j] = ((const float *)p->w)[base + (g + j) * NR];
        else if (p->wt == DT_BF16)
            for (int j = 0; j < len; j++)
                t[j] = bf16_to_f32(((const uint16_t *)p->w)[base + (g + j) * NR]);
        else {
            const int8_t *values = (const int8_t *)p->w + id / NR * kp * NR + id % NR * 4;
            const float s = f16_to_f32(p->scales[(id / NR * kp + g) / GROUP * NR + id % NR]);
            for (int j = 0; j < len; j++)
                t[j] = (float)values[(g + j) / 4 * 4 * NR + j % 4] * s;
        }
        for (int j = 0; j < len; j += VW)
            vstore_n(out, p->out_dt, g + j, len - j, vload(t + j));
    }
}
