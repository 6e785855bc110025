// The functions that dev/tests/test_flash.py calls: attention forward and backward on host arrays, with the kernels of
// attention/flash.h. Only flash.so contains them, and test_gpt2.cu.
#include "cuda/gpu.cuh"

#include "attention/flash.h"
#include "cuda/check.h"
#include "runtime/error.h"

#include <string.h>

#include <vector>

extern "C" {
typedef struct {
    size_t B, T, NH, NKV, HS, VS;
    int L;
    size_t q_row, k_row, v_row, out_row;    // elements; q, k, v each (B·T·row)
    const int32_t *first;                   // (B,T) or NULL; flash_test() applies the window, too
    bool any_order;
    FlashRope rope;    // if flash_undoes_rope()
    size_t from, window;
} FlashTestShape;

typedef struct {
    const void *q, *k, *v, *dout;    // of X
    Scalars scalars;
    void *out, *dq, *dk, *dv;    // of X
    float *stats;
    ScalarGrads grads;                   // added to
    unsigned long long all_zero_rows;    // added to
} FlashTestArrays;
}

namespace {
// Device memory, freed at the end.
struct DeviceMemory {
    std::vector<void *> all;
    ~DeviceMemory() {
        for (void *p : all) CUDA_CHECK(cudaFree(p));
    }
    void *take(size_t bytes) {
        void *p;
        CUDA_CHECK(cudaMalloc(&p, bytes));
        all.push_back(p);
        return p;
    }
    template <class T>
    T *copy(const T *from, size_t n) {
        if (!from) return NULL;
        T *p = (T *)take(n * sizeof(T));
        CUDA_CHECK(cudaMemcpy(p, from, n * sizeof(T), cudaMemcpyHostToDevice));
        return p;
    }
};

template <class T>
void fetch(T *to, const T *from, size_t n) {
    if (to) CUDA_CHECK(cudaMemcpy(to, from, n * sizeof(T), cudaMemcpyDeviceToHost));
}

FlashShape shape_of(const Normalizer *normalizer, const FlashTestShape *x) {
    return {normalizer, x->B, x->T, x->NH, x->NKV, x->HS, x->VS, x->L, x->from, x->any_order, x->window};
}

template <class X>
FlashInput<X> input_of(const FlashTestShape *x, const X *q, const X *k, const X *v, Scalars scalars) {
    return {{q, x->q_row, x->HS}, {k, x->k_row, x->HS}, {v, x->v_row, x->VS}, x->first, scalars};
}

template <class X>
FlashInputGrads<X> grads_of(const FlashTestShape *x, X *dq, X *dk, X *dv, ScalarGrads scalars) {
    return {{dq, x->q_row, x->HS}, {dk, x->k_row, x->HS}, {dv, x->v_row, x->VS}, scalars, x->rope};
}

template <class X>
void run(const Normalizer *normalizer, const FlashTestShape &x, FlashTestArrays *a) {
    DeviceMemory device;
    FlashShape shape = shape_of(normalizer, &x);
    size_t rows = x.B * x.T, stats_size = rows * x.NH * FLASH_STATS, kept = flash_stats(shape, sizeof(X));
    const X *q = device.copy((const X *)a->q, rows * x.q_row), *k = device.copy((const X *)a->k, rows * x.k_row);
    const X *v = device.copy((const X *)a->v, rows * x.v_row),
            *dout = device.copy((const X *)a->dout, rows * x.out_row);
    Scalars scalars;
    ScalarGrads grads;
    for (int i = 0; i < SCALAR_COUNT; i++) {
        scalars.of[i] = device.copy(a->scalars.of[i], scalar_size(i, x.NH, x.L));
        grads.of[i] = device.copy(a->grads.of[i], scalar_size(i, x.NH, x.L));
    }
    // Elements between the heads' columns, which the kernels do not touch, are returned unchanged.
    X *out = device.copy((X *)a->out, rows * x.out_row), *dq = device.copy((X *)a->dq, rows * x.q_row);
    X *dk = device.copy((X *)a->dk, rows * x.k_row), *dv = device.copy((X *)a->dv, rows * x.v_row);
    unsigned long long *counter = device.copy(&a->all_zero_rows, 1);
    float *stats = (float *)device.take(kept * sizeof(float));
    FlashTestShape there = x;
    there.first = device.copy(x.first, rows);
    if (x.window) {
        int32_t *starts = (int32_t *)device.take(rows * sizeof *starts);
        flash_window_starts(starts, there.first, x.B, x.T, x.window, 0);
        there.first = starts;
    }
    FlashInput<X> in = input_of(&there, q, k, v, scalars);
    flash_forward<X>({out, x.out_row, x.VS}, stats, counter, in, shape, device.take(flash_scratch(shape, sizeof(X))),
                     0);
    there.rope.cosines = device.copy(x.rope.cosines, x.T * x.HS / 2);
    there.rope.sines = device.copy(x.rope.sines, x.T * x.HS / 2);
    if (dout)
        flash_backward<X>(grads_of(&there, dq, dk, dv, grads), dout, {out, x.out_row, x.VS}, stats, in, shape,
                          device.take(flash_scratch(shape, sizeof(X))), 0);
    CUDA_CHECK(cudaDeviceSynchronize());
    fetch((X *)a->out, out, rows * x.out_row);
    fetch((X *)a->dq, dq, rows * x.q_row), fetch((X *)a->dk, dk, rows * x.k_row), fetch((X *)a->dv, dv, rows * x.v_row);
    fetch(a->stats, stats, stats_size);
    for (int i = 0; i < SCALAR_COUNT; i++) fetch(a->grads.of[i], grads.of[i], scalar_size(i, x.NH, x.L));
    fetch(&a->all_zero_rows, counter, 1);
}
}

static Normalizer normalizer_of(const char *attn) {
    Normalizer normalizer;
    char message[2048];
    program_name = "flash.so";
    if (!normalizer_parse(&normalizer, attn, message, sizeof message)) fail(EXIT_USAGE, "%s: %s", attn, message);
    return normalizer;
}

extern "C" void flash_test(const char *attn, bool is_bf16, const FlashTestShape *shape, FlashTestArrays *arrays) {
    Normalizer normalizer = normalizer_of(attn);
    if (is_bf16) run<bf16>(&normalizer, *shape, arrays);
    else run<float>(&normalizer, *shape, arrays);
}

// For scalar `scalar` of SCALARS: how many numbers the normalizer has (0: none), their initial value, and whether they
// are trained.
extern "C" const int flash_scalar_count = SCALAR_COUNT;

extern "C" size_t flash_scalar(const char *attn, const FlashTestShape *shape, int scalar, double *start,
                               bool *trained) {
    Normalizer normalizer = normalizer_of(attn);
    *start = normalizer_start(&normalizer, (Scalar)scalar, shape->L, 0);
    *trained = normalizer_trains(&normalizer, (Scalar)scalar);
    return normalizer_has(&normalizer, (Scalar)scalar) ? scalar_size(scalar, shape->NH, shape->L) : 0;
}

// The same on device arrays, for dev/bench/attention_gpu.py: it uses a stream, allocates nothing and does not wait.
//   backward: the gradients alone, from the out and stats of a forward pass   all_zero_rows: a counter on the
//   device
extern "C" size_t flash_on_device_scratch(const char *attn, bool is_bf16, const FlashTestShape *shape) {
    Normalizer normalizer = normalizer_of(attn);
    return flash_scratch(shape_of(&normalizer, shape), is_bf16 ? sizeof(bf16) : sizeof(float));
}

extern "C" size_t flash_on_device_stats(const char *attn, bool is_bf16, const FlashTestShape *shape) {
    Normalizer normalizer = normalizer_of(attn);
    return flash_stats(shape_of(&normalizer, shape), is_bf16 ? sizeof(bf16) : sizeof(float));
}

template <class X>
static void run_on_device(const Normalizer *normalizer, const FlashTestShape *shape, const FlashTestArrays *a,
                          unsigned long long *all_zero_rows, void *scratch, bool backward, cudaStream_t stream) {
    FlashShape x = shape_of(normalizer, shape);
    FlashInput<X> in = input_of(shape, (const X *)a->q, (const X *)a->k, (const X *)a->v, a->scalars);
    FlashView<X> out = {(X *)a->out, shape->out_row, x.VS};
    if (!backward) return flash_forward<X>(out, a->stats, all_zero_rows, in, x, scratch, stream);
    flash_backward<X>(grads_of(shape, (X *)a->dq, (X *)a->dk, (X *)a->dv, a->grads), (const X *)a->dout,
                      {out.p, out.row, out.head}, a->stats, in, x, scratch, stream);
}

extern "C" void flash_on_device(const char *attn, bool is_bf16, const FlashTestShape *shape, const FlashTestArrays *a,
                                unsigned long long *all_zero_rows, void *scratch, bool backward, cudaStream_t stream) {
    Normalizer normalizer = normalizer_of(attn);
    if (is_bf16) run_on_device<bf16>(&normalizer, shape, a, all_zero_rows, scratch, backward, stream);
    else run_on_device<float>(&normalizer, shape, a, all_zero_rows, scratch, backward, stream);
}
