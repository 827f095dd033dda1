/* Portable kernels: GCC/clang vectors of four floats; fused multiply-add on aarch64 only. */
#define ISA 0
#if defined(__aarch64__)
#include <arm_neon.h>
#endif
#include "template.h"

const kernel_table deepinfer_base = KERNEL_TABLE;
