/* AVX-512 (F, BW, VL, DQ, VNNI) kernels. The target is switched here, as in isa_avx2.c. */
#include "kernels.h"
#if HAVE_X86
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"))), \
    apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,prefer-vector-width=512")
#endif
#define ISA 2
#include "template.h"

const kernel_table deepinfer_avx512 = KERNEL_TABLE;
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
