// logits FOLDER IDS [documents | pass]: prints the logits of a checkpoint's model after each of the token ids "1,2,3",
// one line per position, for comparison with other programs. Before that it compares the ways in which the trainer
// computes them: in one pass, and with the key-value cache in several splits; and sequences decoded together with each
// one alone, bit for bit; and a sequence that goes back and repeats its last tokens. The exit status is 1 if they
// differ.
// documents: attention stops at document boundaries, and the cache is laid out for a switch to the model's list.
// pass: without the comparison.
#define WITHOUT_MAIN
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#include "train_gpt2.c"

#define PREFILL_ROWS 8    // so that short prompts have several chunks, and the caches of windows move
#include "model/decode.h"
#pragma GCC diagnostic pop

enum { BESIDE = 5, BACK = 3, MAX_IDS = 4096 };    // sequences decoded together; tokens that are repeated; ids read

static Model model;
static Decoder decoder;
static float *full, *cached;    // (T,V) in one pass; (V) after the last token, alone

static size_t read_ids(int32_t *ids, const char *text, size_t vocab) {
    size_t count = 0;
    for (char *end; *text; text = *end == ',' ? end + 1 : end) {
        long id = strtol(text, &end, 10);
        if (end == text || (*end && *end != ',') || id < 0 || (size_t)id >= vocab || count == MAX_IDS)
            fail(EXIT_USAGE, "%s: expected at most %d ids below %zu, separated by commas.", text, MAX_IDS, vocab);
        ids[count++] = (int32_t)id;
    }
    if (!count) fail(EXIT_USAGE, "no ids.");
    return count;
}

static void load(const char *folder, size_t T) {
    Error error;
    const AttentionList own = model.config.attn, *const others[] = {&own};
    char message[256];
    model.list = tensors_of(&model.config, NULL, 0);
    plan_parameters(&model, false, false);
    plan_activations(&model, model.config.layers, 1, T);
    if (model.doc_mask) attention_parse(&model.config.attn, "softmax+window=1", 1, message, sizeof message);
    model.others = others;
    model.other_count = model.doc_mask;
    plan_decoder(&decoder, &model, &model.plan, BESIDE, T, BACK);
    model.config.attn = own;
    model.other_count = 0;
    memory_add(&model.plan, "logits", (void **)&full, FLOATS(T * model.config.vocab));
    memory_add(&model.plan, "logits", (void **)&cached, FLOATS(model.config.vocab));
    memory_take(&model.plan);
    model_ready(&model);
    decoder_ready(&decoder);
    Weights weights = weights_of(&model);
    if (!weights_load(&weights, folder, &model.config.attn, &error)) fail_with(&error);
}

// The largest difference in a row, divided by the row's largest logit. NaN if there is a NaN.
static double difference(const float *a, const float *b, size_t V) {
    double largest = 0, most = 0;
    for (size_t v = 0; v < V; v++) {
        double apart = fabs((double)a[v] - b[v]);
        if (!(apart <= most)) most = apart;
        if (fabs(b[v]) > largest) largest = fabs(b[v]);
    }
    return most / largest;
}

// logits (T,V) written
static void one_pass(float *logits, const int32_t *ids, size_t T) {
    size_t V = model.config.vocab, C = model.config.channels;
    model_forward(&model, ids, 1, T);
    matmul_forward(logits, model.activations.h, weight(&model, model.list.head), T, C, V, false);
    if (model.config.logit_softcap != 0) softcap(logits, T * V, (real)model.config.logit_softcap);
}

// What may lie between the cache and one pass, relative to the largest logit. Both round; under lssar, the power of 15
// magnifies that to 7e-6. All other models stay far below the 1e-5.
static double tolerance(void) {
    double most = 1e-5;
    for (size_t l = 0; l < model.config.layers; l++)
        if (normalizer_of(&model.config, l)->post.kind == POST_REWEIGHT) most = 1e-4;
    return most;
}

// A prompt of `split` tokens, then one token after another.
static bool check_cache(const int32_t *ids, size_t T, size_t split, double most) {
    size_t V = model.config.vocab;
    float *logits = decode_prompt(&decoder, ids, split, 0);
    for (size_t t = split - 1;; t++) {
        double apart = difference(logits, full + t * V, V);
        if (!(apart <= most)) {
            fprintf(stderr,
                    "position %zu, a prompt of %zu tokens: cache and one pass differ by %g of the largest logit, "
                    "expected at most %g\n",
                    t, split, apart, most);
            return false;
        }
        if (t + 1 == T) break;
        decode(&decoder, &(DecodeRow){ids[t + 1], 0, t + 1}, 1);
        logits = decode_logits(&decoder, 0, 1, 0);
    }
    memcpy(cached, logits, FLOATS(V));
    return true;
}

// Feeds one token after another, and after each one the last few again.
static bool check_back(const int32_t *ids, size_t T, double most) {
    size_t V = model.config.vocab;
    for (size_t t = 0; t < T && !model.doc_mask; t++) {
        decode(&decoder, &(DecodeRow){ids[t], 0, t}, 1);
        if (t < BACK) continue;
        decode_span(&decoder, ids + t - BACK, BACK + 1, 0, t - BACK);
        double apart = difference(decode_logits(&decoder, BACK, 1, 0), full + t * V, V);
        if (apart <= most) continue;
        fprintf(stderr, "position %zu: after going back, cache and one pass differ by %g of the largest logit\n", t,
                apart);
        return false;
    }
    return true;
}

// The last of several sequences, after others with different tokens, has the same bits as alone.
static bool check_beside(const int32_t *ids, size_t T) {
    size_t V = model.config.vocab;
    for (size_t t = 0; t < T; t++) {
        DecodeRow rows[BESIDE];
        for (size_t i = 0; i < BESIDE; i++) rows[i] = (DecodeRow){ids[i + 1 == BESIDE ? t : (t + i) % T], i, t};
        decode(&decoder, rows, BESIDE);
    }
    if (!memcmp(decode_logits(&decoder, 0, BESIDE, 0) + (BESIDE - 1) * V, cached, FLOATS(V))) return true;
    fprintf(stderr, "a sequence's logits depend on those decoded with it\n");
    return false;
}

int main(int argc, char **argv) {
    static int32_t ids[MAX_IDS];
    Error error;
    program_name = "logits";
    const char *how = argc == 4 ? argv[3] : "";
    bool alone = !strcmp(how, "pass");
    model.doc_mask = !strcmp(how, "documents");
    if (argc != (alone || model.doc_mask ? 4 : 3)) fail(EXIT_USAGE, "logits FOLDER IDS [documents | pass]");
    if (!model_config_read(&model.config, argv[1], NULL, &error)) fail_with(&error);
    size_t T = read_ids(ids, argv[2], model.config.vocab), V = model.config.vocab;
    load(argv[1], T);
    one_pass(full, ids, T);
    double most = tolerance();
    bool right = alone || (check_cache(ids, T, T, most) && check_cache(ids, T, (T + 1) / 2, most) &&
                           check_cache(ids, T, 1, most) && check_beside(ids, T) && check_back(ids, T, most));
    for (size_t t = 0; t < T; t++)
        for (size_t v = 0; v < V; v++) printf("%.9g%c", full[t * V + v], v + 1 == V ? '\n' : ' ');
    return !right;
}
