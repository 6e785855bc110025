// The entry points of the PyTorch package attn_c for GPUs (doc/pytorch.md): attention/flash.h on PyTorch's arrays and
// stream. attention/torch/cuda.py calls them by ctypes. Tested on an emulated GPU by dev/tests/test_torch_cuda.py.
#include "cuda/gpu.cuh"

#include "attention/flash.h"
#include "attention/torch/call.h"

extern "C" {
// The class CudaCall in cuda.py. The sequences are adjacent: strides have no batch. q has as many positions as k.
typedef struct {
    const Normalizer *normalizer;
    size_t B, T, NH, NKV, HS, VS, from, window;    // from: see flash_forward(); window: 0 without one
    int L, bf16, any_order;
    Strides q, k, v;
} CudaCall;

typedef struct {
    const void *q, *k, *v;
    const int32_t *first;    // (B,T) or NULL
    const float *scalars;
} CudaInput;
}

namespace {
FlashShape shape_of(const CudaCall *c) {
    return {c->normalizer, c->B, c->T, c->NH, c->NKV, c->HS, c->VS, c->L, c->from, c->any_order != 0, c->window};
}

size_t element(const CudaCall *c) {
    return c->bf16 ? sizeof(bf16) : sizeof(float);
}

template <class X>
FlashInput<X> input_of(const CudaCall *c, const CudaInput *in) {
    return {{(const X *)in->q, c->q.position, c->q.head},
            {(const X *)in->k, c->k.position, c->k.head},
            {(const X *)in->v, c->v.position, c->v.head},
            in->first,
            scalars_at(c->normalizer, c->NH, c->L, in->scalars)};
}

template <class X>
void forward(const CudaCall *c, const CudaInput *in, void *out, float *stats, unsigned long long *all_zero_rows,
             void *scratch, cudaStream_t stream) {
    flash_forward<X>({(X *)out, c->NH * c->VS, c->VS}, stats, all_zero_rows, input_of<X>(c, in), shape_of(c), scratch,
                     stream);
}

template <class X>
void backward(const CudaCall *c, const CudaInput *in, const void *dout, const void *out, const float *stats, void *dq,
              void *dk, void *dv, float *dscalars, void *scratch, cudaStream_t stream) {
    FlashInputGrads<X> d = {{(X *)dq, c->NH * c->HS, c->HS},
                            {(X *)dk, c->NKV * c->HS, c->HS},
                            {(X *)dv, c->NKV * c->VS, c->VS},
                            scalar_grads_at(c->normalizer, c->NH, c->L, dscalars)};
    flash_backward<X>(d, (const X *)dout, {(const X *)out, c->NH * c->VS, c->VS}, stats, input_of<X>(c, in),
                      shape_of(c), scratch, stream);
}
}

// The floats of stats for each row, and the bytes of scratch.
extern "C" EXPORT size_t attn_c_cuda_stats(const CudaCall *c) {
    return flash_stats(shape_of(c), element(c)) / (c->B * c->NH * c->T);
}

extern "C" EXPORT size_t attn_c_cuda_scratch(const CudaCall *c) {
    return flash_scratch(shape_of(c), element(c));
}

// All pointers are the device's.
//   out (B,T,NH,VS), stats (B,NH,T,attn_c_cuda_stats()) written   all_zero_rows: added to
extern "C" EXPORT void attn_c_cuda_forward(const CudaCall *c, const CudaInput *in, void *out, float *stats,
                                           unsigned long long *all_zero_rows, void *scratch, cudaStream_t stream) {
    (c->bf16 ? forward<bf16> : forward<float>)(c, in, out, stats, all_zero_rows, scratch, stream);
}

//   dout, out (B,T,NH,VS)   dq (B,T,NH,HS), dk (B,T,NKV,HS), dv (B,T,NKV,VS) written   dscalars: added to, or NULL
extern "C" EXPORT void attn_c_cuda_backward(const CudaCall *c, const CudaInput *in, const void *dout, const void *out,
                                            const float *stats, void *dq, void *dk, void *dv, float *dscalars,
                                            void *scratch, cudaStream_t stream) {
    (c->bf16 ? backward<bf16> : backward<float>)(c, in, dout, out, stats, dq, dk, dv, dscalars, scratch, stream);
}
