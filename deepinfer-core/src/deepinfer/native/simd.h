/* One vocabulary of fp32 vectors for every instruction set.
 *
 * Included once per isa_*.c, which sets ISA (0 baseline, 1 AVX2+FMA, 2 AVX-512) and switches the
 * compiler to that set first. Everything is static: the same names live in three objects.
 * The build turns floating-point contraction off, so a multiply-add is fused only where vfma is
 * written; that is what makes a chain of operations the same in every tile shape.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels.h"

#define INLINE static inline __attribute__((always_inline))

#if ISA == 2
#define VW 16
#elif ISA == 1
#define VW 8
#else
#define VW 4
#endif
#define VBYTES (VW * 4)

typedef float vf __attribute__((vector_size(VBYTES)));
typedef int32_t vi __attribute__((vector_size(VBYTES)));
typedef uint32_t vu __attribute__((vector_size(VBYTES)));
typedef float vf_mem __attribute__((vector_size(VBYTES), aligned(4), may_alias));

/* Sums over a row use 64 virtual lanes on every instruction set: element i goes to lane i % 64. */
#define LANES 64
#define LV (LANES / VW)

INLINE vf vload(const float *p) { return (vf) * (const vf_mem *)p; }
INLINE void vstore(float *p, vf v) { *(vf_mem *)p = (vf_mem)v; }

#if ISA == 2
INLINE vf vset(float x) { return (vf)_mm512_set1_ps(x); }
INLINE vi viset(int32_t x) { return (vi)_mm512_set1_epi32(x); }
INLINE vf vfma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
/* a > b ? a : b, also for NaN */
INLINE vf vmax(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vf vmin(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE int vany_gt(vf a, vf b) {
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ) != 0;
}
INLINE int vany_ge(vf a, vf b) {
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ) != 0;
}
/* a > b ? x : y per lane */
INLINE vf vsel_gt(vf a, vf b, vf x, vf y) {
    __mmask16 m = _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
    return (vf)_mm512_mask_blend_ps(m, (__m512)y, (__m512)x);
}
/* NaN -> y */
INLINE vf vsel_ord(vf x, vf y) {
    __mmask16 m = _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_ORD_Q);
    return (vf)_mm512_mask_blend_ps(m, (__m512)y, (__m512)x);
}
INLINE vu vload_u16(const uint16_t *p) {
    return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
}
INLINE void vstore_u16(uint16_t *p, vu v) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16((__m512i)v));
}
INLINE vf vfrom_i32(vi v) { return (vf)_mm512_cvtepi32_ps((__m512i)v); }
#elif ISA == 1
INLINE vf vset(float x) { return (vf)_mm256_set1_ps(x); }
INLINE vi viset(int32_t x) { return (vi)_mm256_set1_epi32(x); }
INLINE vf vfma(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE vf vmax(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vf vmin(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE int vany_gt(vf a, vf b) {
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GT_OQ)) != 0;
}
INLINE int vany_ge(vf a, vf b) {
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GE_OQ)) != 0;
}
INLINE vf vsel_gt(vf a, vf b, vf x, vf y) {
    __m256 m = _mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GT_OQ);
    return (vf)_mm256_blendv_ps((__m256)y, (__m256)x, m);
}
INLINE vf vsel_ord(vf x, vf y) {
    __m256 m = _mm256_cmp_ps((__m256)x, (__m256)x, _CMP_ORD_Q);
    return (vf)_mm256_blendv_ps((__m256)y, (__m256)x, m);
}
INLINE vu vload_u16(const uint16_t *p) {
    return (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
}
INLINE void vstore_u16(uint16_t *p, vu v) {
    __m256i w = _mm256_packus_epi32((__m256i)v, (__m256i)v);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(w, 0x08)));
}
INLINE vf vfrom_i32(vi v) { return (vf)_mm256_cvtepi32_ps((__m256i)v); }
#else
INLINE vf vset(float x) { return (vf){x, x, x, x}; }
INLINE vi viset(int32_t x) { return (vi){x, x, x, x}; }
#if defined(__aarch64__)
INLINE vf vfma(vf a, vf b, vf c) {
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
#else
INLINE vf vfma(vf a, vf b, vf c) { return a * b + c; }
#endif
INLINE vf vblend(vi m, vf x, vf y) { return (vf)((m & (vi)x) | (~m & (vi)y)); }
INLINE vf vmax(vf a, vf b) { return vblend((vi)(a > b), a, b); }
INLINE vf vmin(vf a, vf b) { return vblend((vi)(a < b), a, b); }
INLINE int vany_gt(vf a, vf b) {
    vi m = (vi)(a > b);
    return (m[0] | m[1] | m[2] | m[3]) != 0;
}
INLINE int vany_ge(vf a, vf b) {
    vi m = (vi)(a >= b);
    return (m[0] | m[1] | m[2] | m[3]) != 0;
}
INLINE vf vsel_gt(vf a, vf b, vf x, vf y) { return vblend((vi)(a > b), x, y); }
INLINE vf vsel_ord(vf x, vf y) { return vblend((vi)(x == x), x, y); }
INLINE vu vload_u16(const uint16_t *p) { return (vu){p[0], p[1], p[2], p[3]}; }
INLINE void vstore_u16(uint16_t *p, vu v) {
    for (int i = 0; i < VW; i++) p[i] = (uint16_t)v[i];
}
INLINE vf vfrom_i32(vi v) { return (vf){(float)v[0], (float)v[1], (float)v[2], (float)v[3]}; }
#endif

INLINE vf vload_bf16(const uint16_t *p) { return (vf)(vload_u16(p) << 16); }

/* Round to nearest even; a NaN stays a (quiet) NaN. */
INLINE void vstore_bf16(uint16_t *p, vf v) {
    vu u = (vu)v;
    vu rounded = (u + (vu)viset(0x7fff) + ((u >> 16) & (vu)viset(1))) >> 16;
    vu quiet = (u >> 16) | (vu)viset(0x40);
    vu is_nan = (vu)(v != v);
    vstore_u16(p, (rounded & ~is_nan) | (quiet & is_nan));
}

/* Non-negative fp16 bits to fp32, exact for subnormals too. */
INLINE vf vload_scale(const uint16_t *p) {
    return (vf)(vload_u16(p) << 13) * vset(5.192296858534828e33f); /* 2^112 */
}

INLINE float bf16_to_f32(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

INLINE size_t elem_size(int dt) { return dt == DT_F32 ? 4 : 2; }

INLINE vf vload_any(const void *p, int dt, int64_t i) {
    return dt == DT_F32 ? vload((const float *)p + i) : vload_bf16((const uint16_t *)p + i);
}
INLINE void vstore_any(void *p, int dt, int64_t i, vf v) {
    if (dt == DT_F32) vstore((float *)p + i, v);
    else vstore_bf16((uint16_t *)p + i, v);
}
/* The tail of a row goes through a padded buffer and the same vector code as its body. */
INLINE vf vload_part(const void *p, int dt, int64_t i, int n) {
    uint32_t pad[VW];
    memset(pad, 0, sizeof pad);
    memcpy(pad, (const char *)p + (size_t)i * elem_size(dt), (size_t)n * elem_size(dt));
    return vload_any(pad, dt, 0);
}
INLINE void vstore_part(void *p, int dt, int64_t i, int n, vf v) {
    uint32_t pad[VW];
    vstore_any(pad, dt, 0, v);
    memcpy((char *)p + (size_t)i * elem_size(dt), pad, (size_t)n * elem_size(dt));
}
INLINE vf vload_n(const void *p, int dt, int64_t i, int64_t left) {
    return left >= VW ? vload_any(p, dt, i) : vload_part(p, dt, i, (int)left);
}
INLINE void vstore_n(void *p, int dt, int64_t i, int64_t left, vf v) {
    if (left >= VW) vstore_any(p, dt, i, v);
    else vstore_part(p, dt, i, (int)left, v);
}

/* One vector to one number: lane i with lane i + w/2, halving w. */
#if ISA
INLINE float fold_add(vf v) {
#if ISA == 2
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256((__m512)v),
                             _mm512_extractf32x8_ps((__m512)v, 1));
#else
    __m256 h = (__m256)v;
#endif
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
INLINE float lanes_max(vf v) {
#if ISA == 2
    __m256 h = _mm256_max_ps(_mm512_castps512_ps256((__m512)v),
                             _mm512_extractf32x8_ps((__m512)v, 1));
#else
    __m256 h = (__m256)v;
#endif
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}
#else
INLINE float fold_add(vf v) { return (v[0] + v[2]) + (v[1] + v[3]); }
INLINE float lanes_max(vf v) {
    float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
    return a > b ? a : b;
}
#endif

#if ISA == 2
INLINE vi imax(vi a, vi b) { return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b); }
INLINE int32_t lanes_imax(vi v) { return _mm512_reduce_max_epi32((__m512i)v); }
INLINE int32_t lanes_isum(vi v) { return _mm512_reduce_add_epi32((__m512i)v); }
INLINE void vstore_i8(int8_t *p, vi v) {
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)v));
}
#else
INLINE vi imax(vi a, vi b) {
    const vi m = a > b;
    return (a & m) | (b & ~m);
}
INLINE int32_t lanes_imax(vi v) {
    int32_t top = v[0];
    for (int i = 1; i < VW; i++) top = v[i] > top ? v[i] : top;
    return top;
}
INLINE int32_t lanes_isum(vi v) {
    int32_t sum = 0;
    for (int i = 0; i < VW; i++) sum += v[i];
    return sum;
}
INLINE void vstore_i8(int8_t *p, vi v) {
    for (int i = 0; i < VW; i++) p[i] = (int8_t)v[i];
}
#endif

/* 64 lanes to one number by the same halving: an order that no vector width changes. */
INLINE float lanes_sum(const vf *acc) {
    vf t[LV];
#pragma GCC unroll 16
    for (int i = 0; i < LV; i++) t[i] = acc[i];
#pragma GCC unroll 8
    for (int w = LV / 2; w; w /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < w; i++) t[i] = t[i] + t[i + w];
    return fold_add(t[0]);
}

/* e^x, within 1.5 ulp (1 with fused multiply-add) over the whole range: inf above 88.73, gradual
 * underflow, 0 below -104, NaN for NaN. Degree-6 polynomial on |r| <= ln(2)/2, truncation 1e-8. */
INLINE vf vexp(vf x) {
    const vf magic = vset(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    vf c = vmin(vset(89.0f), vmax(vset(-105.0f), x)); /* in this order a NaN comes through */
    vf t = vfma(c, vset(0x1.715476p+0f), magic);
    vf n = t - magic;
    vi e = (vi)t - (vi)magic;
    vf r = vfma(n, vset(-0x1.62e4p-1f), c);
    r = vfma(n, vset(-0x1.7f7d1cp-20f), r);
    vf p = vset(0x1.6d10fcp-10f);
    p = vfma(p, r, vset(0x1.120b62p-7f));
    p = vfma(p, r, vset(0x1.55551ap-5f));
    p = vfma(p, r, vset(0x1.5554dep-3f));
    p = vfma(p, r, vset(0.5f));
    p = vfma(p * r, r, r) + vset(1.0f);
    vi h = e >> 1;
    return p * (vf)((h + 127) << 23) * (vf)((e - h + 127) << 23);
}
