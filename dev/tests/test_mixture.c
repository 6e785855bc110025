// mixture: exact proportions after any number of sequences, each source in its own order, weights and what is wrong.
#include <sys/resource.h>

#include "data/mixture.h"
#include "dev/tests/check.h"

enum { T = 4, N = 401 };    // each source has (N - 1) / T = 100 windows

static char folder[] = "/tmp/test_mixture.XXXXXX";
static Error error;

// Fills in the folder for each % in a text such as "%/a*.bin:0.7,%/b*.bin:0.3".
static const char *in_folder(const char *text) {
    static char out[8192];
    size_t n = 0;
    for (const char *p = text; *p; p++)
        n += (size_t)snprintf(out + n, sizeof out - n, *p == '%' ? "%s" : "%.1s", *p == '%' ? folder : p);
    return out;
}

// A shard in which all tokens are 1000 * source plus a number that tells windows apart.
static void write_source(const char *name, int source) {
    int32_t header[256] = {20240520, 1, N};
    uint16_t tokens[N];
    char path[300];
    for (int i = 0; i < N; i++) tokens[i] = (uint16_t)(1000 * source + i);
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    fwrite(header, sizeof header, 1, file);
    fwrite(tokens, sizeof tokens, 1, file);
    fclose(file);
}

static ShardsConfig config(bool shuffle) {
    return (ShardsConfig){
        .T = T, .vocab = 50257, .end_of_text = 50256, .seed = 42, .shuffle = shuffle, .min_windows = 1};
}

// ---- proportions

// Whatever n is, each source has had its share of the first n sequences, rounded up or down, and its own sequences come
// in order.
static void check_shares(const Mixture *m, const char *name) {
    uint64_t taken[MAX_SOURCES] = {0}, wrong = 0, out_of_order = 0, rounds = m->period < 1000 ? 3 : 2;
    for (uint64_t n = 1; n <= rounds * m->period; n++) {
        uint64_t own = n - 1;
        size_t source = (size_t)(mixture_find(m, &own) - m->sources);
        out_of_order += own != taken[source]++;
        for (size_t i = 0; i < m->count; i++) {
            int64_t difference = (int64_t)(taken[i] * m->period) - (int64_t)(n * m->sources[i].weight);
            wrong += llabs(difference) >= (int64_t)m->period;
        }
    }
    CHECK(wrong == 0 && out_of_order == 0, "%s: %d shares wrong, %d out of order", name, (int)wrong, (int)out_of_order);
    for (size_t i = 0; i < m->count; i++)
        CHECK(taken[i] == rounds * m->sources[i].weight, "%s: source %d has %d", name, (int)i, (int)taken[i]);
}

static void test_shares(void) {
    check_group("each source has its share of any number of sequences");
    static const char *const TEXTS[] = {
        "%/a.bin:0.98,%/b.bin:0.01,%/c.bin:0.01",
        "%/a.bin:0.333,%/b.bin:0.333,%/c.bin:0.334",
        "%/a.bin:0.01,%/b.bin:0.33,%/c.bin:0.33,%/d.bin:0.33",
        "%/a.bin:999,%/b.bin:1",
        "%/a.bin:0.123456,%/b.bin:0.876544",
        "%/a.bin:7,%/b.bin:7,%/c.bin:7,%/d.bin:2,%/a.bin:2,%/b.bin:2,%/c.bin:1,%/d.bin:1"};
    for (size_t i = 0; i < sizeof TEXTS / sizeof *TEXTS; i++) {
        check_case();
        Mixture *m = mixture_open(in_folder(TEXTS[i]), config(true), &error);
        CHECK(m && m->weighted, "%s: %s", TEXTS[i], error.text);
        if (m) check_shares(m, TEXTS[i]);
        mixture_close(m);
    }
}

// All mixtures of up to four sources with weights up to 7.
static void test_all_small_weights(void) {
    check_group("all small weights");
    static const char names[] = "abcd";
    for (int code = 0; code < 8 * 8 * 8 * 7; code++) {
        int weights[4] = {code % 7 + 1, code / 7 % 8, code / 56 % 8, code / 448 % 8};
        char text[256];
        size_t n = 0;
        for (int i = 0; i < 4; i++)
            if (weights[i]) n += (size_t)snprintf(text + n, sizeof text - n, "%%/%c.bin:%d ", names[i], weights[i]);
        check_case();
        Mixture *m = mixture_open(in_folder(text), config(false), &error);
        CHECK(m, "%s", error.text);
        if (m) check_shares(m, text);
        mixture_close(m);
    }
}

static void test_weights(void) {
    check_group("only the ratios of weights count");
    static const struct {
        const char *text;
        uint64_t first, second;
    } CASES[] = {{"%/a.bin:0.7,%/b.bin:0.3", 7, 3}, {"%/a.bin:70,%/b.bin:30", 7, 3},
                 {"%/a.bin:.5 , %/b.bin:1.", 1, 2}, {"%/a.bin:0.50 %/b.bin:0.125", 4, 1},
                 {"%/a.bin:2,%/b.bin:3", 2, 3},     {"%/a.bin:999999,%/b.bin:1", 999999, 1}};
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
        check_case();
        Mixture *m = mixture_open(in_folder(CASES[i].text), config(true), &error);
        CHECK(m && m->count == 2 && m->sources[0].weight == CASES[i].first && m->sources[1].weight == CASES[i].second,
              "%s: %s", CASES[i].text, error.text);
        mixture_close(m);
    }
    // A changed order would break the resumption of every run with a mixture, so this one is fixed.
    Mixture *m = mixture_open(in_folder("%/a.bin:5,%/b.bin:3,%/c.bin:2"), config(true), &error);
    const size_t want[10] = {0, 1, 0, 2, 0, 1, 0, 1, 0, 2};
    for (uint64_t g = 0; m && g < 20; g++) {
        uint64_t own = g;
        size_t source = (size_t)(mixture_find(m, &own) - m->sources);
        CHECK(source == want[g % 10], "sequence %d: source %d", (int)g, (int)source);
    }
    mixture_close(m);
}

// ---- sequences

// A source's sequences are those that it has alone, in all epochs.
static void test_sequences(void) {
    check_group("a source's sequences come in its own order");
    for (int shuffle = 0; shuffle < 2; shuffle++) {
        Mixture *m = mixture_open(in_folder("%/a.bin:0.7,%/b.bin:0.3"), config(shuffle), &error);
        Shards *alone[2] = {shards_open(in_folder("%/a.bin"), config(shuffle), &error),
                            shards_open(in_folder("%/b.bin"), config(shuffle), &error)};
        uint64_t next[2] = {0}, wrong = 0;
        for (uint64_t g = 0; g < 1000; g++) {
            int32_t found[T + 1], want[T + 1];
            uint64_t own = g;
            const Source *source = mixture_find(m, &own);
            int which = source == &m->sources[1];
            wrong += !shards_window(source->shards, own, found, NULL, &error);
            wrong += !shards_window(alone[which], next[which]++, want, NULL, &error);
            wrong += memcmp(found, want, sizeof want) != 0 || found[0] / 1000 != which;
        }
        CHECK(wrong == 0 && next[0] == 700 && next[1] == 300, "%d wrong", (int)wrong);
        mixture_close(m);
        for (int i = 0; i < 2; i++) shards_close(alone[i]);
    }
}

static void test_many_files(void) {
    check_group("64 sources of 64 shards: more than may be open");
    char name[32], text[4096] = "";
    size_t at = 0;
    for (int i = 0; i < 64; i++) {
        snprintf(name, sizeof name, "many%02d.bin", i);
        write_source(name, i % 49);
        at += (size_t)snprintf(text + at, sizeof text - at, "%s%%/many*.bin:1", i ? "," : "");
    }
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    setrlimit(RLIMIT_NOFILE, &(struct rlimit){300, limit.rlim_max});
    ShardsConfig long_windows = config(false);
    long_windows.T = N - 1;
    Mixture *m = mixture_open(in_folder(text), long_windows, &error);
    int32_t tokens[N];
    bool read = m;
    int wrong = 0;
    for (uint64_t g = 0; read && g < 64 * 64; g++) {
        uint64_t own = g;
        const Source *source = mixture_find(m, &own);
        read = shards_window(source->shards, own, tokens, NULL, &error);
        for (uint64_t t = 0, at = own * (N - 1); t < N; t++, at++)
            wrong += (uint64_t)tokens[t] != 1000 * (at / N % 49) + at % N;
    }
    CHECK(read && wrong == 0 && mixture_check_all(m, &error), "%d tokens wrong, %s", wrong, error.text);
    mixture_close(m);
    setrlimit(RLIMIT_NOFILE, &limit);
}

static void test_without_weights(void) {
    check_group("without weights, all matching shards form a single stream");
    char path[300];
    static const char *const TEXTS[] = {"%/a.bin %/b.bin", "%/[ab].bin", "%/a.bin", "%/odd:1.bin",
                                        "%/odd:1.bin,%/end:2"};
    write_source("odd:1.bin", 4);
    write_source("end:2", 5);    // the name of a file, not a weight
    for (size_t i = 0; i < sizeof TEXTS / sizeof *TEXTS; i++) {
        check_case();
        const char *text = in_folder(TEXTS[i]);
        Mixture *m = mixture_open(text, config(true), &error);
        Shards *s = shards_open(text, config(true), &error);
        char *print = s ? shards_fingerprint(s, &error) : NULL, *mixed = m ? mixture_fingerprint(m, &error) : NULL;
        CHECK(m && !m->weighted && m->count == 1 && !mixture_has_weights(text), "%s: %s", text, error.text);
        CHECK(print && mixed && !strcmp(print, mixed), "%s: fingerprints %s and %s", text, print, mixed);
        for (uint64_t g = 0; m && g < 300; g++) {
            uint64_t own = g;
            CHECK(mixture_find(m, &own) == m->sources && own == g, "sequence %d is %d", (int)g, (int)own);
        }
        free(print);
        free(mixed);
        mixture_close(m);
        shards_close(s);
    }
    CHECK(mixture_first_path(in_folder("%/b.bin:1,%/a.bin:1"), path, sizeof path) && strstr(path, "/b.bin"), "%s",
          path);
    CHECK(!mixture_first_path(in_folder("%/z.bin:1,%/a.bin:1"), path, sizeof path), "%s", path);
}

static void test_fingerprint(void) {
    check_group("the fingerprint has each source and its weight");
    char *prints[3];
    static const char *const TEXTS[] = {"%/a.bin:1,%/b.bin:2", "%/a.bin:2,%/b.bin:4", "%/a.bin:2,%/b.bin:1"};
    for (int i = 0; i < 3; i++) {
        Mixture *m = mixture_open(in_folder(TEXTS[i]), config(true), &error);
        prints[i] = mixture_fingerprint(m, &error);
        mixture_close(m);
    }
    CHECK(!strcmp(prints[0], prints[1]) && strcmp(prints[0], prints[2]), "%s %s %s", prints[0], prints[1], prints[2]);
    CHECK(strstr(prints[0], "{\"sources\":[{\"files\":1,\"tokens\":401,\"xxh3\":\"") &&
              strstr(prints[0], "\"weight\":2}]}"),
          "%s", prints[0]);
    for (int i = 0; i < 3; i++) free(prints[i]);
}

// ---- what is wrong

static void refused(const char *text, ExitCode code, const char *part) {
    check_case();
    memset(&error, 0, sizeof error);
    Mixture *m = mixture_open(in_folder(text), config(true), &error);
    CHECK(!m && error.code == code && strstr(error.text, part), "%s: expected %d and \"%s\", found %d: %s", text, code,
          part, error.code, error.text);
    mixture_close(m);
}

static void test_refusals(void) {
    check_group("wrong weights");
    static const char *const BAD[] = {"0",         "0.0",     "-1", "+1", "1e3", "1.2.3",
                                      "0.0000001", "1234567", ".",  "1x", "0.7%"};
    for (size_t i = 0; i < sizeof BAD / sizeof *BAD; i++) {
        char text[64], part[64];
        snprintf(text, sizeof text, "%%/a.bin:%s,%%/b.bin:1", BAD[i]);
        snprintf(part, sizeof part, "%.3s", BAD[i]);
        refused(text, EXIT_USAGE, part);
        CHECK(strstr(error.text, "expected a weight above 0 with at most 6 digits before and after the point"), "%s",
              error.text);
    }
    refused("%/a.bin:0.7,%/b.bin", EXIT_USAGE, "b.bin\" has no weight.\n  Give all sources a weight");
    refused("%/a.bin,%/b.bin:0.3", EXIT_USAGE, "a.bin\" has no weight");
    refused("%/a b.bin:0.7,%/b.bin:0.3", EXIT_USAGE, "a\" has no weight");
    refused("%/a b.bin:0.7,%/b.bin:0.3", EXIT_USAGE, "or none. A space separates sources; write ? for one in a name.");
    refused("%/a.bin:0.7,:0.3", EXIT_USAGE, "\":0.3\": expected the path or pattern of a shard before the weight");
    refused("%/a.bin:half,%/b.bin:0.3", EXIT_USAGE,
            "a.bin:half\": expected a weight after the colon, such as 0.7, found \"half\".\n  If the colon is part of");
    refused("%/a.bin:,%/b.bin:0.3", EXIT_USAGE,
            "a.bin:\": expected a weight after the colon, such as 0.7, found \"\".");
    static const char *const EMPTY[] = {"%/a.bin:0.7,", "%/a.bin:0.7, ", ",%/a.bin:0.7", "%/a.bin:0.7, ,%/b.bin:0.3",
                                        "%/a.bin:0.7,,%/b.bin:0.3"};
    for (size_t i = 0; i < sizeof EMPTY / sizeof *EMPTY; i++) {
        refused(EMPTY[i], EXIT_USAGE, "expected a source on both sides of each comma, found nothing");
    }
    refused("%/a.bin:0.700001,%/b.bin:0.300001", EXIT_USAGE,
            "the order of the sources repeats only after 1,000,002 sequences");
    refused("%/z.bin:0.7,%/b.bin:0.3", EXIT_INPUT, "z.bin: no file matches");
    char many[2048] = "";
    for (int i = 0; i <= MAX_SOURCES; i++) strcat(many, "%/a.bin:1 ");
    refused(many, EXIT_USAGE, "at most 64 sources");
}

// Each source needs its share of a step.
static void test_too_little(void) {
    ShardsConfig c = config(true);
    c.min_windows = 200;    // 100 of each
    Mixture *m = mixture_open(in_folder("%/a.bin:1,%/b.bin:1"), c, &error);
    CHECK(m, "%s", error.text);
    mixture_close(m);
    m = mixture_open(in_folder("%/a.bin:49,%/b.bin:51"), c, &error);
    CHECK(!m && strstr(error.text, "b.bin: too little data") && strstr(error.text, "at least 102 are needed"), "%s",
          error.text);
}

static void test_bad_ids(void) {
    check_group("ids above the vocabulary in a later source");
    write_source("bad.bin", 60);
    Mixture *m = mixture_open(in_folder("%/a.bin:1,%/bad.bin:1"), config(true), &error);
    CHECK(m && !mixture_check_all(m, &error) && strstr(error.text, "bad.bin: at offset 1,024: found token id 60000"),
          "%s", error.text);
    mixture_close(m);
}

int main(void) {
    program_name = "test_mixture";
    if (!mkdtemp(folder)) return 1;
    for (int i = 0; i < 4; i++) write_source((const char *[]){"a.bin", "b.bin", "c.bin", "d.bin"}[i], i);
    test_shares();
    test_all_small_weights();
    test_weights();
    test_sequences();
    test_many_files();
    test_without_weights();
    test_fingerprint();
    test_refusals();
    test_too_little();
    test_bad_ids();
    char command[300];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    if (system(command) != 0) return 1;
    return check_verdict();
}
