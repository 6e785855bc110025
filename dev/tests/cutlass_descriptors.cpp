// Compares wgmma's matrix descriptors and layouts with CUTLASS's. For each of the eight canonical layouts,
//   - make_gmma_desc gives the bits that cuda/hopper.cuh's matrix_descriptor_bits gives, and
//   - the addresses of an operand's elements in CUTLASS's layout are those where the emulated wgmma reads them.
// Built and run by test_descriptors.py, with the headers of CUTLASS 4.2.
#include <stdint.h>

static char *shared_memory;    // stands for the start of shared memory
static uint32_t __cvta_generic_to_shared(const void *p) {
    return (uint32_t)((const char *)p - shared_memory);
}
#define CUTE_CVTA_GENERIC_TO_SHARED_ACTIVATED 1
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

#include <stdio.h>
#include <stdlib.h>

#include <vector>

#include "cuda/hopper.cuh"

typedef cute::bfloat16_t Element;
namespace gmma = cute::SM90::GMMA;

enum { EXTENT = 128, DEPTH = 64, ATOM_ROWS = 8 };    // a tile: 128 rows of A or columns of B, by 64 of K

static int failures, layouts;

static void check(bool same, const char *name, int step, const char *what, uint64_t ours, uint64_t theirs) {
    if (same) return;
    failures++;
    printf("%s, step %d: %s is %llx, and CUTLASS's %llx\n", name, step, what, (unsigned long long)ours,
           (unsigned long long)theirs);
}

// leading and stride in bytes, and where the step-th 16 of K begin: as a kernel would know them.
template <gmma::Major MAJOR, class Atom>
static void compare(Atom atom, const char *name, Swizzle swizzle, unsigned leading, unsigned stride,
                    unsigned (*start)(unsigned step)) {
    auto tile = cute::make_tensor(cute::make_smem_ptr((Element *)shared_memory),
                                  cute::tile_to_shape(atom, cute::Shape<cute::Int<EXTENT>, cute::Int<DEPTH>>{}));
    auto steps = cute::flat_divide(tile, cute::Shape<cute::Int<EXTENT>, cute::_16>{});
    for (int step = 0; step < DEPTH / 16; step++) {
        auto operand = steps(cute::_, cute::_, cute::_0{}, step);
        const uint64_t theirs = gmma::make_gmma_desc<MAJOR>(operand).desc_;
        const uint64_t ours = matrix_descriptor_bits(start((unsigned)step), leading, stride, swizzle);
        check(ours == theirs, name, step, "the descriptor", ours, theirs);
        const Major major = MAJOR == gmma::Major::K ? K_MAJOR : MN_MAJOR;
        std::vector<uint32_t> pieces = cuda_on_cpu::wgmma_pieces(theirs, major, EXTENT);
        for (int i = 0; i < EXTENT; i++)
            for (int k = 0; k < 16; k++) {
                const uint64_t address = (uint64_t)((char *)&operand(i, k) - shared_memory);
                const size_t piece = major == K_MAJOR ? (size_t)(i * 2 + k / 8) : (size_t)(k * (EXTENT / 8) + i / 8);
                const uint64_t read = pieces[piece] + (unsigned)(major == K_MAJOR ? k % 8 : i % 8) * 2;
                check(read == address, name, step, "an element's address", read, address);
            }
    }
    layouts++;
}

// Tiles are patterns of 8 rows, those along M or N first, then along K.
template <unsigned ROW>
static unsigned k_start(unsigned step) {    // ROW: bytes of a pattern's row, along K
    const unsigned byte = 32 * step;
    return byte / ROW * (EXTENT / ATOM_ROWS * 8 * ROW) + byte % ROW;
}

static unsigned mn_start(unsigned step) {
    return step * 16 * EXTENT * 2;
}

int main() {
    shared_memory = (char *)aligned_alloc(1024, 64 * 1024);
    const unsigned groups = EXTENT / ATOM_ROWS;
    using gmma::Major;
    compare<Major::K>(gmma::Layout_K_INTER_Atom<Element>{}, "K-major", SWIZZLE_NONE, groups * 128, 128, k_start<16>);
    compare<Major::K>(gmma::Layout_K_SW32_Atom<Element>{}, "K-major, 32", SWIZZLE_32, 16, 256, k_start<32>);
    compare<Major::K>(gmma::Layout_K_SW64_Atom<Element>{}, "K-major, 64", SWIZZLE_64, 16, 512, k_start<64>);
    compare<Major::K>(gmma::Layout_K_SW128_Atom<Element>{}, "K-major, 128", SWIZZLE_128, 16, 1024, k_start<128>);
    const unsigned of_8 = 8 * EXTENT * 2;    // bytes of 8 of K
    compare<Major::MN>(gmma::Layout_MN_INTER_Atom<Element>{}, "MN-major", SWIZZLE_NONE, of_8, 128, mn_start);
    compare<Major::MN>(gmma::Layout_MN_SW32_Atom<Element>{}, "MN-major, 32", SWIZZLE_32, 256, of_8, mn_start);
    compare<Major::MN>(gmma::Layout_MN_SW64_Atom<Element>{}, "MN-major, 64", SWIZZLE_64, 512, of_8, mn_start);
    compare<Major::MN>(gmma::Layout_MN_SW128_Atom<Element>{}, "MN-major, 128", SWIZZLE_128, 1024, of_8, mn_start);
    printf("%d layouts compared, %d differences\n", layouts, failures);
    return failures > 0;
}
