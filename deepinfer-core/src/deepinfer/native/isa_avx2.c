/* AVX2 + FMA kernels. The target is switched here, so the whole build needs no -m flag. */
#include "kernels.h"
#if HAVE_X86
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#define ISA 1
#include "template.h"

const kernel_table deepinfer_avx2 = KERNEL_TABLE;
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
