// The last kernel of flash90.cuh's backward pass: rounds dq, which flash90_backward.cuh has summed in float32. First it
// computes g, from which the gradients of learned scales follow, and undoes RoPE. flash90_backward.cuh uses
// load_angles(), undo_rope() and sign_of_exp() too, for dk and dv.
//
// Tested by dev/tests/test_flash.py.
#ifndef ATTENTION_FLASH90_DQ_CUH
#define ATTENTION_FLASH90_DQ_CUH

#include "attention/flash90.cuh"
#include "attention/flash_row.cuh"

// A tile of dq in float32 consists of so many pieces of 16 bytes, in the order in which threads hold them.
template <int HS>
constexpr unsigned dq_pieces = FLASH90_QUERIES * HS / 4;

// The cosines and sines of RoPE's angles for a lane's columns of one of its two rows (cuda/rope.cuh).
template <int HS>
struct LaneAngles {
    float2 cosines[HS / 16], sines[HS / 16];
};

// row: the position
template <int HS>
DEVICE LaneAngles<HS> load_angles(int row, const FlashCall<bf16> &call) {
    const int at = (row < call.T ? row : call.T - 1) * (HS / 2) + lane_column();
    LaneAngles<HS> angles;
    UNROLL
    for (int n = 0; n < HS / 16; n++) {
        angles.cosines[n] = *(const float2 *)(call.rope.cosines + at + 8 * n);
        angles.sines[n] = *(const float2 *)(call.rope.sines + at + 8 * n);
    }
    return angles;
}

// Turns the lane's r-th row of gradients, times `by`, back by RoPE's angles.
template <int HS>
DEVICE void undo_rope(float (&d)[1][HS / 8][4], float by, int r, const LaneAngles<HS> &angles) {
    UNROLL
    for (int n = 0; n < HS / 16; n++) {
        const float2 c = angles.cosines[n], s = angles.sines[n];
        float *a = d[0][n] + 2 * r, *b = d[0][n + HS / 16] + 2 * r;
        const float a0 = a[0] * by, a1 = a[1] * by, b0 = b[0] * by, b1 = b[1] * by;
        a[0] = a0 * c.x + b0 * s.x;
        a[1] = a1 * c.y + b1 * s.y;
        b[0] = b0 * c.x - a0 * s.x;
        b[1] = b1 * c.y - a1 * s.y;
    }
}

// With exp, the sign of the weights: all of them are negated, or none.
template <int PHI>
DEVICE float sign_of_exp(const FlashCall<bf16> &call) {
    return PHI == PHI_EXP ? post_sign(call.post) : 1;
}

// The heads of a block, which share their positions' angles.
template <int HS>
constexpr int dq_heads = HS <= 64 ? 6 : 1;

// dq, and g if it is needed, of a tile of queries of a head, from its sums. With a single head, loads the angles.
template <int HS>
DEVICE void dq_of_head(const FlashCall<bf16> &call, int b, int h, const LaneAngles<HS> (&angles)[2], float in_unit) {
    const int warp_row = blockIdx.x * FLASH90_QUERIES + (threadIdx.x / 32) * 16, head = b * call.NH + h;
    const float4 *sums =
        (const float4 *)call.dq_sums + ((size_t)head * gridDim.x + blockIdx.x) * dq_pieces<HS> + threadIdx.x;
    float dq[1][HS / 8][4], by[2];
    set_zero(dq);
    UNROLL_NOT
    for (int set = 0; set < (HS <= 64 ? 1 : call.dq_sets); set++) {
        UNROLL
        for (int c = 0; c < HS / 8; c++) add(dq[0][c], sums[c * 128]);
        sums += (size_t)call.B * call.NH * gridDim.x * dq_pieces<HS>;
    }
    UNROLL
    for (int r = 0; r < 2; r++) {
        const int i = warp_row + 8 * r + lane_row(), row = i < call.T ? i : call.T - 1;
        const size_t index = (size_t)head * call.T + row;
        const bf16 *q = head_at(call, call.q, b, h) + row * call.q.row + lane_column();
        by[r] = post_is_power(call.post) ? 1 : value_unit_of(call, in_unit) / in_unit;
        if (call.phi == PHI_EXP) by[r] *= sign_of_exp<PHI_EXP>(call);
        if (!call.g) continue;
        float g = 0;    // sum_j dz s = q · sum_j dz k_j
        UNROLL
        for (int c = 0; c < HS / 8; c++)
            if (8 * c < call.HS)
                g += dq[0][c][2 * r] * to_float(q[8 * c]) + dq[0][c][2 * r + 1] * to_float(q[8 * c + 1]);
        g = row_sum(g);
        if (i < call.T && threadIdx.x % 4 == 0) call.g[index] = g * by[r] * (in_unit / call.rows[index].scale);
    }
    UNROLL
    for (int r = 0; r < 2 && call.rope.cosines; r++) {
        const int row = warp_row + 8 * r + lane_row();
        undo_rope(dq, by[r], r, dq_heads<HS> == 1 ? load_angles<HS>(row, call) : angles[r]);
        by[r] = 1;
    }
    bf16 *dq_rows = head_at(call, call.dq, b, h) + warp_row * call.dq.row;
    store_rows(TileTarget<bf16>{dq_rows, call.dq.row, call.T - warp_row, call.HS}, dq, by);
}

// A block has a tile of queries of dq_heads heads; blockIdx.y goes through all heads.
//
// registers: at most 128 (flash90_dq_kernel)
template <int HS>
KERNEL void flash90_dq_kernel(const FlashCall<bf16> call, float in_unit) {
    const int groups = (call.NH - 1) / dq_heads<HS> + 1, b = blockIdx.y / groups,
              first = (blockIdx.y % groups) * dq_heads<HS>;
    const int row = blockIdx.x * FLASH90_QUERIES + (threadIdx.x / 32) * 16 + lane_row();
    LaneAngles<HS> angles[2] = {};
    UNROLL
    for (int r = 0; r < 2 && dq_heads<HS> > 1 && call.rope.cosines; r++) angles[r] = load_angles<HS>(row + 8 * r, call);
    UNROLL_NOT
    for (int h = first; h < first + dq_heads<HS> && h < call.NH; h++) dq_of_head(call, b, h, angles, in_unit);
}

template <int HS>
void flash90_dq_launch(const FlashCall<bf16> &call, float in_unit, cudaStream_t stream) {
    const unsigned query_tiles = (call.T - 1) / FLASH90_QUERIES + 1,
                   groups = call.B * ((call.NH - 1) / dq_heads<HS> + 1);
    launch(flash90_dq_kernel<HS>, dim3(query_tiles, groups), dim3(128), 0, stream, call, in_unit);
}
#endif
