// The host's side of TMA: the description of a tensor in global memory that hopper.cuh's tma_load() takes.
#ifndef CUDA_TENSOR_MAP_CUH
#define CUDA_TENSOR_MAP_CUH

#include <cuda.h>

#include <initializer_list>

#include "cuda/check.h"
#include "cuda/hopper.cuh"

// Describes a tensor of bf16 or float for tma_load(): its sizes in elements and its strides in bytes, the contiguous
// dimension first and without a stride, and the box that one copy moves. Strides and p are multiples of 16 bytes, and
// with a swizzle, a row of the box has as many bytes. Ends the program if CUDA refuses the tensor. Writes to *map
// rather than returning it: CUDA requires 64-byte alignment, which GCC 12 does not give to the temporary of a returned
// value.
template <class X>
static inline void tensor_map(TensorMap *map, const X *p, int rank, const uint64_t *sizes, const uint64_t *strides,
                              const uint32_t *box, Swizzle swizzle) {
    static_assert(sizeof(X) == 2 || sizeof(X) == 4, "bf16 or float");
    typedef CUresult (*Encode)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                               const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                               CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    const cuuint32_t ones[] = {1, 1, 1, 1, 1};
    cuuint64_t size[5] = {}, stride[5] = {};
    cuuint32_t boxed[5] = {};
    void *encode = NULL;
    cudaDriverEntryPointQueryResult found;
    for (int i = 0; i < rank && i < 5; i++) {
        size[i] = sizes[i];
        boxed[i] = box[i];
        if (i > 0) stride[i - 1] = strides[i - 1];
    }
#if CUDART_VERSION >= 12050
    CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found));
#else
    CUDA_CHECK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &encode, cudaEnableDefault, &found));
#endif
    CUresult result =
        !encode
            ? CUDA_ERROR_NOT_FOUND
            : ((Encode)encode)(map, sizeof(X) == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
                               (cuuint32_t)rank, (void *)p, size, stride, boxed, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                               (CUtensorMapSwizzle)swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        fail(EXIT_PEER,
             "rank %d: cuTensorMapEncodeTiled failed with error %d for a tensor of %d dimensions.\n"
             "  Set FLASH90=0 in the environment to select attention's kernels for compute capability 8.0.",
             process.rank, (int)result, rank);
}

template <class X, int RANK>
static inline void tensor_map(TensorMap *map, const X *p, const uint64_t (&sizes)[RANK],
                              std::initializer_list<uint64_t> strides, const uint32_t (&box)[RANK], Swizzle swizzle) {
    if (strides.size() + 1 != RANK)
        fail(EXIT_USAGE, "tensor_map: %zu strides for %d dimensions; the first has none.", strides.size(), RANK);
    tensor_map(map, p, RANK, sizes, strides.begin(), box, swizzle);
}
#endif
