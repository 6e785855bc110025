// Fused attention with Hopper's asynchronous instructions (cuda/hopper.cuh): what flash.cuh computes, in bf16, with
// wgmma for the matmuls and TMA for the copies. Rows, phi, sums and statistics are flash.cuh's; this file has the
// tiles, the matmuls and the maps of the tensors.
//
// A block has consumer warpgroups of 64 rows each and a producer, a warpgroup of which one thread starts all TMA loads;
// in the backward pass, other warps of it copy the rows' numbers and add dq. A tile lies in shared memory in panels of
// 64 columns (K in the backward pass: of HS/2): rows of at most 128 bytes, of which TMA permutes the 16-byte pieces. A
// matmul reads a panel along its rows (K-major) or across them (MN-major), so no tile is ever transposed.
//
//   flash90_forward.cuh     the forward kernel
//   flash90_backward.cuh    the backward kernel, which sums dq in float32
//   flash90_dq.cuh          the kernel that rounds dq
//
// HS in the kernels is 64 or 128; TMA fills smaller heads with zeros.
//
// Tested by dev/tests/test_flash.py.
#ifndef ATTENTION_FLASH90_CUH
#define ATTENTION_FLASH90_CUH

#include "attention/flash.h"
#include "cuda/hopper.cuh"
#include "cuda/tensor_map.cuh"

static inline int processors_of_device(void) {
    int device, processors;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    return processors;
}

// ---------------------------------------------------------------------------------------------------------------------
// Tiles

enum { PANEL = 64, PANEL_ROW = 128 };    // columns of a panel, and bytes of its rows

// The bytes of a panel of ROWS rows, and of a tile.
template <int ROWS>
constexpr unsigned panel_bytes = ROWS * PANEL_ROW;

template <int ROWS, int HS>
constexpr unsigned tile_bytes = ROWS * HS * sizeof(bf16);

// A map of q, k, v or dout for loading `rows` rows of one head, `panel` columns at a time. The dimensions are columns,
// heads, positions, sequences.
static inline void rows_map(TensorMap *map, FlashView<const bf16> view, int columns, int heads, int T, int B, int rows,
                            int panel = PANEL, Swizzle swizzle = SWIZZLE_128) {
    const uint64_t row = view.row * sizeof(bf16), head = view.head * sizeof(bf16);
    tensor_map(map, view.p, {(uint64_t)columns, (uint64_t)heads, (uint64_t)T, (uint64_t)B}, {head, row, T * row},
               {(uint32_t)panel, 1, (uint32_t)rows, 1}, swizzle);
}

// Starts loading `ROWS` rows, from position `row` on, into a tile; `full` has been told their bytes. By one thread.
template <int ROWS, int HS, int WIDTH = PANEL>
DEVICE void load_panels(char *tile, Mbarrier *full, const TensorMap *map, int column, int head, int row, int b) {
    UNROLL
    for (int panel = 0; panel < HS / WIDTH; panel++)
        tma_load(tile + panel * tile_bytes<ROWS, WIDTH>, map, full, {column + panel * WIDTH, head, row, b});
}

// A buffer's barriers: `full` completes when its tile is there, `empty` when all have read it.
template <int STAGES>
struct Ring {
    Mbarrier full[STAGES], empty[STAGES];
};

template <int STAGES>
DEVICE void ring_init(Ring<STAGES> &ring, int writers, int readers) {
    UNROLL
    for (int i = 0; i < STAGES; i++) {
        mbarrier_init(&ring.full[i], writers);
        mbarrier_init(&ring.empty[i], readers);
    }
}

// The step-th tile that passes through a ring is in buffer step % STAGES. This waits until all have read the tile that
// was there before, so that it can be written.
template <int STAGES>
DEVICE void ring_wait_empty(Ring<STAGES> &ring, unsigned step) {
    mbarrier_wait(&ring.empty[step % STAGES], (step / STAGES + 1) % 2);
}

template <int STAGES>
DEVICE void ring_wait_full(Ring<STAGES> &ring, unsigned step) {
    mbarrier_wait(&ring.full[step % STAGES], (step / STAGES) % 2);
}

// Waits until the buffer of the step-th tile is free, and starts loading the tile: `ROWS` rows from `row` on, in panels
// of WIDTH columns. By one thread.
template <int ROWS, int HS, int WIDTH = PANEL, int STAGES>
DEVICE void ring_load(Ring<STAGES> &ring, char (&buffers)[STAGES][tile_bytes<ROWS, HS>], unsigned step,
                      const TensorMap *map, int column, int head, int row, int b) {
    Mbarrier *full = &ring.full[step % STAGES];
    ring_wait_empty(ring, step);
    mbarrier_arrive_expect_tx(full, tile_bytes<ROWS, HS>);
    load_panels<ROWS, HS, WIDTH>(buffers[step % STAGES], full, map, column, head, row, b);
}

// By each warp, after the matmuls that read the tile.
template <int STAGES>
DEVICE void ring_release(Ring<STAGES> &ring, unsigned step) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&ring.empty[step % STAGES]);
}

// The number of the thread's warpgroup. Because of the shuffle, ptxas knows that all lanes have the same number, and
// computes what follows from it, such as the descriptors of tiles, once for a warp.
DEVICE int warpgroup() {
    return __shfl_sync(0xFFFFFFFFu, (int)threadIdx.x / 128, 0);
}

// ---------------------------------------------------------------------------------------------------------------------
// Matmuls of a warpgroup. They are issued, not complete: see cuda/hopper.cuh

// s (64,8 NT) = 64 rows of a tile (OWN,HS) · the rows of a tile (8 NT,HS), transposed. own: the first of the 64 rows
template <int OWN, int HS, int NT>
DEVICE void issue_by_rows(float (&s)[NT][4], const char *own, const char *tile) {
    const uint64_t a = matrix_descriptor(own, 0, 8 * PANEL_ROW, SWIZZLE_128),
                   b = matrix_descriptor(tile, 0, 8 * PANEL_ROW, SWIZZLE_128);
    UNROLL
    for (int k = 0; k < HS / 16; k++) {
        const int panel = k / (PANEL / 16), within = (k % (PANEL / 16)) * (16 * sizeof(bf16));
        wgmma<K_MAJOR, K_MAJOR>(s, matrix_descriptor_plus(a, panel * panel_bytes<OWN> + within),
                                matrix_descriptor_plus(b, panel * panel_bytes<8 * NT> + within), k > 0);
    }
}

// The same with the 64 rows in registers: their parts of 16 columns each.
template <int KT, int NT>
DEVICE void issue_by_rows(float (&s)[NT][4], const uint32_t (&own)[KT][4], const char *tile) {
    const uint64_t b = matrix_descriptor(tile, 0, 8 * PANEL_ROW, SWIZZLE_128);
    UNROLL
    for (int k = 0; k < KT; k++) {
        const int panel = k / (PANEL / 16), within = (k % (PANEL / 16)) * (16 * sizeof(bf16));
        wgmma<K_MAJOR>(s, own[k], matrix_descriptor_plus(b, panel * panel_bytes<8 * NT> + within), k > 0);
    }
}

// sum (64,8 CT) += p (64,16 KT) · a tile (16 KT,8 CT), of whose panels each is `apart` bytes after the one before.
template <int CT, int KT>
DEVICE void issue_by_columns(float (&sum)[CT][4], const uint32_t (&p)[KT][4], const char *tile,
                             unsigned apart = panel_bytes<16 * KT>) {
    const uint64_t b = matrix_descriptor(tile, apart, 8 * PANEL_ROW, SWIZZLE_128);
    UNROLL
    for (int k = 0; k < KT; k++) wgmma<MN_MAJOR>(sum, p[k], matrix_descriptor_plus(b, k * 16 * PANEL_ROW), true);
}

// 16 columns of an accumulator as a left operand.
DEVICE void pack_operand(uint32_t (&a)[4], const float (&first)[4], const float (&second)[4]) {
    a[0] = pack_bf16(first[0], first[1]);
    a[1] = pack_bf16(first[2], first[3]);
    a[2] = pack_bf16(second[0], second[1]);
    a[3] = pack_bf16(second[2], second[3]);
}

// Weights as left operands of 16 columns each.
template <int NT>
DEVICE void pack_weights(uint32_t (&p)[NT / 2][4], const float (&w)[NT][4]) {
    UNROLL
    for (int k = 0; k < NT / 2; k++) pack_operand(p[k], w[2 * k], w[2 * k + 1]);
}

// ---------------------------------------------------------------------------------------------------------------------
// Turns

// The consumers issue their matmuls in turns, so that while one waits for its matmuls, the other computes weights.
DEVICE void turn_wait(int warpgroup) {
    named_barrier_sync(1 + warpgroup, 256);
}

DEVICE void turn_pass(int warpgroup) {
    named_barrier_arrive(1 + (warpgroup + 1) % 2, 256);
}
#endif
