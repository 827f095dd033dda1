/* All kernels for the instruction set chosen by ISA; see isa_*.c. */
#include "simd.h"

#include "dot.h"

#include "tile.h"

#include "linear.h"

#include "rows.h"

#include "attention.h"

#include "sampling.h"

#include "filter.h"

#define KERNEL_TABLE                                                                            \
    {MR_MAX, linear_item, to_f32, quant_row, pack_panel, embed_row, norm_row, rope_row, silu_part,      \
     kv_write_row, attention_item, attention_part, attention_merge, gumbel_part, logprobs_row,    \
     filter_row_top, exp_array}
