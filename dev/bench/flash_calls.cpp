// Prints, as JSON, what dev/bench/sass.py needs to know about attention/flash.cuh: for each preset of
// attention/normalizer.h, the instance that runs it, its forward pass's sweeps over the keys, the bytes of its
// FlashCall<bf16> as flash.cu would fill it, and the numbers of rows that a warp and a block own and that a tile has;
// for compute capability 9.0, whether the backward kernel starts with the last queries, and the bytes of the
// Forward90Work for one block of rows that sees 1, 2, ... 16 tiles of keys.
//   flash_calls B T NH HS
#include "cuda/gpu.cuh"

#include "attention/flash.cuh"
#include "attention/flash90_forward.cuh"

#include <stdio.h>
#include <stdlib.h>

struct Preset {
    const char *name;
    Stage scale, offset, phi, norm, post;
};

#define PRESET(name, qk, scale, s, offset, phi, norm, post, source) \
    {#name, {SCALE_##scale}, {OFFSET_##offset}, {PHI_##phi}, {NORM_##norm}, {POST_##post}},
static const Preset presets[] = {NORMALIZERS(PRESET)};

#define FLASH_INSTANCE(name, X, phi, post) #name,
static const char *const names[] = {
#include "attention/flash_instances.h"
};
#undef FLASH_INSTANCE

// The addresses are fake, because nothing is read through them.
static FlashCall<bf16> call_of(const Preset &preset, int B, int T, int NH, int HS) {
    bf16 *there = (bf16 *)0x100000000;
    FlashCall<bf16> call = {};
    size_t row = 3 * (size_t)NH * HS, out_row = (size_t)NH * HS;
    call.q = call.k = call.v = {there, row, (size_t)HS};
    call.dq = call.dk = call.dv = {there, row, (size_t)HS};
    call.out = {there, out_row, (size_t)HS};
    call.dout = {there, out_row, (size_t)HS};
    call.stats = call.g = (float *)there;
    call.all_zero_rows = (unsigned long long *)there;
    call.prefix = preset.post.kind == POST_RECENTER || preset.post.kind == POST_RECENTER_L1 ? (float *)there : NULL;
    call.rest = phi_signed(preset.phi.kind) && (norm_is_sum(preset.norm) || preset.post.kind == POST_RECENTER_L1)
                    ? there
                    : NULL;
    call.parts = call.dq_sets = 1;
    call.rows = (FlashRow *)there;
    if (preset.scale.kind != SCALE_LOGN && preset.scale.kind != SCALE_LOGN_BIAS && preset.scale.kind != SCALE_PN)
        call.g = NULL;
    call.scale = preset.scale;
    call.offset = preset.offset;
    call.norm = preset.norm;
    call.phi = preset.phi.kind;
    call.post = preset.post.kind;
    call.power = (float)preset.post.value;
    call.B = B;
    call.T = T;
    call.NH = call.NKV = NH;
    call.HS = call.VS = HS;
    call.L = T;
    return call;
}

template <class T>
static void print_bytes(const T &x) {
    printf("\"");
    for (size_t i = 0; i < sizeof x; i++) printf("%02x", ((const unsigned char *)&x)[i]);
    printf("\"");
}

template <int HS>
static void print_work(FlashCall<bf16> call) {
    typedef Forward90Plan<HS, PHI_EXP, FLASH_PLAIN> P;
    call.B = call.NH = call.NKV = 1;
    for (int tiles = 1; tiles <= 16; tiles++) {
        call.from = P::OWN * (tiles - 1);
        call.T = P::OWN * tiles;
        print_bytes(forward90_work<P>(call));
        if (tiles < 16) printf(", ");
    }
}

template <class P>
static void print_plan(const char *kernel, const char *end) {
    printf("\"%s\": {\"own\": %d, \"stream\": %d, \"warp\": %d}%s", kernel, (int)P::OWN, (int)P::STREAM, 16 * P::TILES,
           end);
}

template <int instance, int HS>
static void print_plans(int wanted) {
    constexpr FlashInstance it = flash_instances[instance];
    if (instance != wanted) return;
    print_plan<ForwardPlan<bf16, HS, it.phi, it.post>>("forward", ", ");
    print_plan<RowsPlan<bf16, HS, it.phi, it.post, false>>("dq", ", ");
    print_plan<KeysPlan<bf16, HS, it.phi, false>>("dkv", "");
}

template <int HS, int... all>
static void print_plans(int wanted, std::integer_sequence<int, all...>) {
    (print_plans<all, HS>(wanted), ...);
}

int main(int, char **argument) {
    int B = atoi(argument[1]), T = atoi(argument[2]), NH = atoi(argument[3]), HS = atoi(argument[4]);
    const char *separator = "[";
    for (const Preset &preset : presets) {
        FlashCall<bf16> call = call_of(preset, B, T, NH, HS);
        int instance = flash_find(sizeof(bf16), preset.phi.kind, preset.post.kind);
        printf("%s{\"preset\": \"%s\", \"instance\": \"%s\", \"phi\": %d, \"post\": %d, \"sweeps\": %d, \"call\": ",
               separator, preset.name, names[instance], flash_instances[instance].phi, flash_instances[instance].post,
               flash_instances[instance].post >= FLASH_RECENTER_L1 ? 2 : 1);
        print_bytes(call);
        printf(", \"last_first\": %d, \"work\": [", flash90_last_queries_first(preset.phi.kind, HS));
        HS <= 64 ? print_work<64>(call) : print_work<128>(call);
        printf("], ");
        auto all = std::make_integer_sequence<int, FLASH_INSTANCE_COUNT>();
        if (HS <= 48) print_plans<48>(instance, all);
        else if (HS <= 64) print_plans<64>(instance, all);
        else print_plans<128>(instance, all);
        printf("}");
        separator = ",\n";
    }
    printf("]\n");
    return 0;
}
