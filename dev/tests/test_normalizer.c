// The parser of --attn: overrides, what it rejects, shortest names, learned scalars, and random texts. What each preset
// computes is checked against the reference (test_gpt2.c).
#include "attention/list.h"

#include <limits.h>
#include <math.h>

#include "dev/reference/hash.h"
#include "dev/tests/check.h"
#include "runtime/error.h"

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

static char message[1024];

static Normalizer parse(const char *text) {
    Normalizer normalizer;
    strcpy(message, "");
    if (normalizer_parse(&normalizer, text, message, sizeof message)) return normalizer;
    printf("'%s' is refused: %s\n", text, message);
    exit(1);
}

static const char *stage(const Normalizer *normalizer, size_t i) {
    static char out[STAGE_COUNT][64];
    return normalizer_stage_text(normalizer, i, out[i], sizeof out[i]);
}

// Equal in everything except the text.
static bool same(const Normalizer *a, const Normalizer *b) {
    const Stage *x = &a->qk, *y = &b->qk;
    for (size_t i = 0; i < STAGE_COUNT; i++)
        if (x[i].kind != y[i].kind || x[i].value != y[i].value) return false;
    return a->cap == b->cap && a->fixed == b->fixed &&
           (isnan(a->s_start) ? isnan(b->s_start) : a->s_start == b->s_start);
}

static const char *const STAGE_NAMES[STAGE_COUNT] = {"qk", "scale", "offset", "phi", "norm", "post"};

#define NAME(name, ...) #name,
static const char *const NAMES[] = {NORMALIZERS(NAME)};
#undef NAME

// ---- overrides

static void test_overrides(void) {
    check_group("overrides of s");
    Normalizer s = parse("ssmax+s=0.5+s=2"), fixed = parse("ssmax+fixed"),
               both = parse("ssmax-pn+fixed+s=-1e-3+norm=l1+2");
    CHECK(s.s_start == 2 && !s.fixed, "s=0.5+s=2 starts at %g", s.s_start);
    CHECK(fixed.fixed && isnan(fixed.s_start), "fixed %d at %g", fixed.fixed, fixed.s_start);
    CHECK(both.fixed && both.s_start == -1e-3 && both.norm.value == 2, "fixed %d at %g, C %g", both.fixed, both.s_start,
          both.norm.value);
    Normalizer freed = parse("ssmax-fixed+s=3");
    CHECK(freed.fixed && freed.s_start == 3, "ssmax-fixed+s=3: fixed %d at %g", freed.fixed, freed.s_start);
}

// ---- what is rejected, and what the message must contain

// clang-format off
typedef struct { const char *text, *says; } Refused;
static const Refused REFUSED[] = {
    {"", "unknown normalizer"}, {"softmx", "Did you mean softmax?"}, {"ssmx", "Did you mean ssmax?"},
    {"lssarr", "Did you mean lssar?"}, {"SOFTMAX", "unknown normalizer"}, {" softmax", "Did you mean softmax?"},
    {"softmax ", "Did you mean softmax?"}, {"relu2_L", "Did you mean relu2-L?"}, {"s=1", "unknown normalizer"},
    {"softmax+", "unknown override ''"}, {"softmax+l1", "unknown override 'l1'"},
    {"softmax+nrm=l1", "unknown override 'nrm=l1'"}, {"softmax+norm", "unknown override 'norm'"},
    {"softmax+norm:l1", "unknown override 'norm:l1'"}, {"ssmax+fixedly", "unknown override 'fixedly'"},
    {"softmax+window=3", "belongs to a layer"}, {"softmax+wndow=3", "window="}, {"softmax++norm=l1", "unknown override"}, {"+norm=l1", "unknown normalizer"},
    {"softmax+norm=l2", "norm: 'l2'"}, {"softmax+norm=l2", "n, n2, L, T, T2, const:X, sqrt-half-n, none"},
    {"softmax+norm=", "norm: ''"}, {"softmax+norm=l1+", "'l1+'"}, {"softmax+norm=l1+-1", "'l1+-1'"},
    {"softmax+norm=l1+0x1", "'l1+0x1'"}, {"softmax+norm=l1+nan", "'l1+nan'"}, {"softmax+norm=l1+1+2", "'l1+1+2'"},
    {"softmax+norm=L1", "'L1'"}, {"softmax+norm=const", "'const'"}, {"softmax+norm=const:0", "above 0"},
    {"softmax+norm=n3", "'n3'"}, {"softmax+post=reweight", "reweight:P"}, {"softmax+post=reweight:0", "power"},
    {"softmax+post=reweight:1,5", "'reweight:1,5'"}, {"softmax+post=reweight:1e", "'reweight:1e'"},
    {"softmax+post=reweight+3", "'reweight+3'"}, {"softmax+post=recentre", "recenter-l1"},
    {"softmax+scale=log", "log:BASE"}, {"softmax+scale=log:1", "ln 1"}, {"softmax+scale=log:-2", "base"},
    {"softmax+scale=log:l", "'log:l'"}, {"softmax+scale=const:inf", "'const:inf'"},
    {"softmax+scale=floorlog:0", "F of scale=floorlog"}, {"softmax+scale=floorlog", "floorlog:F"},
    {"softmax+norm=l1+sinks", "'l1+sinks'"}, {"softmax+norm=sink", "l1+sink"},
    {"softmax-sink+phi=expm1", "needs phi=exp"}, {"relu-l1+norm=l1+sink", "needs phi=exp"},
    {"softmax-sink+s=1", "no s"}, {"softmax+scale=const:1e999", "'const:1e999'"}, {"softmax+scale=const", "const:X"},
    {"softmax+scale=rsqrt-d:1", "'rsqrt-d:1'"}, {"softmax+scale=ln", "logn-bias"}, {"softmax+offset=logn", "-logn"},
    {"softmax+phi=relu7", "relu6"}, {"softmax+qk=l1", "none, l2"}, {"softmax+s=1", "no s"}, {"softmax+fixed", "no s"},
    {"lssa+s=1+fixed", "scale=logn"}, {"ssmax+scale=rsqrt-d+s=2", "no s"}, {"ssmax+s=", "s= is not"},
    {"ssmax+s=nan", "s=nan"}, {"ssmax+s=1e999", "s=1e999"},
};
// clang-format on

// The message about a rejected text does not fit the small buffer; it is truncated and terminated.
static void test_small_message(const char *text) {
    struct {
        char message[16], after[16];
    } small;
    memset(&small, '#', sizeof small);
    Normalizer n;
    CHECK(!normalizer_parse(&n, text, small.message, sizeof small.message), "'%s' is taken", text);
    small.after[sizeof small.after - 1] = 0;
    CHECK(memchr(small.message, 0, sizeof small.message) && strspn(small.after, "#") == sizeof small.after - 1,
          "'%s': the message exceeds its buffer", text);
}

static void test_refused(void) {
    Normalizer n;
    check_group("what is rejected, and the messages");
    for (size_t i = 0; i < COUNT(REFUSED); i++) {
        check_case();
        memset(message, 0, sizeof message);
        bool taken = normalizer_parse(&n, REFUSED[i].text, message, sizeof message);
        CHECK(!taken, "'%s' is taken", REFUSED[i].text);
        CHECK(taken || strstr(message, REFUSED[i].says), "'%s': '%s' does not contain '%s'", REFUSED[i].text, message,
              REFUSED[i].says);
        test_small_message(REFUSED[i].text);
    }

    char longest[NORMALIZER_TEXT + 200];
    for (size_t length = NORMALIZER_TEXT - 1; length < sizeof longest; length++) {
        memset(longest, '0', length);
        memcpy(longest, "softmax+norm=l1+1.", 18);
        longest[length] = 0;
        bool taken = normalizer_parse(&n, longest, message, sizeof message), fits = length < NORMALIZER_TEXT;
        CHECK(taken == fits, "%zu characters are %s", length, taken ? "taken" : message);
        CHECK(fits ? n.norm.value == 1 : strstr(message, "longer than 159") != NULL, "%zu characters: C = %g, '%s'",
              length, n.norm.value, message);
    }
    n = parse("softmax+scale=log:L");
    CHECK(!normalizer_fits(&n, 1, message, sizeof message) && strstr(message, "ln L"), "log:L fits L = 1");
    CHECK(normalizer_fits(&n, 2, message, sizeof message), "log:L does not fit L = 2");
    n = parse("softmax+scale=log:2");
    CHECK(normalizer_fits(&n, 1, message, sizeof message), "log:2 does not fit L = 1");
}

// ---- stage texts, shortest names

static void test_numbers(void) {
    enum { NORM_STAGE = 4 };
    // clang-format off
    static const struct { const char *given, *text; } NUMBERS[] = {
        {"3.0", "3"}, {"0.10", "0.1"}, {"+2", "2"}, {"1e2", "100"}, {"100", "100"}, {"20", "20"}, {"1024", "1024"}, {"500000", "500000"},
        {"1.50e0", "1.5"},
        {"0.1", "0.1"}, {"3.3333333333333335", "3.3333333333333335"}, {".5", "0.5"}, {"5.", "5"},
        {"0.30000000000000004", "0.30000000000000004"},
        {"1e-7", "1e-07"}, {"12345678", "12345678"},
    };
    // clang-format on
    check_group("a number is written with the fewest digits that restore it");
    for (size_t i = 0; i < COUNT(NUMBERS); i++) {
        check_case();
        char text[128], expected[64];
        snprintf(text, sizeof text, "softmax+norm=const:%s", NUMBERS[i].given);
        snprintf(expected, sizeof expected, "const:%s", NUMBERS[i].text);
        Normalizer n = parse(text);
        CHECK(!strcmp(stage(&n, NORM_STAGE), expected), "%s is written as %s", NUMBERS[i].given, stage(&n, NORM_STAGE));
        CHECK(n.norm.value == strtod(NUMBERS[i].given, NULL), "%s is read as %g", NUMBERS[i].given, n.norm.value);
    }
}

static void test_shortest(void) {
    // clang-format off
    static const struct { const char *given, *shortest; } SHORTEST[] = {
        {"softmax+norm=l1+1", "softmax1"}, {"softmax+qk=l2+scale=logd-logn+phi=softplus", "lssa"}, {"relu2-n+norm=l1", "relu2-l1"},
        {"softmax+qk=l2+scale=logd-logn+phi=softplus+post=reweight:15", "lssar"}, {"ssmax+s=1+fixed", "ssmax-fixed"}, {"ssmax", "ssmax"},
        {"softmax+scale=logn-bias", "ssmax-bias"}, {"softmax+scale=log:512.0", "softmax-log512"},
        {"sigmoid-l1+offset=-logn", "sigmoid-logn-l1"},
        {"relu2-l1+norm=const:512", "relu2-512"}, {"softmax1+norm=l1+1e0", "softmax1"}, {"ssmax-fixed+s=2", "ssmax-fixed+s=2"},
        {"softmax+scale=logn+s=2+fixed", "ssmax+s=2+fixed"},
        {"lssar+post=none", "lssa"}, {"lssar+post=reweight:100.0", "lssa+post=reweight:100"}, {"softmax+norm=l1+0", "softmax"},
        {"ssmax+fixed", "ssmax+fixed"},
        {"softmax+scale=pn+s=0.5", "ssmax-pn+s=0.5"}, {"softmax+phi=relu+norm=L", "relu-L"}, {"relu-L+norm=sqrt-half-n", "relu-sqrt"},
        {"softmax+norm=l1+sink", "softmax-sink"}, {"softmax-floorlog+scale=rsqrt-d", "softmax"},
        {"softmax+scale=floorlog:8192", "softmax-floorlog"},
        {"softmax+phi=expm1+post=rectify", "softpick"}, {"softmax1+norm=l1", "softmax"},
        // Given twice, the last one counts.
        {"softmax+post=negate+post=recenter", "softmax-recentered"}, {"lssar+post=reweight:3+post=none", "lssa"},
    };
    // clang-format on
    check_group("the shortest equivalent name");
    for (size_t i = 0; i < COUNT(SHORTEST); i++) {
        check_case();
        char out[NORMALIZER_TEXT];
        Normalizer n = parse(SHORTEST[i].given);
        normalizer_shortest(&n, out, sizeof out);
        CHECK(!strcmp(out, SHORTEST[i].shortest), "%s is %s, not %s", SHORTEST[i].given, out, SHORTEST[i].shortest);
    }
}

// ---- random combinations

static uint64_t draws;

static size_t draw(size_t n) {
    return (size_t)(fixture_hash(fixture_stream("draws"), draws++) % n);
}

static const char *const NUMBERS[] = {
    "0.5", "1.0", "2", "15", "3.25", "1e-3", "0.1", "7e5", "512", "64", "100", "0.30000000000000004", "999999.5"};
// clang-format off
static const char *const VALUES[STAGE_COUNT][11] = {
    {"none", "l2"}, {"rsqrt-d", "logn", "logn-bias", "pn", "log:#", "log:L", "floorlog:#", "logd-logn", "const:#", "const:-#"},
    {"none", "-logL", "-logT", "-logn"},
    {"exp", "expm1", "identity", "relu", "relu2", "relu6", "gelu", "sigmoid", "softplus", "mish"},
    {"l1", "l1+#", "l1+sink", "n", "n2", "L", "T", "T2", "const:#", "sqrt-half-n", "none"},
    {"none", "negate", "rectify", "recenter", "recenter-l1", "reweight:#"},
};
// clang-format on

// Appends to `text`; '#' in the format becomes one of NUMBERS.
static void append(char *text, const char *value) {
    for (char one[2] = {0}; *value; value++) {
        one[0] = *value;
        strcat(text, *value == '#' ? NUMBERS[draw(COUNT(NUMBERS))] : one);
    }
}

// Returns the preset with which the text begins. changed: the stages with an override.
static const char *random_text(char *text, bool changed[STAGE_COUNT]) {
    const char *preset = NAMES[draw(COUNT(NAMES))];
    strcpy(text, preset);
    for (size_t overrides = draw(5); overrides > 0; overrides--) {
        size_t i = draw(STAGE_COUNT + 3), count = 0;
        strcat(text, "+");
        if (i == STAGE_COUNT) append(text, "s=#");
        if (i == STAGE_COUNT + 1) strcat(text, "fixed");
        if (i == STAGE_COUNT + 2) append(text, "cap=#");
        if (i >= STAGE_COUNT) continue;
        while (count < COUNT(VALUES[i]) && VALUES[i][count]) count++;
        strcat(strcat(text, STAGE_NAMES[i]), "=");
        append(text, VALUES[i][draw(count)]);
        changed[i] = true;
    }
    return preset;
}

static void check_overrides(const Normalizer *n, const char *preset, const bool changed[STAGE_COUNT]) {
    Normalizer start = parse(preset);
    const Stage *x = &n->qk, *y = &start.qk;
    for (size_t i = 0; i < STAGE_COUNT; i++)
        CHECK(changed[i] || (x[i].kind == y[i].kind && x[i].value == y[i].value), "%s has another %s than %s", n->text,
              STAGE_NAMES[i], preset);
}

// softmax with every stage spelled out is the same normalizer, except for what only the text can say about s.
static void check_round_trip(const Normalizer *n) {
    char written[512] = "softmax", shortest[NORMALIZER_TEXT], number[64];
    for (size_t i = 0; i < STAGE_COUNT; i++) sprintf(written + strlen(written), "+%s=%s", STAGE_NAMES[i], stage(n, i));
    if (!isnan(n->s_start)) {
        snprintf(number, sizeof number, "+s=%.17g", n->s_start);
        strcat(written, number);
    }
    if (n->cap != 0) {
        snprintf(number, sizeof number, "+cap=%.17g", n->cap);
        strcat(written, number);
    }
    if (n->fixed) strcat(written, "+fixed");
    if (strlen(written) < NORMALIZER_TEXT) {
        Normalizer again = parse(written);
        CHECK(same(n, &again) && normalizer_equal(n, &again), "%s is not %s", n->text, written);
    }
    normalizer_shortest(n, shortest, sizeof shortest);
    CHECK(strlen(shortest) <= strlen(n->text), "%s became longer: %s", n->text, shortest);
    Normalizer short_one = parse(shortest);
    CHECK(same(n, &short_one) && normalizer_equal(n, &short_one), "%s is not %s", n->text, shortest);
    char twice[NORMALIZER_TEXT];
    CHECK(strlen(normalizer_shortest(&short_one, twice, sizeof twice)) == strlen(shortest), "%s could be %s", shortest,
          twice);
}

static void test_random(void) {
    enum { TEXTS = 20000 };
    char text[512];
    size_t taken = 0;
    check_group("random overrides change only their stages; stage texts and shortest names give the same normalizer");
    for (size_t i = 0; i < TEXTS; i++) {
        Normalizer n;
        bool changed[STAGE_COUNT] = {false};
        const char *preset = random_text(text, changed);
        if (strlen(text) >= NORMALIZER_TEXT) continue;
        if (normalizer_parse(&n, text, message, sizeof message)) {
            taken++;
            check_overrides(&n, preset, changed);
            check_round_trip(&n);
        } else {
            CHECK(strstr(message, "no s") || strstr(message, "ln 1") || strstr(message, "needs phi=exp"),
                  "'%s' is refused: %s", text, message);
        }
    }
    CHECK(taken > TEXTS / 3, "only %zu of %d were accepted", taken, TEXTS);
}

// ---- the learned scalars

static void test_scalars(void) {
    static const struct {
        const char *text;
        bool has[SCALAR_COUNT], trains[SCALAR_COUNT];
    } ROWS[] = {
        // s, b, p, sink
        {"softmax", {0, 0, 0, 0}, {0, 0, 0, 0}},
        {"ssmax", {1, 0, 0, 0}, {1, 0, 0, 0}},
        {"ssmax-fixed", {1, 0, 0, 0}, {0, 0, 0, 0}},
        {"ssmax-bias", {1, 1, 0, 0}, {1, 1, 0, 0}},
        {"ssmax-pn", {1, 1, 1, 0}, {1, 1, 1, 0}},
        {"ssmax-pn+fixed", {1, 1, 1, 0}, {0, 1, 1, 0}},
        {"ssmax-bias+s=2+fixed", {1, 1, 0, 0}, {0, 1, 0, 0}},
        {"softmax-log512", {0, 0, 0, 0}, {0, 0, 0, 0}},
        {"lssar", {0, 0, 0, 0}, {0, 0, 0, 0}},
        {"softmax+scale=const:2", {0, 0, 0, 0}, {0, 0, 0, 0}},
        {"relu2-l1+scale=logn", {1, 0, 0, 0}, {1, 0, 0, 0}},
        {"softmax-sink", {0, 0, 0, 1}, {0, 0, 0, 1}},
        {"ssmax+fixed+norm=l1+sink", {1, 0, 0, 1}, {0, 0, 0, 1}},
        {"softmax-floorlog", {0, 0, 0, 0}, {0, 0, 0, 0}},
        {"softpick", {0, 0, 0, 0}, {0, 0, 0, 0}},
    };
    check_group("the learned scalars: which exist, which are trained, their initial values");
    for (size_t i = 0; i < COUNT(ROWS); i++) {
        check_case();
        Normalizer n = parse(ROWS[i].text);
        for (Scalar j = 0; j < SCALAR_COUNT; j++) {
            CHECK(normalizer_has(&n, j) == ROWS[i].has[j], "%s has %s", ROWS[i].text, scalar_names[j]);
            CHECK(normalizer_trains(&n, j) == ROWS[i].trains[j], "%s trains %s", ROWS[i].text, scalar_names[j]);
        }
        CHECK(!normalizer_has(&n, SCALAR_NONE), "%s has a scalar of unknown kind", ROWS[i].text);
    }
    Normalizer ssmax = parse("ssmax"), bias = parse("ssmax-bias"), pn = parse("ssmax-pn"), fixed = parse("ssmax-fixed"),
               given = parse("ssmax-pn+s=0.25");
    double mean = 0;
    for (int n = 1; n <= 1024; n++) mean += log(n) / 1024;
    CHECK(fabs(normalizer_start(&ssmax, SCALAR_S, 1024, 0) - 1 / mean) < 1e-12, "s starts at %.17g",
          normalizer_start(&ssmax, SCALAR_S, 1024, 0));
    CHECK(fabs(normalizer_start(&ssmax, SCALAR_S, 1024, 0) - 0.168) < 5e-4, "s starts at %.17g, but [SSMax] has 0.168",
          normalizer_start(&ssmax, SCALAR_S, 1024, 0));
    CHECK(normalizer_start(&bias, SCALAR_S, 8, 0) == 8 / (log(2) + log(3) + log(4) + log(5) + log(6) + log(7) + log(8)),
          "L = 8: %.17g", normalizer_start(&bias, SCALAR_S, 8, 0));
    CHECK(isfinite(normalizer_start(&ssmax, SCALAR_S, 1, 0)), "L = 1: %g", normalizer_start(&ssmax, SCALAR_S, 1, 0));
    const int LENGTHS[] = {1 << 20, (1 << 20) + 1, INT_MAX};    // Stirling's mean: ln L - 1 + ln(2 pi L) / 2L
    alarm(2);
    for (size_t i = 0; i < COUNT(LENGTHS); i++) {
        double L = LENGTHS[i], found = normalizer_start(&ssmax, SCALAR_S, LENGTHS[i], 0);
        CHECK(fabs(found * (log(L) - 1 + log(2 * acos(-1) * L) / (2 * L)) - 1) < 1e-9, "L = %.0f: %.17g", L, found);
    }
    alarm(0);
    CHECK(normalizer_start(&pn, SCALAR_S, 1024, 0) == 1 && normalizer_start(&fixed, SCALAR_S, 1024, 0) == 1,
          "pn and fixed");
    CHECK(normalizer_start(&given, SCALAR_S, 1024, 0) == 0.25, "s=0.25 starts at %g",
          normalizer_start(&given, SCALAR_S, 1024, 0));
    CHECK(normalizer_start(&bias, SCALAR_B, 1024, 0) == 0 && normalizer_start(&pn, SCALAR_B, 7, 0) == 0, "b");
    CHECK(normalizer_start(&pn, SCALAR_P, 1024, 0) == 1, "p");
    Normalizer sink = parse("ssmax+s=0.25+norm=l1+sink");
    CHECK(normalizer_start(&sink, SCALAR_SINK, 1024, 0) == 0, "the sink");
}

static void test_changes(void) {
    static const struct {
        const char *from, *to;
        int keeps[SCALAR_COUNT];
    } ROWS[] = {
        // s, b, p, sink; -1: the new normalizer does not have it
        {"softmax", "ssmax", {0, -1, -1, -1}},
        {"ssmax", "ssmax-bias", {1, 0, -1, -1}},
        {"ssmax-bias", "ssmax", {1, -1, -1, -1}},
        {"ssmax", "ssmax-pn", {0, 0, 0, -1}},
        {"ssmax-bias", "ssmax-pn", {0, 1, 0, -1}},
        {"ssmax-pn", "ssmax", {0, -1, -1, -1}},
        {"ssmax-pn", "ssmax-bias", {0, 1, -1, -1}},
        {"ssmax", "ssmax-fixed", {0, -1, -1, -1}},
        {"ssmax-fixed", "ssmax", {1, -1, -1, -1}},
        {"ssmax-fixed", "ssmax+fixed", {0, -1, -1, -1}},
        {"ssmax+fixed", "ssmax+fixed", {1, -1, -1, -1}},
        {"ssmax-pn", "ssmax-pn+post=negate", {1, 1, 1, -1}},
        {"ssmax", "ssmax+post=reweight:3", {1, -1, -1, -1}},
        {"ssmax-fixed", "ssmax-fixed+post=negate", {1, -1, -1, -1}},
        {"ssmax-fixed", "ssmax-fixed+s=2", {0, -1, -1, -1}},
        {"lssa", "ssmax-pn", {0, 0, 0, -1}},
        {"softmax", "softmax-sink", {-1, -1, -1, 0}},
        {"softmax-sink", "ssmax+norm=l1+sink", {0, -1, -1, 1}},
        {"softmax-sink", "softmax", {-1, -1, -1, -1}},
        {"ssmax-bias+norm=l1+sink", "ssmax-pn+norm=l1+sink+post=rectify", {0, 1, 0, 1}},
    };
    check_group("which scalars a change of normalizer keeps; which normalizers are equal");
    for (size_t i = 0; i < COUNT(ROWS); i++) {
        check_case();
        Normalizer from = parse(ROWS[i].from), to = parse(ROWS[i].to);
        for (Scalar j = 0; j < SCALAR_COUNT; j++) {
            if (ROWS[i].keeps[j] < 0) CHECK(!normalizer_has(&to, j), "%s has %s", ROWS[i].to, scalar_names[j]);
            else
                CHECK(normalizer_keeps(&from, &to, j) == ROWS[i].keeps[j], "%s to %s: %s", ROWS[i].from, ROWS[i].to,
                      scalar_names[j]);
        }
    }
    // clang-format off
    static const struct { const char *a, *b; bool equal; } EQUAL[] = {
        {"softmax", "softmax", true}, {"softmax1", "softmax+norm=l1+1", true}, {"softmax", "softmax1", false},
        {"ssmax", "ssmax-fixed", false},
        {"ssmax", "ssmax+s=3", true}, {"ssmax-fixed", "ssmax+s=1+fixed", true}, {"ssmax-fixed", "ssmax-fixed+s=2", false},
        {"ssmax+fixed", "ssmax-fixed", false},
        {"lssar", "lssa", false}, {"lssar", "lssar+post=reweight:14", false}, {"softmax+norm=l1+0.5", "softmax+norm=l1+0.50", true},
        {"softmax+scale=log:64", "softmax+scale=log:L", false},
        {"softmax+cap=5", "softmax", false}, {"softmax+cap=0", "softmax", true},
        {"ssmax+fixed", "ssmax+s=2.8853900817779268+fixed", false},      // equal only for L = 2
    };
    // clang-format on
    for (size_t i = 0; i < COUNT(EQUAL); i++) {
        check_case();
        Normalizer a = parse(EQUAL[i].a), b = parse(EQUAL[i].b);
        CHECK(normalizer_equal(&a, &b) == EQUAL[i].equal && normalizer_equal(&b, &a) == EQUAL[i].equal, "%s and %s",
              EQUAL[i].a, EQUAL[i].b);
    }
}

// ---- --attn help

static void help(void *text) {
    exit(normalizer_help(text) ? 0 : 9);
}

static void test_help(void) {
    static char output[1 << 16];
    check_group("--attn help");
    CHECK(check_fork(help, "help", output, sizeof output) == 0, "help");
    CHECK(strstr(output, "softmax+norm=l1+1 is softmax1") != NULL, "no shortest name");
    CHECK(check_fork(help, "help:softmax+norm=l1+1+post=reweight:3", output, sizeof output) == 0, "help:NAME");
    CHECK(strstr(output, "norm=l1+1") && strstr(output, "post=reweight:3") &&
              strstr(output, "shortest equivalent name: softmax1+post=reweight:3"),
          "%s", output);
    CHECK(check_fork(help, "help:ssmx", output, sizeof output) == EXIT_USAGE && strstr(output, "Did you mean ssmax?"),
          "%s", output);
    CHECK(check_fork(help, "help:2*softmax,ssmax", output, sizeof output) == EXIT_USAGE &&
              strstr(output, "expected one normalizer"),
          "%s", output);
    CHECK(check_fork(help, "helper", output, sizeof output) == 9 &&
              check_fork(help, "softmax", output, sizeof output) == 9,
          "not a request for help");
}

// ---- lists

static AttentionList parse_list(const char *text, size_t layers) {
    AttentionList list;
    memset(message, 0, sizeof message);
    if (!attention_parse(&list, text, layers, message, sizeof message)) fail(EXIT_USAGE, "%s: %s", text, message);
    return list;
}

// The layers of a list in words, one letter for each normalizer: S for softmax, M for ssmax
static void test_dealing(void) {
    static const struct {
        const char *text, *dealt;
        size_t windows[6];
        double ropes[6];
    } ROWS[] = {
        {"softmax", "SSSSSS", {0}, {0}},
        {"2*softmax+window=4,ssmax+rope=none", "SSMSSM", {4, 4, 0, 4, 4, 0}, {0, 0, NO_ROPE, 0, 0, NO_ROPE}},
        {"ssmax+rope=500+s=2+window=1,softmax", "MSMSMS", {1, 0, 1, 0, 1, 0}, {500, 0, 500, 0, 500, 0}},
        {"4*softmax,99*ssmax,softmax", "SSSSMM", {0}, {0}},
    };
    char shortest[ATTENTION_TEXT];
    check_group("lists: how they are dealt to the layers");
    for (size_t i = 0; i < COUNT(ROWS); i++) {
        check_case();
        AttentionList list = parse_list(ROWS[i].text, 6);
        CHECK(!strcmp(list.text, ROWS[i].text), "'%s' became '%s'", ROWS[i].text, list.text);
        for (size_t l = 0; l < 6; l++) {
            const LayerAttention *layer = attention_at(&list, l);
            CHECK((layer->normalizer.scale.kind == SCALE_LOGN) == (ROWS[i].dealt[l] == 'M'), "%s: layer %zu is %s",
                  ROWS[i].text, l, layer->normalizer.text);
            CHECK(layer->window == ROWS[i].windows[l], "%s: layer %zu: window %zu", ROWS[i].text, l, layer->window);
            CHECK(layer->rope == ROWS[i].ropes[l], "%s: layer %zu: rope %g", ROWS[i].text, l, layer->rope);
        }
        AttentionList again = parse_list(attention_shortest(&list, shortest, sizeof shortest), 6);
        CHECK(attention_equal(&list, &again, 6), "%s is not %s", ROWS[i].text, shortest);
    }
    AttentionList list = parse_list(ROWS[1].text, 6), other = parse_list("softmax+window=4", 6);
    CHECK(!attention_equal(&list, &other, 6) && attention_equal(&list, &other, 2), "%s", "equal layers");
    CHECK(!strcmp(attention_description(&list, 6, shortest, sizeof shortest),
                  "4 x softmax, window 4; 2 x ssmax, no RoPE"),
          "'%s'", shortest);
    list = parse_list("softmax,ssmax-pn+window=8", 1);
    CHECK(!attention_has(&list, SCALAR_P) && attention_p_keys(&list, 64) == 0, "%s", "an unused entry has p");
    list = parse_list("softmax,ssmax-pn+window=8", 2);
    CHECK(attention_p_keys(&list, 64) == 8 && attention_p_keys(&list, 4) == 4, "%zu", attention_p_keys(&list, 64));
    Normalizer ssmax = parse("ssmax");
    CHECK(normalizer_start(&ssmax, SCALAR_S, 4, 2) == 4 / (3 * log(2)), "W = 2: %.17g",
          normalizer_start(&ssmax, SCALAR_S, 4, 2));
    double wide = normalizer_start(&ssmax, SCALAR_S, 4, 9);
    CHECK(normalizer_start(&ssmax, SCALAR_S, 4, 1) == 1 && fabs(wide - 4 / log(24)) < 1e-12, "W > L: %.17g", wide);
}

static void warn_of_unused(void *text) {
    attention_warn_of_unused("--attn", text, ATTENTION_ITEMS);
    exit(0);
}

static void test_lists_refused(void) {
    static const Refused ROWS[] = {
        {"", "the name is empty"},
        {"softmax,", "entry 2 of the list, '': unknown normalizer: the name is empty"},
        {",softmax", "entry 1"},
        {"0*softmax", "count from 1"},
        {"2*", "the name is empty"},
        {"1000000*softmax", "count"},
        {"softmax,2*ssmx", "entry 2 of the list, '2*ssmx': unknown normalizer. Did you mean ssmax"},
        {"softmax+window=0", "window=0"},
        {"softmax+window=", "window="},
        {"softmax+window=1.5", "whole number"},
        {"softmax+window=-1", "whole number"},
        {"softmax+window=9999999999", "2147483647"},
        {"softmax+rope=1", "above 1"},
        {"softmax+rope=nan", "rope=nan"},
        {"softmax+rope=", "none, or a base"},
        {"softmax+cap=-1", "cap=C"},
        {"softmax+cap=nan", "cap=nan"},
        {"softmax+cap=", "cap= is not"},
        {"softmax*2", "unknown normalizer"},
    };
    char most[ATTENTION_TEXT + 1] = "softmax";
    check_group("lists: what is rejected");
    for (size_t i = 0; i < COUNT(ROWS); i++) {
        check_case();
        AttentionList list;
        memset(message, 0, sizeof message);
        CHECK(!attention_parse(&list, ROWS[i].text, 4, message, sizeof message), "'%s' is taken", ROWS[i].text);
        CHECK(strstr(message, ROWS[i].says), "'%s': '%s' does not contain '%s'", ROWS[i].text, message, ROWS[i].says);
    }
    for (size_t i = 1; i < ATTENTION_ITEMS; i++) strcat(most, ",softmax");
    AttentionList list;
    strcat(most, ",ssmax+window=7");
    CHECK(parse_list(most, ATTENTION_ITEMS).count == ATTENTION_ITEMS, "%zu entries", parse_list(most, 64).count);
    CHECK(!attention_parse(&list, most, 65, message, sizeof message) && strstr(message, "64 entries"), "%s", message);
    CHECK(check_fork(warn_of_unused, most, message, sizeof message) == 0 && strstr(message, "unused: ssmax+window=7."),
          "%s", message);
    memset(most, 'x', ATTENTION_TEXT);
    CHECK(!attention_parse(&list, most, 4, message, sizeof message) && strstr(message, "longer than 2047"), "%s",
          message);
}

int main(void) {
    program_name = "test_normalizer";
    test_overrides();
    test_refused();
    test_dealing();
    test_lists_refused();
    test_numbers();
    test_shortest();
    test_random();
    test_scalars();
    test_changes();
    test_help();
    return check_verdict();
}
