// shards: windows across shards, the order of data, masks, documents, files over 2 GiB, and every kind of broken file.
#include <math.h>
#include <sys/stat.h>

#include "data/shards.h"
#include "dev/tests/check.h"

static char folder[] = "/tmp/test_shards.XXXXXX";
static Error error;

static const char *at(const char *name) {
    static char path[8][256];
    static int next;
    char *out = path[next++ % 8];
    snprintf(out, sizeof path[0], "%s/%s", folder, name);
    return out;
}

static void write_header(FILE *file, int32_t magic, int32_t version, int32_t count) {
    int32_t header[256] = {magic, version, count};
    fwrite(header, sizeof header, 1, file);
}

static const char *write_items(const char *name, int32_t magic, int32_t version, const void *items, size_t size,
                               size_t n) {
    FILE *file = fopen(at(name), "wb");
    write_header(file, magic, version, (int32_t)n);
    fwrite(items, size, n, file);
    fclose(file);
    return at(name);
}

static const char *write_shard(const char *name, const uint16_t *tokens, size_t n) {
    return write_items(name, 20240520, 1, tokens, sizeof *tokens, n);
}

static const char *write_wide(const char *name, const uint32_t *tokens, size_t n) {
    return write_items(name, 20240801, 7, tokens, sizeof *tokens, n);
}

static const char *write_mask(const char *name, const uint8_t *mask, size_t n) {
    return write_items(name, 20240521, 1, mask, sizeof *mask, n);
}

static ShardsConfig config(size_t T, bool shuffle) {
    return (ShardsConfig){.T = T, .vocab = 50257, .end_of_text = 50256, .seed = 42, .shuffle = shuffle};
}

// Three shards of 1000, 0 and 777 tokens, where token i of the stream is a hash of i, and another that the glob must
// not match.
enum { N = 1777 };
static uint16_t stream[N];
static uint8_t stream_mask[N];

static void make_stream(void) {
    for (int i = 0; i < N; i++) {
        stream[i] = (uint16_t)(i * 2654435761u >> 16) % 50257;
        stream_mask[i] = (i * 40503u >> 7) & 1;
    }
    write_shard("s_train_000001.bin", stream, 1000);
    write_shard("s_train_000002.bin", stream, 0);
    write_shard("s_train_000003.bin", stream + 1000, 777);
    write_shard("s_val_000000.bin", stream + 5, 300);
}

static void refused(const char *globs, ShardsConfig c, const char *part) {
    check_case();
    memset(&error, 0, sizeof error);
    Shards *s = shards_open(globs, c, &error);
    CHECK(!s && error.code == EXIT_INPUT && strstr(error.text, part), "%s: expected \"%s\", found %d: %s", globs, part,
          error.code, error.text);
    shards_close(s);
}

static void test_windows(void) {
    check_group("windows across shards, in sequence and shuffled");
    for (int T = 1; T <= 889; T += T < 4 ? 1 : 59) {
        check_case();
        int32_t tokens[1000];
        for (int shuffle = 0; shuffle < 2; shuffle++) {
            Shards *s = shards_open(at("s_train_*.bin"), config((size_t)T, shuffle), &error);
            CHECK(s, "%s", error.text);
            if (!s) continue;
            uint64_t W = shards_windows(s);
            CHECK(W == (uint64_t)(N - 1) / T && shards_tokens(s) == N && shards_count(s) == 3 && !shards_masked(s),
                  "T %d: %d windows", T, (int)W);
            int wrong = 0;
            for (uint64_t g = 0; g < 3 * W; g++) {
                uint64_t w = shuffle ? shards_order(g % W, W, 42, g / W) : g % W;
                if (!shards_window(s, g, tokens, NULL, &error)) wrong++;
                for (int t = 0; t <= T; t++) wrong += tokens[t] != stream[w * T + t];
            }
            CHECK(wrong == 0, "T %d shuffle %d: %d tokens wrong", T, shuffle, wrong);
            shards_close(s);
        }
    }
}

static void test_names(void) {
    check_group("globs, lists and plain names");
    char globs[1024];
    write_shard("with space_train_000001.bin", stream, 100);
    snprintf(globs, sizeof globs, "%s, %s %s", at("s_train_000003.bin"), at("s_train_*"), at("s_train_000001.bin"));
    Shards *s = shards_open(globs, config(10, false), &error);
    CHECK(s && shards_tokens(s) == N && shards_count(s) == 3, "a file named three times counts once: %s", error.text);
    shards_close(s);
    s = shards_open(at("with space_train_000001.bin"), config(10, false), &error);
    CHECK(s && shards_tokens(s) == 100, "a name with a space: %s", error.text);
    shards_close(s);
}

// A dataset of 16-bit and 32-bit shards: windows across both, and an id that is negative as a signed number.
static void test_wide(void) {
    check_group("32-bit tokens");
    enum { WIDE = 150000, VOCAB = 128256 };    // more than two reads
    static uint32_t wide[WIDE];
    for (uint32_t i = 0; i < WIDE; i++) wide[i] = (i * 2654435761u >> 8) % VOCAB;
    write_wide("w_train_000001.bin", wide, WIDE);
    write_shard("w_train_000002.bin", stream, N);
    ShardsConfig c = config(999, false);
    c.vocab = VOCAB;
    int32_t tokens[1000];
    uint64_t wrong = 0;
    Shards *s = shards_open(at("w_train_*.bin"), c, &error);
    CHECK(s && shards_tokens(s) == WIDE + N && shards_check_all(s, &error), "%s", error.text);
    for (uint64_t g = 0; s && g < shards_windows(s); g++) {
        wrong += !shards_window(s, g, tokens, NULL, &error);
        for (uint64_t t = 0, i = g * 999; t < 1000; t++, i++)
            wrong += (uint32_t)tokens[t] != (i < WIDE ? wide[i] : stream[i - WIDE]);
    }
    CHECK(s && wrong == 0, "%d tokens wrong", (int)wrong);
    shards_close(s);
    wide[5] = UINT32_MAX;    // -1 as a signed number
    refused(write_wide("w_train_000001.bin", wide, 10), c, "too little data");
    c.T = 4;
    s = shards_open(at("w_train_000001.bin"), c, &error);
    CHECK(s && shards_window(s, 0, tokens, NULL, &error) && !shards_window(s, 1, tokens, NULL, &error) &&
              strstr(error.text, "at offset 1,044: found token id 4294967295"),
          "%s", error.text);
    shards_close(s);
}

// ---- the order

static void test_order(void) {
    check_group("the order is a permutation, made from seed and epoch");
    static bool seen[20000];
    const uint64_t sizes[] = {1, 2, 3, 4, 5, 7, 8, 9, 31, 64, 65, 1000, 4096, 4097, 19999};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++)
        for (uint64_t epoch = 0; epoch < 4; epoch++) {
            uint64_t W = sizes[k], bad = 0;
            memset(seen, 0, sizeof seen);
            for (uint64_t i = 0; i < W; i++) {
                uint64_t w = shards_order(i, W, 7, epoch);
                if (w >= W || seen[w]) bad++;
                else seen[w] = true;
            }
            CHECK(bad == 0, "W %llu epoch %llu: %llu wrong", (unsigned long long)W, (unsigned long long)epoch,
                  (unsigned long long)bad);
        }
    const uint64_t big = ((uint64_t)1 << 48) - 12345;
    uint64_t largest = 0;
    for (uint64_t i = 0; i < 1000; i++) {
        uint64_t w = shards_order(i, big, 7, 0);
        largest = w > largest ? w : largest;
    }
    CHECK(largest < big && largest > big / 100 * 98, "up to %llu of 2^48", (unsigned long long)largest);
    // A changed order would break the resumption of every run, so these values are fixed.
    const uint64_t kept[10] = {7, 2, 5, 8, 9, 6, 0, 1, 4, 3};
    for (uint64_t i = 0; i < 10; i++)
        CHECK(shards_order(i, 10, 42, 0) == kept[i], "position %d: %d", (int)i, (int)shards_order(i, 10, 42, 0));
}

// Chi-squared over all orders of 4 windows, and of (position, window) pairs of 11, in 24,000 epochs.
static void test_order_uniform(void) {
    check_group("every order is equally likely");
    enum { EPOCHS = 24000 };
    int orders[256] = {0}, pairs[11][11] = {{0}};
    for (uint64_t epoch = 0; epoch < EPOCHS; epoch++) {
        int code = 0;
        for (uint64_t i = 0; i < 4; i++) code = code * 4 + (int)shards_order(i, 4, 3, epoch);
        orders[code]++;
        for (uint64_t i = 0; i < 11; i++) pairs[i][shards_order(i, 11, 3, epoch)]++;
    }
    double chi = 0, chi_pairs = 0;
    int found = 0;
    for (int c = 0; c < 256; c++)
        if (orders[c]) {
            found++;
            chi += pow(orders[c] - EPOCHS / 24.0, 2) / (EPOCHS / 24.0);
        }
    for (int i = 0; i < 121; i++) chi_pairs += pow(pairs[i / 11][i % 11] - EPOCHS / 11.0, 2) / (EPOCHS / 11.0);
    CHECK(found == 24 && chi < 50, "%d of 24 orders, chi-squared %.1f with 23 degrees of freedom", found, chi);
    CHECK(chi_pairs < 155, "chi-squared %.1f with 100 degrees of freedom", chi_pairs);
    int64_t lengths[] = {64, 128, 256};
    int counts[3] = {0}, others = 0;
    for (uint64_t step = 0; step < 30000; step++) {
        size_t T = step_length(lengths, 3, 42, step);
        if (T == 64) counts[0]++;
        else if (T == 128) counts[1]++;
        else if (T == 256) counts[2]++;
        else others++;
    }
    CHECK(others == 0, "%d lengths that are not in the list", others);
    for (int i = 0; i < 3; i++)
        CHECK(abs(counts[i] - 10000) < 420, "length %d: %d of 30000", (int)lengths[i], counts[i]);
    CHECK(step_length(lengths, 1, 42, 5) == 64, "one length");
}

// ---- masks and documents

static void test_masks(void) {
    check_group("masks");
    write_mask("s_train_000001.mask", stream_mask, 1000);
    refused(at("s_train_*.bin"), config(100, false), "has none");
    write_mask("s_train_000002.mask", stream_mask, 0);
    write_mask("s_train_000003.mask", stream_mask + 1000, 777);
    Shards *s = shards_open(at("s_train_*"), config(300, false), &error);
    CHECK(s && shards_count(s) == 3 && shards_masked(s), "%s", error.text);
    int32_t tokens[301];
    uint8_t mask[300];
    int wrong = 0;
    for (uint64_t g = 0; s && g < shards_windows(s); g++) {
        if (!shards_window(s, g, tokens, mask, &error)) wrong++;
        for (uint64_t t = 0; t < 300; t++) wrong += mask[t] != stream_mask[g * 300 + t + 1];
    }
    CHECK(wrong == 0 && shards_check_all(s, &error), "%d weights wrong, %s", wrong, error.text);
    shards_close(s);
    uint8_t bad[777] = {0};
    bad[500] = 2;
    write_mask("s_train_000003.mask", bad, 777);
    s = shards_open(at("s_train_*"), config(300, false), &error);
    CHECK(s && !shards_check_all(s, &error) &&
              strstr(error.text, "s_train_000003.mask: at offset 1,524: expected 0 or 1, found 2"),
          "%s", error.text);
    shards_close(s);
    write_mask("s_train_000003.mask", bad, 776);
    refused(at("s_train_*"), config(300, false), "the mask has 776 tokens, but its shard has 777");
    refused(at("s_train_000003.mask"), config(300, false), "It is a mask");
    for (int i = 1; i <= 3; i++) {
        char name[64];
        snprintf(name, sizeof name, "s_train_00000%d.mask", i);
        unlink(at(name));
    }
}

// The end-of-text at index 6 ends the first document: it counts if the mask says so, unless it is cut off.
static void test_last_tokens(void) {
    const uint8_t bytes[] = {1, 1, 0, 0, 1, 0, 1, 0, 1}, want[2][4] = {{0, 1, 0, 1}, {0, 1, 0, 0}};
    ShardsConfig c = config(4, false);
    c.pack = PACK_EXAMPLE;
    write_mask("d_train_1.mask", bytes, 9);
    for (c.T = 4; c.T >= 3; c.T--) {
        int32_t tokens[5];
        uint8_t mask[4];
        Shards *s = shards_open(at("d_train_*.bin"), c, &error);
        CHECK(s && shards_windows(s) == 3 && shards_window(s, 0, tokens, mask, &error), "%s", error.text);
        CHECK(!memcmp(mask, want[4 - c.T], c.T), "mask of the first document at T = %zu", c.T);
        CHECK(c.T < 4 || tokens[4] == c.end_of_text, "the last token is %d", tokens[4]);
        shards_close(s);
    }
}

static void test_documents(void) {
    check_group("one document per row");
    enum { EOT = 50256 };
    // The third document is in both shards.
    uint16_t a[] = {7, 8, EOT, 1, 2, 3, EOT, EOT, 4}, b[] = {5, 6, 9, 10, EOT, 11};
    write_shard("d_train_1.bin", a, 9);
    write_shard("d_train_2.bin", b, 6);
    ShardsConfig c = config(4, false);
    c.pack = PACK_EXAMPLE;
    Shards *s = shards_open(at("d_train_*.bin"), c, &error);
    CHECK(s && shards_windows(s) == 3 && shards_masked(s), "%s", error.text);
    const int32_t want[3][5] = {{EOT, 1, 2, 3, EOT}, {EOT, 4, 5, 6, 9}, {EOT, 11, EOT, EOT, EOT}};
    const uint8_t counts[3][4] = {{1, 1, 1, 0}, {1, 1, 1, 1}, {1, 0, 0, 0}};
    for (uint64_t g = 0; s && g < 6; g++) {
        int32_t tokens[5];
        uint8_t mask[4];
        CHECK(shards_window(s, g, tokens, mask, &error), "%s", error.text);
        CHECK(!memcmp(tokens, want[g % 3], sizeof tokens) && !memcmp(mask, counts[g % 3], 4), "document %d", (int)g);
        CHECK(shards_window(s, g, tokens, NULL, &error) && !memcmp(tokens, want[g % 3], sizeof tokens),
              "without a mask");
    }
    shards_close(s);
    uint8_t ma[] = {1, 1, 0, 0, 1, 0, 0, 0, 1}, mb[] = {0, 1, 1, 1, 0, 1};
    write_mask("d_train_1.mask", ma, 9);
    write_mask("d_train_2.mask", mb, 6);
    const uint8_t masked[3][4] = {{0, 1, 0, 0}, {1, 0, 1, 1}, {1, 0, 0, 0}};
    s = shards_open(at("d_train_*.bin"), c, &error);
    for (uint64_t g = 0; s && g < 3; g++) {
        int32_t tokens[5];
        uint8_t mask[4];
        CHECK(shards_window(s, g, tokens, mask, &error) && !memcmp(mask, masked[g], 4), "mask of document %d", (int)g);
    }
    shards_close(s);
    test_last_tokens();
    uint16_t none[] = {1, 2, 3, 4, 5, 6, EOT};
    c.vocab = 50300;
    refused(write_shard("e.bin", none, 7), c, "too little data");
}

// ---- large files

// A sparse shard of 1.2e9 + 1 tokens: reads the window that starts at byte 2^31 of the file, the one across it, and the
// last one.
static void test_large(void) {
    check_group("a shard over 2 GiB");
    const uint64_t count = 1200000001, edge = (((uint64_t)1 << 31) - 1024) / 2;
    const char *path = at("large.bin");
    FILE *file = fopen(path, "wb");
    write_header(file, 20240520, 1, (int32_t)count);
    uint16_t marks[4] = {11, 22, 33, 44}, last = 55;
    fseeko(file, (off_t)(1024 + 2 * (edge - 2)), SEEK_SET);
    fwrite(marks, 2, 4, file);
    fseeko(file, (off_t)(1024 + 2 * (count - 1)), SEEK_SET);
    fwrite(&last, 2, 1, file);
    fclose(file);
    struct stat st;
    CHECK(stat(path, &st) == 0 && st.st_size > (off_t)1 << 31, "size");
    int32_t tokens[17];
    Shards *s = shards_open(path, config(16, false), &error);
    CHECK(s && shards_windows(s) == (count - 1) / 16, "%s", error.text);
    uint64_t w = (edge - 2) / 16, t = (edge - 2) % 16;
    CHECK(s && shards_window(s, w, tokens, NULL, &error) && tokens[t] == 11 && tokens[t + 1 > 16 ? 16 : t + 1] == 22,
          "below 2^31");
    w = edge / 16;
    t = edge % 16;
    CHECK(s && shards_window(s, w, tokens, NULL, &error) && tokens[t] == 33 && tokens[t + 1] == 44, "at 2^31: %d %d",
          tokens[t], tokens[t + 1]);
    w = (count - 1) / 16 - 1;
    CHECK(s && shards_window(s, w, tokens, NULL, &error) && tokens[(count - 1 - w * 16)] == 55, "the end");
    shards_close(s);
    unlink(path);
}

// ---- what is wrong

static const char *write_raw(const char *name, int32_t magic, int32_t version, int32_t count, long bytes) {
    FILE *file = fopen(at(name), "wb");
    write_header(file, magic, version, count);
    fclose(file);
    if (truncate(at(name), bytes) != 0) abort();
    return at(name);
}

static void test_refusals(void) {
    check_group("wrong files");
    ShardsConfig c = config(16, true);
    refused(at("nothing_*.bin"), c, "no file matches");
    refused(at("nothing.bin"), c, "no file matches");
    refused("", c, "expected the path or pattern of a shard");
    refused(folder, c, "expected a regular file, found a folder");
    refused(write_raw("r1.bin", 20240520, 1, 500, 500), c,
            "r1.bin: expected a header of 1,024 bytes, but the whole file has only 500");
    refused(write_raw("r2.bin", 0x1234, 1, 500, 2024), c,
            "r2.bin: at offset 0: expected magic number 20240520 or 20240801 of a shard, found 4660");
    refused(write_raw("r3.bin", 20240801, 1, 500, 3024), c, "r3.bin: at offset 4: expected version 7, found 1");
    refused(write_raw("r3.bin", 20240520, 7, 500, 2024), c, "r3.bin: at offset 4: expected version 1, found 7");
    refused(write_raw("r3.bin", 20240801, 7, 500, 2024), c,
            "r3.bin: the header promises 500 tokens (3,024 bytes), but the file has 2,024 bytes");
    refused(write_raw("r4.bin", 20240520, 2, 500, 2024), c, "r4.bin: at offset 4: expected version 1, found 2");
    refused(write_raw("r5.bin", 20240520, 1, -500, 2024), c, "r5.bin: at offset 8: the header's token count is -500");
    refused(
        write_raw("r6.bin", 20240520, 1, 100000000, 150000000), c,
        "r6.bin: the header promises 100,000,000 tokens (200,001,024 bytes), but the file has 150,000,000 bytes.\n  It was probably truncated");
    refused(write_raw("r7.bin", 20240520, 1, 500, 2025), c, "It contains extra data");
    refused(write_raw("r8.bin", 20240520, 1, 16, 1056), c,
            "too little data: 1 file, 16 tokens, 0 windows of 16 + 1 tokens; at least 1 is needed");
    refused(write_raw("r9.bin", 20240520, 1, 0, 1024), c, "too little data");
    c.min_windows = 8;
    refused(write_raw("r10.bin", 20240520, 1, 128, 1280), c, "7 windows of 16 + 1 tokens; at least 8 are needed");
    refused(write_raw("r11.bin", 20240520, 1, 17, 1058), c, "17 tokens, 1 window of 16 + 1 tokens; at least 8 are");
    refused(at("r2.bin"), c, "\n  It is not a shard");
    unlink(at("r6.bin"));
}

static void test_bad_ids(void) {
    check_group("ids at or above the vocabulary");
    static uint16_t tokens[200000];
    tokens[150000] = 50257;
    const char *path = write_shard("ids.bin", tokens, 200000);
    Shards *s = shards_open(path, config(1000, false), &error);
    int32_t window[1001];
    CHECK(s && shards_window(s, 0, window, NULL, &error), "%s", error.text);
    CHECK(s && !shards_window(s, 150, window, NULL, &error) && error.code == EXIT_INPUT &&
              strstr(error.text,
                     "ids.bin: at offset 301,024: found token id 50257, expected ids below the vocabulary size, 50257"),
          "%s", error.text);
    memset(&error, 0, sizeof error);
    CHECK(!shards_check_all(s, &error) && strstr(error.text, "at offset 301,024"), "%s", error.text);
    shards_close(s);
    ShardsConfig c = config(1000, false);
    c.vocab = 65536;
    s = shards_open(path, c, &error);
    CHECK(s && shards_check_all(s, &error), "a larger vocabulary: %s", error.text);
    shards_close(s);
}

static void test_cut_in_use(void) {
    check_group("a file that changes while in use");
    const char *path = write_shard("cut.bin", stream, N);
    Shards *s = shards_open(path, config(100, false), &error);
    int32_t window[101];
    CHECK(s && shards_window(s, 16, window, NULL, &error), "%s", error.text);
    CHECK(truncate(path, 1024 + 2 * 1650) == 0, "truncate");
    CHECK(shards_window(s, 15, window, NULL, &error), "%s", error.text);
    CHECK(
        !shards_window(s, 16, window, NULL, &error) && error.code == EXIT_INPUT &&
            strstr(error.text, "cut.bin: the file now ends at offset 4,324, but had 102 more bytes when it was opened"),
        "%s", error.text);
    shards_close(s);
    s = shards_open(write_shard("cut.bin", stream, N), config(100, false), &error);
    unlink(path);
    CHECK(s && !shards_window(s, 1, window, NULL, &error) && strstr(error.text, "opening it failed"), "%s", error.text);
    write_shard("cut.bin", stream, N - 1);
    CHECK(s && !shards_window(s, 1, window, NULL, &error) &&
              strstr(error.text, "had 4,578 bytes when it was first opened, but now has 4,576"),
          "%s", error.text);
    shards_close(s);
}

static char *fingerprint(const char *globs) {
    Shards *s = shards_open(globs, config(100, false), &error);
    char *text = s ? shards_fingerprint(s, &error) : NULL;
    CHECK(text, "%s", error.text);
    shards_close(s);
    return text;
}

static void test_fingerprint(void) {
    check_group("the data's fingerprint");
    char other[300];
    snprintf(other, sizeof other, "%s/other", folder);
    mkdir(other, 0777);
    char *a = fingerprint(write_shard("f_train_1.bin", stream, N)),
         *b = fingerprint(write_shard("other/f_train_1.bin", stream, N));
    CHECK(!strcmp(a, b) && strstr(a, "{\"files\": 1, \"tokens\": 1777, \"xxh3\": \""), "in another folder: %s %s", a,
          b);
    stream[3]++;
    char *c = fingerprint(write_shard("other/f_train_1.bin", stream, N));
    stream[3]--;
    char *d = fingerprint(write_shard("other/f_train_1.bin", stream, N - 1)),
         *e = fingerprint(write_shard("f_train_2.bin", stream, N));
    CHECK(strcmp(a, c) && strcmp(a, d) && strcmp(a, e), "a token, the size or the name changed");
    free(a);
    free(b);
    free(c);
    free(d);
    free(e);
}

// Each sequence of a batch has its own documents: from its start, and from each end-of-text token on.
static void test_document_starts(void) {
    check_group("where documents start");
    enum { B = 3, T = 6, END = 9 };
    const int32_t tokens[B * T] = {1, 2, END, 3, END, 4, END, 1, 2, 3, 4, END, 5, END, END, 6, 7, 8};
    const int32_t want[B * T] = {0, 0, 2, 2, 4, 4, 0, 0, 0, 0, 0, 5, 0, 1, 2, 2, 2, 2};
    int32_t first[B * T];
    document_starts(first, tokens, B, T, END);
    for (int b = 0; b < B; b++) CHECK(!memcmp(first + b * T, want + b * T, T * sizeof *first), "sequence %d", b);
}

int main(void) {
    program_name = "test_shards";
    if (!mkdtemp(folder)) return 1;
    make_stream();
    test_windows();
    test_names();
    test_wide();
    test_order();
    test_order_uniform();
    test_masks();
    test_documents();
    test_document_starts();
    test_large();
    test_refusals();
    test_bad_ids();
    test_cut_in_use();
    test_fingerprint();
    char command[300];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    if (system(command) != 0) return 1;
    return check_verdict();
}
