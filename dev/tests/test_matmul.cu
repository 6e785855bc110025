// matmul: cuda/matmul.h against loops in double, in float and bf16; stored algorithms (cuda/matmul_file.h).
//
//   test_matmul [GROUP]     one group of GROUPS, at the end of this file
//
// On a GPU, a group that may end the process (odd sizes in bf16, which the trainer never uses) runs only by name.
#include "cuda/gpu.cuh"
#include "cuda/matmul.h"
#include "cuda/matmul_file.h"

#include <math.h>

#include <vector>

#include "dev/tests/check.h"

using std::vector;

#ifdef __CUDACC__
enum { ON_GPU = 1 };
#else
enum { ON_GPU = 0 };
#endif

static cudaStream_t stream;
static Matmul matmul;
static uint64_t seed = 1;

static float any(void) {    // in [-1, 1)
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (float)(int32_t)(seed >> 32) / 2147483648.0f;
}

template <class X>
static float number(X x) {
    if constexpr (sizeof(X) == 2) return __bfloat162float(x);
    else return x;
}

template <class X>
static X as(float x) {
    if constexpr (sizeof(X) == 2) return __float2bfloat16_rn(x);
    else return x;
}

// n numbers on the host and a copy on the device, `gap` elements after the allocation's start, with guards past the
// end.
template <class X>
struct Array {
    enum { GUARDS = 16 };
    vector<X> host;
    X *base, *device;
    Array(size_t n, size_t gap = 0) : host(n) {
        for (X &x : host) x = as<X>(any());
        CUDA_CHECK(cudaMalloc(&base, (gap + n + GUARDS) * sizeof(X)));
        device = base + gap;
        upload();
        vector<X> guards(GUARDS, as<X>(12345.0f));
        CUDA_CHECK(cudaMemcpy(device + n, guards.data(), GUARDS * sizeof(X), cudaMemcpyHostToDevice));
    }
    ~Array() {
        CUDA_CHECK(cudaFree(base));
    }
    Array(const Array &) = delete;
    void fill(float x) {
        for (X &y : host) y = as<X>(x);
        upload();
    }
    void upload(void) {
        CUDA_CHECK(cudaMemcpy(device, host.data(), host.size() * sizeof(X), cudaMemcpyHostToDevice));
    }
    vector<X> download(void) {
        vector<X> got(host.size());
        X guards[GUARDS];
        CUDA_CHECK(cudaStreamSynchronize(stream));
        CUDA_CHECK(cudaMemcpy(got.data(), device, got.size() * sizeof(X), cudaMemcpyDeviceToHost));
        CUDA_CHECK(cudaMemcpy(guards, device + got.size(), sizeof guards, cudaMemcpyDeviceToHost));
        for (X guard : guards) CHECK(number(guard) == number(as<X>(12345.0f)), "something was written past the end");
        return got;
    }
};

// Checks got[i,j] = sum_k a(i,k) b(k,j) + c(i,j), with c NULL for none. Float sums may err by 1e-6 of the terms'
// absolute values, an output in bf16 by half a unit in its last place more.
template <class X, class Y, class A, class B>
static void compare(const char *what, const vector<Y> &got, size_t rows, size_t cols, size_t terms, A a, B b,
                    const vector<Y> *c) {
    double worst = 0;
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < cols; j++) {
            double sum = c ? number((*c)[i * cols + j]) : 0, size = fabs(sum);
            for (size_t k = 0; k < terms; k++) sum += a(i, k) * b(k, j), size += fabs(a(i, k) * b(k, j));
            double tolerance = 1e-6 * size + (sizeof(Y) == 2 ? fabs(sum) / 256 : 0);
            double error = fabs(number(got[i * cols + j]) - sum) / tolerance;
            if (!(error <= worst)) worst = error;
        }
    CHECK(worst <= 1, "%s: (%zu,%zu), %zu terms: %g times the tolerance", what, rows, cols, terms, worst);
}

// All matmuls of a layer, misaligned by `gap` elements and more.
template <class X>
static void test_layer(size_t N, size_t C, size_t OC, size_t gap) {
    check_case();
    Array<X> inp(N * C, gap), weight(OC * C, 2 * gap), dout(N * OC, 4 * gap), add(N * OC, 8 * gap),
        out(N * OC, 3 * gap), dinp(N * C, 6 * gap);
    Array<float> dweight(OC * C, gap);
    auto x = [&](size_t n, size_t c) { return (double)number(inp.host[n * C + c]); };
    auto w = [&](size_t o, size_t c) { return (double)number(weight.host[o * C + c]); };
    auto g = [&](size_t n, size_t o) { return (double)number(dout.host[n * OC + o]); };
    auto w_transposed = [&](size_t c, size_t o) { return w(o, c); };
    auto g_transposed = [&](size_t o, size_t n) { return g(n, o); };

    out.fill(NAN);
    matmul_forward(&matmul, out.device, inp.device, weight.device, (const X *)NULL, {N, C, OC}, stream);
    compare<X>("out", out.download(), N, OC, C, x, w_transposed, (vector<X> *)NULL);
    out.fill(NAN);
    matmul_forward(&matmul, out.device, inp.device, weight.device, add.device, {N, C, OC}, stream);
    compare<X>("out, a residual added", out.download(), N, OC, C, x, w_transposed, &add.host);
    CHECK(memcmp(add.download().data(), add.host.data(), N * OC * sizeof(X)) == 0,
          "the residual itself was written to");
    if (matmul_type(out.device) == CUDA_R_32F) {    // in bf16: test_in_place()
        matmul_forward(&matmul, add.device, inp.device, weight.device, add.device, {N, C, OC}, stream);
        compare<X>("out, in place", add.download(), N, OC, C, x, w_transposed, &add.host);
    }

    dinp.fill(NAN), dweight.fill(NAN);
    matmul_backward(&matmul, dinp.device, dweight.device, dout.device, inp.device, weight.device, {N, C, OC}, false,
                    stream);
    compare<X>("dinp", dinp.download(), N, C, OC, g, w, (vector<X> *)NULL);
    compare<X>("dweight", dweight.download(), OC, C, N, g_transposed, x, (vector<float> *)NULL);
    dweight.fill(0.75f), dinp.fill(NAN);
    matmul_backward(&matmul, (X *)NULL, dweight.device, dout.device, inp.device, weight.device, {N, C, OC}, true,
                    stream);
    compare<X>("dweight, added to", dweight.download(), OC, C, N, g_transposed, x, &dweight.host);
    CHECK(isnan(number(dinp.download()[0])), "dinp was written, but was not requested");
    matmul_backward(&matmul, dinp.device, (float *)NULL, dout.device, inp.device, weight.device, {N, C, OC}, true,
                    stream);
    compare<X>("dinp alone", dinp.download(), N, C, OC, g, w, (vector<X> *)NULL);
}

// Rows are multiples of 8 elements, as in the trainer: 16 bytes or more in bf16.
static const size_t even_shapes[][3] = {{1, 48, 144}, {33, 48, 144}, {64, 96, 64}, {130, 64, 200}};
static const size_t odd_shapes[][3] = {{33, 96, 33}, {17, 33, 7}, {2, 1, 1}, {5, 600, 97}};

template <class X>
static void test_even_layers(void) {
    for (const size_t *s : even_shapes) test_layer<X>(s[0], s[1], s[2], 0);
}

template <class X>
static void test_odd_layers(void) {
    for (const size_t *s : odd_shapes) test_layer<X>(s[0], s[1], s[2], 0);
    test_layer<X>(33, 96, 64, 1);
    test_layer<X>(32, 64, 64, 3);
}

// An output in bf16 that is added to itself is rejected before any work.
static void test_in_place(void) {
    char output[1024];
    auto call = [](void *x) {
        bf16 *out = (bf16 *)x;
        matmul_forward(&matmul, out, out + 64, out + 128, out, {8, 8, 8}, stream);
    };
    Array<bf16> x(192);
    int code = check_fork(call, x.device, output, sizeof output);
    CHECK(code == EXIT_USAGE && strstr(output, "the same array"), "exit code %d: %s", code, output);
}

static void test_layers(void *) {
    check_group("layers in float");
    test_even_layers<float>();
    test_odd_layers<float>();
    check_group("layers in bf16");
    test_even_layers<bf16>();
    check_group("in place in bf16");
    test_in_place();
}

// Rows and arrays at any multiple of 2 bytes, also with float32 results. The library may have no algorithm for them.
static void test_unaligned(void *) {
    check_group("layers in bf16, odd sizes and addresses");
    test_odd_layers<bf16>();
}

static void restart(void *workspace, size_t bytes, bool measure, MatmulFile *file = NULL) {
    matmul_end(&matmul);
    matmul_start(&matmul, workspace, bytes, file, measure);
}

// A layer has three kinds of matmuls (with or without a residual is one kind). The same layer again needs no new plans.
static void test_plans(void *workspace) {
    check_group("plans are kept");
    restart(workspace, MATMUL_WORKSPACE, false);
    test_layer<float>(33, 48, 96, 0);
    CHECK(matmul.count == 3, "one layer: %d plans", matmul.count);
    test_layer<float>(33, 48, 96, 0);
    CHECK(matmul.count == 3, "the same layer again: %d plans", matmul.count);
    test_layer<bf16>(33, 48, 96, 0);
    CHECK(matmul.count == 6, "and in bf16: %d plans", matmul.count);
    for (int i = 0; i < matmul.count; i++) CHECK(matmul.plans[i].count > 1, "more than one algorithm is known");
}

// As in generating a text token by token: each length is another shape.
static void test_many(void *workspace) {
    check_group("more shapes than there is room for");
    restart(workspace, MATMUL_WORKSPACE, false);
    for (int round = 0; round < 2; round++)
        for (size_t N = 1; N <= MATMUL_SHAPES / 2; N++) test_layer<float>(N, 8, 4, 0);
    CHECK(matmul.count == MATMUL_SHAPES, "%d plans", matmul.count);
}

static void test_measured(void *workspace) {
    check_group("the fastest algorithm, by measuring");
    restart(workspace, MATMUL_WORKSPACE, true);
    test_layer<float>(33, 48, 96, 0);
    test_layer<bf16>(33, 48, 96, 0);
    for (int i = 0; i < matmul.count; i++) CHECK(matmul.plans[i].measured, "plan %d was not measured", i);
    Array<float> dweight(24 * 16), dout(8 * 24), inp(8 * 16);    // a shape whose first use adds to a gradient
    matmul_backward(&matmul, (float *)NULL, dweight.device, dout.device, inp.device, (const float *)NULL, {8, 16, 24},
                    true, stream);
    compare<float>(
        "dweight, added to", dweight.download(), 24, 16, 8,
        [&](size_t o, size_t n) { return (double)dout.host[n * 24 + o]; },
        [&](size_t n, size_t c) { return (double)inp.host[n * 16 + c]; }, &dweight.host);
}

static void test_workspace(void *workspace) {
    check_group("little workspace, or none");
    restart(workspace, 1024, false);
    test_layer<bf16>(33, 96, 64, 0);
    restart(NULL, 0, false);
    test_layer<float>(33, 96, 64, 0);
    test_layer<bf16>(33, 96, 64, 0);
}

// The bits are the same a second time, whatever the memory beside a row contains.
static void test_repeated(void *workspace) {
    check_group("the same bits each time");
    restart(workspace, MATMUL_WORKSPACE, false);
    Array<bf16> inp(65 * 96), weight(200 * 96), out(65 * 200);
    matmul_forward(&matmul, out.device, inp.device, weight.device, (const bf16 *)NULL, {65, 96, 200}, stream);
    vector<bf16> first = out.download();
    for (int i = 0; i < 3; i++) {
        out.fill(NAN);
        matmul_forward(&matmul, out.device, inp.device, weight.device, (const bf16 *)NULL, {65, 96, 200}, stream);
        CHECK(memcmp(out.download().data(), first.data(), first.size() * sizeof(bf16)) == 0, "time %d differs", i + 2);
    }
}

// ---- stored algorithms

static MatmulFile no_choices(void) {
    MatmulFile file = {};
    file.device = "a GPU, 80GB";
    file.workspace = MATMUL_WORKSPACE;
    return file;
}

// The result of one matmul, whose plan is then the first.
static vector<float> bits_with(void *workspace, bool measure, MatmulFile *file) {
    static Array<float> inp(64 * 96), weight(40 * 96), out(64 * 40);
    restart(workspace, MATMUL_WORKSPACE, measure, file);
    out.fill(NAN);
    matmul_forward(&matmul, out.device, inp.device, weight.device, (const float *)NULL, {64, 96, 40}, stream);
    return out.download();
}

// A stored algorithm is used, for exactly its shape, and never measured again.
static void test_stored_is_used(void *workspace) {
    vector<float> first = bits_with(workspace, false, NULL);
    MatmulPlan plan = matmul.plans[0];
    for (int i = 0; i < plan.count; i++) {
        vector<vector<float>> results;
        if (plan.candidates[i].state != CUBLAS_STATUS_SUCCESS) continue;
        const cublasLtMatmulAlgo_t &algorithm = plan.candidates[i].algo;
        for (bool measure : {false, true}) {
            MatmulFile file = no_choices();
            matmul_file_add(&file, plan.shape, algorithm, 0.5);
            CHECK(!matmul_rejected(&file), "the library rejects its own algorithm %d", i);
            results.push_back(bits_with(workspace, measure, &file));
            CHECK(memcmp(&matmul.plans[0].candidates[0].algo, &algorithm, sizeof algorithm) == 0, "algorithm %d", i);
            CHECK(file.choices.size() == 1 && file.choices[0].ms == 0.5, "a stored matmul was measured");
        }
        CHECK(results[0] == results[1], "algorithm %d: measuring changes the bits", i);
        if (!ON_GPU) CHECK((results[0] == first) == (i == plan.chosen), "algorithm %d does not show in the bits", i);
    }
    auto applies = [&](auto change) {
        MatmulFile file = no_choices();
        matmul_file_add(&file, plan.shape, plan.candidates[plan.count - 1].algo, 0.5);
        change(file.choices[0]);
        CHECK(matmul_file_applying(&file) == (matmul_file_find(&file, file.choices[0].shape) != NULL), "the count");
        bits_with(workspace, false, &file);
        return matmul.plans[0].count == 1;
    };
    CHECK(applies([](MatmulChoice &) {}), "a choice does not apply");
    CHECK(!applies([](MatmulChoice &c) { c.device += "!"; }), "another GPU's applies");
    CHECK(!applies([](MatmulChoice &c) { c.version++; }), "another version's applies");
    CHECK(!applies([](MatmulChoice &c) { c.workspace /= 2; }), "one for another workspace applies");
    CHECK(!applies([](MatmulChoice &c) { c.shape.k++; }), "one for another shape applies");
    CHECK(!applies([](MatmulChoice &c) { c.shape.alignment[3] /= 2; }), "one for another alignment applies");
}

static bool is_rejected(MatmulChoice choice, size_t workspace) {
    MatmulFile file = no_choices();
    file.workspace = choice.workspace = workspace;
    file.choices.push_back(choice);
    return matmul_rejected(&file) == &file.choices[0];
}

// What the emulation rejects. A GPU's library may accept some of it.
static void test_stored_is_rejected(const MatmulChoice &choice) {
    auto with = [&](auto change) {
        MatmulChoice changed = choice;
        change(changed);
        return is_rejected(changed, MATMUL_WORKSPACE);
    };
    CHECK(!with([](MatmulChoice &) {}), "the algorithm itself");
    CHECK(with([](MatmulChoice &c) { memset(&c.algorithm, 0xFF, sizeof c.algorithm); }), "no algorithm");
    CHECK(with([](MatmulChoice &c) { c.shape.n++; }), "one for other sizes");
    CHECK(with([](MatmulChoice &c) { c.algorithm.data[2] ^= 1; }), "one for an alignment that does not exist");
    CHECK(is_rejected(choice, choice.algorithm.data[1] - 1), "one that needs more workspace");
}

// The bits of a measured run, again without measuring. Measuring fills the file, whose text is read as it was written.
static void test_stored_by_measuring(void *workspace, MatmulFile *file) {
    *file = no_choices();
    vector<float> measured = bits_with(workspace, true, file);
    test_layer<bf16>(32, 64, 64, 0);
    CHECK(file->choices.size() == 4 && file->unsaved, "%zu choices", file->choices.size());
    for (int i = 0; i < matmul.count; i++) CHECK(matmul.plans[i].measured, "plan %d", i);
    CHECK(bits_with(workspace, false, file) == measured, "the stored algorithms give other bits");
    file->choices[1].device = "another GPU";
    file->choices[2].version++;
    CHECK(matmul_file_applying(file) == 2, "%zu choices apply", matmul_file_applying(file));
}

static bool parses(const std::string &text, size_t count) {
    vector<MatmulChoice> choices;
    Error error = {};
    if (matmul_file_parse(&choices, "FILE", text, &error)) return choices.size() == count;
    CHECK(error.code == EXIT_INPUT && strncmp(error.text, "FILE, line ", 11) == 0, "%s", error.text);
    return false;
}

// Any damage is found: each byte missing from there on, or changed in one bit, and a line twice.
static void test_stored_damaged(const MatmulFile &file) {
    vector<MatmulChoice> choices;
    Error error;
    size_t count = file.choices.size();
    std::string text = matmul_file_text(file.choices);
    CHECK(matmul_file_parse(&choices, "FILE", text, &error) && matmul_file_text(choices) == text, "%s", text.c_str());
    for (size_t i = 0; i < choices.size(); i++) CHECK(choices[i].line == (int)i + 2, "line %d", choices[i].line);
    for (size_t size = 0; size < text.size(); size++) CHECK(!parses(text.substr(0, size), count), "%zu bytes", size);
    for (size_t i = 0; i < text.size(); i++)
        for (int bit = 0; bit < 8; bit++) {
            std::string damaged = text;
            damaged[i] = (char)(damaged[i] ^ 1 << bit);
            CHECK(!parses(damaged, count), "byte %zu, bit %d", i, bit);
        }
    CHECK(!parses(text + text, 2 * count) && !parses(text + "end\n", count), "more than a file");
    size_t second = text.find('\n') + 1;
    CHECK(parses(text.substr(0, second) + text.substr(text.find('\n', second) + 1), count - 1), "one line less");
    for (size_t size : {(size_t)0, (size_t)1 << 31}) {
        choices[0].shape.k = size;
        CHECK(!parses(matmul_file_text(choices), count), "k = %zu", size);
    }
}

static void test_stored(void *workspace) {
    check_group("stored algorithms");
    MatmulFile file;
    test_stored_is_used(workspace);
    bits_with(workspace, false, NULL);
    const MatmulPlan &plan = matmul.plans[0];
    MatmulChoice choice = {"", cublasLtGetVersion(), 0, plan.shape, plan.candidates[plan.chosen].algo, 1, 0};
    choice.device = no_choices().device;
    if (!ON_GPU) test_stored_is_rejected(choice);
    test_stored_by_measuring(workspace, &file);
    test_stored_damaged(file);
    restart(workspace, MATMUL_WORKSPACE, false);
}

// `by_name`: runs on a GPU only if named, because the library may reject a call, which ends the process.
static const struct {
    const char *name;
    void (*test)(void *workspace);
    bool by_name;
} GROUPS[] = {
    // clang-format off
    {"layers",    test_layers,    false},  {"unaligned", test_unaligned, ON_GPU}, {"plans",    test_plans,    false},
    {"shapes",    test_many,      false},  {"measured",  test_measured,  false},  {"workspace", test_workspace, false},
    {"repeated",  test_repeated,  false},  {"stored",    test_stored,    false},
    // clang-format on
};

int main(int argc, char **argv) {
    void *workspace;
    int ran = 0;
    program_name = "test_matmul";
    setvbuf(stdout, NULL, _IOLBF, 0);    // the library may crash
    CUDA_CHECK(cudaStreamCreate(&stream));
    CUDA_CHECK(cudaMalloc(&workspace, MATMUL_WORKSPACE));
    matmul_start(&matmul, workspace, MATMUL_WORKSPACE, NULL, false);
    for (const auto &group : GROUPS) {
        if (argc > 1 ? strcmp(group.name, argv[1]) != 0 : group.by_name) continue;
        restart(workspace, MATMUL_WORKSPACE, false);
        group.test(workspace);
        ran++;
    }
    if (ran == 0) fail(EXIT_USAGE, "%s: no such group of tests", argv[1]);
    matmul_end(&matmul);
    CUDA_CHECK(cudaFree(workspace));
    CUDA_CHECK(cudaStreamDestroy(stream));
    return check_verdict();
}
