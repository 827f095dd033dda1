/* Counter-based Gumbel noise and argmax; log-softmax with the best k. */

#define PHILOX_M0 0xD2511F53u
#define PHILOX_M1 0xCD9E8D57u
#define PHILOX_W0 0x9E3779B9u
#define PHILOX_W1 0xBB67AE85u

/* 32 x 32 -> 64 bit products per lane. */
INLINE void mulhilo(vu x, uint32_t m, vu *hi, vu *lo) {
#if ISA == 2
    __m512i mm = _mm512_set1_epi32((int32_t)m), v = (__m512i)x;
    __m512i even = _mm512_mul_epu32(v, mm);
    __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(v, 32), mm);
    *hi = (vu)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
    *lo = (vu)_mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
#elif ISA == 1
    __m256i mm = _mm256_set1_epi32((int32_t)m), v = (__m256i)x;
    __m256i even = _mm256_mul_epu32(v, mm);
    __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(v, 32), mm);
    *hi = (vu)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
    *lo = (vu)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
#else
    for (int i = 0; i < VW; i++) {
        uint64_t w = (uint64_t)x[i] * m;
        (*hi)[i] = (uint32_t)(w >> 32), (*lo)[i] = (uint32_t)w;
    }
#endif
}

/* 4 x 4 transposition inside every group of four lanes. */
INLINE void transpose4(vu r[4]) {
#if ISA == 2
    __m512i a = _mm512_unpacklo_epi32((__m512i)r[0], (__m512i)r[1]);
    __m512i b = _mm512_unpackhi_epi32((__m512i)r[0], (__m512i)r[1]);
    __m512i c = _mm512_unpacklo_epi32((__m512i)r[2], (__m512i)r[3]);
    __m512i d = _mm512_unpackhi_epi32((__m512i)r[2], (__m512i)r[3]);
    r[0] = (vu)_mm512_unpacklo_epi64(a, c), r[1] = (vu)_mm512_unpackhi_epi64(a, c);
    r[2] = (vu)_mm512_unpacklo_epi64(b, d), r[3] = (vu)_mm512_unpackhi_epi64(b, d);
#elif ISA == 1
    __m256i a = _mm256_unpacklo_epi32((__m256i)r[0], (__m256i)r[1]);
    __m256i b = _mm256_unpackhi_epi32((__m256i)r[0], (__m256i)r[1]);
    __m256i c = _mm256_unpacklo_epi32((__m256i)r[2], (__m256i)r[3]);
    __m256i d = _mm256_unpackhi_epi32((__m256i)r[2], (__m256i)r[3]);
    r[0] = (vu)_mm256_unpacklo_epi64(a, c), r[1] = (vu)_mm256_unpackhi_epi64(a, c);
    r[2] = (vu)_mm256_unpacklo_epi64(b, d), r[3] = (vu)_mm256_unpackhi_epi64(b, d);
#else
    vu a = {r[0][0], r[1][0], r[2][0], r[3][0]}, b = {r[0][1], r[1][1], r[2][1], r[3][1]};
    vu c = {r[0][2], r[1][2], r[2][2], r[3][2]}, d = {r[0][3], r[1][3], r[2][3], r[3][3]};
    r[0] = a, r[1] = b, r[2] = c, r[3] = d;
#endif
}

/* Philox4x32-10 of counters c0 .. c0+VW-1: r[0..3] are the draws of ids 4*c0 .. 4*c0+4*VW-1. */
INLINE void philox(uint32_t c0, uint64_t pos, uint64_t seed, vu r[4]) {
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32), at[VW];
    /* lane 4q + s takes counter s * VW/4 + q, so that transpose4 leaves the ids in order */
    for (uint32_t i = 0; i < VW; i++) at[i] = c0 + i % 4 * (VW / 4) + i / 4;
    vu a, b = (vu)viset((int32_t)pos), c = (vu)viset((int32_t)(pos >> 32)), d = (vu)viset(0);
    memcpy(&a, at, sizeof a);
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
        vu h0, l0, h1, l1;
        mulhilo(a, PHILOX_M0, &h0, &l0);
        mulhilo(c, PHILOX_M1, &h1, &l1);
        a = h1 ^ b ^ (vu)viset((int32_t)k0);
        b = l1;
        c = h0 ^ d ^ (vu)viset((int32_t)k1);
        d = l0;
        k0 += PHILOX_W0, k1 += PHILOX_W1;
    }
    r[0] = a, r[1] = b, r[2] = c, r[3] = d;
    transpose4(r);
}

/* G(r) as defined: double arithmetic, one rounding to fp32. */
static float gumbel_of(uint32_t r) {
    const double u = ((double)r + 0.5) * 0x1p-32;
    return (float)-log(-log1p(-u));
}

INLINE int is_allowed(const int32_t *mask, int64_t v) {
    return !mask || (mask[v >> 5] >> (v & 31) & 1);
}

/* x[i .. i+VW) as far as `end`, -inf beyond. */
INLINE vf vload_pad(const float *x, int64_t i, int64_t end) {
    if (end - i >= VW) return vload(x + i);
    float pad[VW];
    for (int j = 0; j < VW; j++) pad[j] = i + j < end ? x[i + j] : -INFINITY;
    return vload(pad);
}

/* Ids [from, to) of one row at temperature 0: the highest logit, lowest id first. */
static void argmax_part(const float *z, const int32_t *mask, int64_t from, int64_t to, float *best,
                        int64_t *id) {
    for (int64_t v = from; v < to; v += LANES) {
        const int64_t n = to - v < LANES ? to - v : LANES;
        vf bar = vset(*best);
        int hit = n < LANES;
        for (int l = 0; !hit && l < LV; l++) hit |= vany_gt(vload(z + v + l * VW), bar);
        for (int64_t i = v; hit && i < v + n; i++)
            if (z[i] > *best && is_allowed(mask, i)) *best = z[i], *id = i;
    }
}

/* Ids [from, to) with noise. A winner over `best` needs G > best - z/T, hence
 * u < exp(z/T - best) because -ln(1 - u) >= u; `slack` covers every fp32 rounding in the test.
 * Ids that pass are computed exactly as defined, so the test decides nothing but speed. */
static void gumbel_ids(const gumbel_args *p, int64_t row, int64_t from, int64_t to, float *best,
                       int64_t *id) {
    const float *z = p->logits + row * p->stride;
    const int32_t *mask = p->allowed ? p->allowed + row * p->stride_allowed : NULL;
    const uint64_t seed = (uint64_t)p->seed[row], pos = (uint64_t)p->pos[row];
    const vf t = vset(p->temp[row]), ninf = vset(-INFINITY);
    for (int64_t v = from; v < to; v += 4 * VW) {
        vf x[4], top = ninf;
        for (int s = 0; s < 4; s++) {
            x[s] = vload_pad(z, v + s * VW, to) / t;
            top = vmax(x[s], top);
        }
        /* G < 22.9 always: nothing in this block can win */
        if (!vany_gt(top, vset(*best - 22.9f - fabsf(*best) * 1e-6f))) continue;
        vu r[4];
        philox((uint32_t)(v >> 2), pos, seed, r);
        for (int s = 0; s < 4; s++) {
            const float slack = 1e-3f + fabsf(*best) * 1e-6f;
            const vf u = vfrom_i32((vi)(r[s] >> 8)) * vset(0x1p-24f); /* rounded down */
            const vf bound = vexp(x[s] - vset(*best - slack));
            if (*best > -INFINITY && !vany_gt(bound, u)) continue;
            float scaled[VW];
            uint32_t bits[VW];
            vstore(scaled, x[s]);
            memcpy(bits, &r[s], sizeof bits);
            for (int j = 0; j < VW; j++) {
                const int64_t at = v + s * VW + j;
                if (!(scaled[j] > -INFINITY) || !is_allowed(mask, at)) continue;
                if (scaled[j] + 22.9f <= *best) continue;
                const float total = scaled[j] + gumbel_of(bits[j]);
                if (total > *best) *best = total, *id = at;
            }
        }
    }
}

static void gumbel_part(const gumbel_args *p, int64_t row, int64_t chunk) {
    const int64_t from = chunk * p->chunk, to = from + p->chunk < p->v ? from + p->chunk : p->v;
    float best = -INFINITY;
    int64_t id = -1;
    if (p->temp[row] == 0.0f)
        argmax_part(p->logits + row * p->stride,
                    p->allowed ? p->allowed + row * p->stride_allowed : NULL, from, to, &best, &id);
    else gumbel_ids(p, row, from, to, &best, &id);
    p->part_val[row * p->chunks + chunk] = best;
    p->part_id[row * p->chunks + chunk] = id;
}

/* log_softmax = (z - max) - log(sum exp(z - max)); NaN counts as -inf; the sum has 64 lanes. */
static void logprobs_row(const logprob_args *p, int64_t row) {
    const float *z = p->logits + row * p->stride;
    const int64_t n = p->v, c = p->chosen[row];
    const vf ninf = vset(-INFINITY);
    vf top = ninf, acc[LV];
    for (int64_t i = 0; i < n; i += VW) top = vmax(vload_pad(z, i, n), top);
    float max = lanes_max(top);
    if (max == -INFINITY) max = 0.0f;
    for (int l = 0; l < LV; l++) acc[l] = vset(0.0f);
    for (int64_t i = 0; i < n; i += LANES)
        for (int l = 0; l < LV; l++)
            acc[l] = acc[l] + vexp(vsel_ord(vload_pad(z, i + l * VW, n), ninf) - vset(max));
    const float sum = lanes_sum(acc), lsum = sum > 0.0f ? logf(sum) : 0.0f;
    const float mine = z[c] == z[c] ? (z[c] - max) - lsum : -INFINITY;
    const vf bar = vset(mine), one = vset(1.0f), zero = vset(0.0f);
    float *best = p->values + row * p->k, counts[VW];
    int32_t *ids = p->ids + row * p->k;
    int64_t have = 0, before = 0;
    vf ahead = zero;
    for (int64_t i = 0; i < n; i += VW) {
        const vf x = vsel_ord(vload_pad(z, i, n), ninf) - vset(max) - vset(lsum);
        /* an equal id counts if it is lower; the block of c itself is counted below */
        if (i + VW <= c) ahead = ahead + vsel_gt(bar, x, zero, one);
        else if (i > c) ahead = ahead + vsel_gt(x, bar, one, zero);
        if (!(i <= c && c < i + VW) && have == p->k &&
            (!p->k || !vany_gt(x, vset(best[p->k - 1]))))
            continue;
        float value[VW];
        vstore(value, x);
        for (int64_t j = 0; j < VW && i + j < n; j++) {
            if (i <= c && c < i + VW)
                before += value[j] > mine || (value[j] == mine && i + j < c);
            if (have == p->k && (!p->k || !(value[j] > best[have - 1]))) continue;
            int64_t at = have < p->k ? have++ : have - 1;
            for (; at > 0 && value[j] > best[at - 1]; at--)
                best[at] = best[at - 1], ids[at] = ids[at - 1];
            best[at] = value[j], ids[at] = (int32_t)(i + j);
        }
    }
    vstore(counts, ahead);
    for (int i = 0; i < VW; i++) before += (int64_t)counts[i];
    p->chosen_value[row] = mine;
    p->rank[row] = (int32_t)(before + 1);
}
