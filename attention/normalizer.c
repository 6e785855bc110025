// Parses and validates --attn and prints its help, all from the one table in normalizer.h. Tested by
// dev/tests/test_normalizer.c.
#include "attention/normalizer.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/error.h"
#include "runtime/number.h"
#include "runtime/spelling.h"

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

typedef struct {
    const char *name;
    Normalizer normalizer;
    const char *source;
} Preset;

#define STAGE_(kind, value, ...) {kind, value}
#define STAGE(...) STAGE_(__VA_ARGS__, 0, )            // the value is 0 where the table gives none
#define PRESET(name, qk, scale, s, offset, phi, norm, post, source) \
    {#name, {#name, STAGE(QK_##qk), STAGE(SCALE_##scale), STAGE(OFFSET_##offset), STAGE(PHI_##phi), STAGE(NORM_##norm), \
             STAGE(POST_##post), S_##s, 0}, source},
static const Preset PRESETS[] = {NORMALIZERS(PRESET)};

#define NAME(name, ...) "|" #name
static const char NAMES[] = NORMALIZERS(NAME);
#undef NAME
#define NAME(name, ...) " " #name
const char normalizer_flag_help[] =
    "attention normalizer, NAME or NAME+stage=value+..., or a list of them for the layers (run `--attn help` for their formulas):" NORMALIZERS(
        NAME);
#undef NAME

typedef struct {
    const char *name, *takes, *formula;
} Value;

#define VALUE(kind, name, takes, formula) {name, takes, formula},
static const Value QK[] = {QK_VALUES(VALUE)}, SCALE[] = {SCALE_VALUES(VALUE)}, OFFSET[] = {OFFSET_VALUES(VALUE)},
                   PHI[] = {PHI_VALUES(VALUE)}, NORM[] = {NORM_VALUES(VALUE)}, POST[] = {POST_VALUES(VALUE)};
#undef VALUE

const char *const stage_names[STAGE_COUNT] = {"qk", "scale", "offset", "phi", "norm", "post"};

// One row per stage: its values, and its field in a Normalizer.
static const struct {
    const Value *values;
    size_t count, offset;
} STAGES[STAGE_COUNT] = {
    {QK, COUNT(QK), offsetof(Normalizer, qk)},
    {SCALE, COUNT(SCALE), offsetof(Normalizer, scale)},
    {OFFSET, COUNT(OFFSET), offsetof(Normalizer, offset)},
    {PHI, COUNT(PHI), offsetof(Normalizer, phi)},
    {NORM, COUNT(NORM), offsetof(Normalizer, norm)},
    {POST, COUNT(POST), offsetof(Normalizer, post)},
};

static Stage *stage_of(Normalizer *normalizer, size_t i) {
    return (Stage *)((char *)normalizer + STAGES[i].offset);
}

static Stage stage_at(const Normalizer *normalizer, size_t i) {
    return *(const Stage *)((const char *)normalizer + STAGES[i].offset);
}

static bool same_stage(const Normalizer *a, const Normalizer *b, size_t i) {
    Stage x = stage_at(a, i), y = stage_at(b, i);
    return x.kind == y.kind && x.value == y.value;
}

static bool same_stages(const Normalizer *a, const Normalizer *b) {
    for (size_t i = 0; i < STAGE_COUNT; i++)
        if (!same_stage(a, b, i)) return false;
    return true;
}

// float32 can hold these numbers with room to spare. Rejects everything else, such as "inf", "0x10" and leading spaces.
bool normalizer_number(const char *text, double *out) {
    char *end;
    if (!text[strspn(text, "+-")] || text[strspn(text, "+-.0123456789eE")]) return false;
    errno = 0;
    *out = strtod(text, &end);
    return end != text && *end == 0 && errno == 0 && fabs(*out) <= 1e30 && (*out == 0 || fabs(*out) >= 1e-30);
}

// ---------------------------------------------------------------------------------------------------------------------
// The learned scalars

#define SCALAR_NAME(kind_, name, ...) name,
const char *const scalar_names[SCALAR_COUNT] = {SCALARS(SCALAR_NAME)};
#define SCALAR_REACH(kind_, name, width, reach, ...) reach,
const ScalarReach scalar_reach[SCALAR_COUNT] = {SCALARS(SCALAR_REACH)};

static int kind_in(const Normalizer *a, ScalarStage stage) {
    switch (stage) {
    case IN_SCALE: return a->scale.kind;
    case IN_PHI: return a->phi.kind;
    case IN_NORM: return a->norm.kind;
    case SCALAR_STAGES: break;
    }
    return -1;
}

bool normalizer_has(const Normalizer *a, Scalar scalar) {
    return scalar_exists(scalar, kind_in(a, scalar_stage(scalar)));
}

Normalizer normalizer_by_row(const Normalizer *a) {
    Normalizer by_row = *a;
    if (a->norm.kind == NORM_T) by_row.norm.kind = NORM_N;
    if (a->norm.kind == NORM_T2) by_row.norm.kind = NORM_N2;
    if (a->offset.kind == OFFSET_LOG_T) by_row.offset.kind = OFFSET_LOG_N;
    return by_row;
}

bool normalizer_trains(const Normalizer *a, Scalar scalar) {
    if (!normalizer_has(a, scalar)) return false;
#define SCALAR_TRAINED(kind_, name, width, reach, start, trained, ...) case kind_: return trained;
    switch ((int)scalar) { SCALARS(SCALAR_TRAINED) }
    return false;
}

// 1/mean(ln min(n, W) over n = 1..L), so that the mean temperature equals softmax's ([SSMax], models (e) and (f)); 1
// with p_n, and where that mean is 0. lgamma() would round differently, so it only replaces sums that would take long.
static double start_of_s(const Normalizer *a, size_t L, size_t W) {
    enum { LONGEST_SUM = 1 << 20 };
    if (!isnan(a->s_start)) return a->s_start;
    if (a->scale.kind == SCALE_PN) return 1;
    size_t rising = W && W < L ? W : L;    // the n up to which ln min(n, W) rises
    double sum = rising > LONGEST_SUM ? lgamma((double)rising + 1.0) : 0;
    for (size_t n = 1; n <= rising && rising <= LONGEST_SUM; n++) sum += log((double)n);
    sum += (double)(L - rising) * log((double)rising);
    return sum > 0 ? (double)L / sum : 1;
}

double normalizer_start(const Normalizer *a, Scalar scalar, size_t L, size_t W) {
#define SCALAR_START(kind_, name, width, reach, start, ...) case kind_: return start;
    switch ((int)scalar) { SCALARS(SCALAR_START) }
    return 0;
}

// Do both start s at the same number, for every L?
static bool same_start(const Normalizer *a, const Normalizer *b) {
    return isnan(a->s_start) ? isnan(b->s_start) : a->s_start == b->s_start;
}

// s times p_n and s times ln n are different quantities, so switching between them restarts s. A fixed s is whatever
// the new normalizer says.
bool normalizer_keeps(const Normalizer *from, const Normalizer *to, Scalar scalar) {
    if (!normalizer_has(from, scalar)) return false;
    bool same_s = (from->scale.kind == SCALE_PN) == (to->scale.kind == SCALE_PN) && (!to->fixed || from->fixed);
    return scalar != SCALAR_S || (same_s && (!to->fixed || same_start(from, to)));
}

bool normalizer_warn_of_start(const Normalizer *from, const Normalizer *to, const char *flag, const char *value) {
    bool given = normalizer_trains(to, SCALAR_S) && !isnan(to->s_start) && to->s_start != from->s_start;
    bool kept = given && normalizer_keeps(from, to, SCALAR_S);
    if (kept)
        warn("%s %s: the model keeps the s that it has; +s= sets the start of a new one. Add +fixed to replace it.",
             flag, value);
    return kept;
}

// ---------------------------------------------------------------------------------------------------------------------
// Reading

// Parses a value of a stage, such as "l1+1": the name alone, or with the number that it takes.
static bool read_value(const Value *v, const char *text, double *number) {
    size_t length = strlen(v->name);
    *number = 0;
    if (strncmp(v->name, text, length) != 0) return false;
    if (!text[length]) return v->takes[0] != ':';
    if (!v->takes[0] || text[length] != v->takes[0]) return false;
    bool sign = v->takes[0] == '+' && strchr("+-", text[length + 1]);
    return !sign && normalizer_number(text + length + 1, number);
}

static bool set_stage(Normalizer *normalizer, size_t i, const char *text, char *message, size_t size) {
    for (size_t j = 0; j < STAGES[i].count; j++) {
        double number;
        if (!read_value(&STAGES[i].values[j], text, &number)) continue;
        *stage_of(normalizer, i) = (Stage){(int)j, number};
        return true;
    }
    for (size_t j = 0; j < STAGES[i].count; j++) {
        const Value *v = &STAGES[i].values[j];
        size_t length = strlen(v->name);
        if (!v->takes[0] || strncmp(v->name, text, length) != 0 || text[length] != v->takes[0] || !text[length + 1])
            continue;
        snprintf(message, size,
                 "unknown value for %s: '%s'. '%s%c' takes a number%s whose magnitude is 0 or between 1e-30 and 1e30",
                 stage_names[i], text, v->name, v->takes[0], v->takes[0] == '+' ? " without a sign" : "");
        return false;
    }
    int at = snprintf(message, size, "unknown value for %s: '%s'. Expected one of:", stage_names[i], text);
    for (size_t j = 0; j < STAGES[i].count && at > 0 && (size_t)at < size; j++) {
        const Value *v = &STAGES[i].values[j];
        bool optional = v->takes[0] == '+';
        at += snprintf(message + at, size - (size_t)at, "%s %s%s%s%s", j ? "," : "", v->name, optional ? "[" : "",
                       v->takes, optional ? "]" : "");
    }
    return false;
}

// What an override sets, apart from the stages.
enum { OVERRIDE_S = STAGE_COUNT, OVERRIDE_CAP, OVERRIDE_FIXED, OVERRIDE_LAYER };

// If the text starts an override ("stage=", "s=", ...), returns the index of the stage or one of these; otherwise -1.
static int override_kind(const char *text) {
    if (!strncmp(text, "s=", 2)) return OVERRIDE_S;
    if (!strncmp(text, "cap=", 4)) return OVERRIDE_CAP;
    if (!strncmp(text, "fixed", 5) && (!text[5] || text[5] == '+')) return OVERRIDE_FIXED;
    if (!strncmp(text, "window=", 7) || !strncmp(text, "rope=", 5)) return OVERRIDE_LAYER;
    for (int i = 0; i < STAGE_COUNT; i++) {
        size_t length = strlen(stage_names[i]);
        if (!strncmp(text, stage_names[i], length) && text[length] == '=') return i;
    }
    return -1;
}

// Only a '+' before an override separates, so l1+0.5 stays whole.
char *normalizer_next_override(char *text) {
    char *plus = strchr(text, '+');
    while (plus && override_kind(plus + 1) < 0) plus = strchr(plus + 1, '+');
    return plus;
}

bool normalizer_is_layer_value(const char *override) {
    return override_kind(override) == OVERRIDE_LAYER;
}

static bool apply_override(Normalizer *out, char *word, char *message, size_t size) {
    int kind = override_kind(word);
    if (kind == OVERRIDE_FIXED) return out->fixed = true;
    if (kind == OVERRIDE_LAYER) {
        snprintf(message, size, "'%s' belongs to a layer of a model, not to a normalizer", word);
        return false;
    }
    const char *value = strchr(word, '=') + 1;
    if (kind < STAGE_COUNT) return set_stage(out, (size_t)kind, value, message, size);
    if (normalizer_number(value, kind == OVERRIDE_S ? &out->s_start : &out->cap)) return true;
    snprintf(message, size, "%s is not a number, or its magnitude is neither 0 nor between 1e-30 and 1e30", word);
    return false;
}

// The reason why this combination is invalid, or NULL if it is valid.
static const char *meaningless(const Normalizer *n) {
    if (n->scale.kind == SCALE_LOG && !(n->scale.value > 0)) return "the base of scale=log must be above 0";
    if (n->scale.kind == SCALE_LOG && logf((float)n->scale.value) == 0) return "scale=log:1 divides by ln 1 = 0";
    if (n->scale.kind == SCALE_FLOORLOG && !(n->scale.value > 0)) return "the F of scale=floorlog must be above 0";
    if (n->norm.kind == NORM_L1_SINK && n->phi.kind != PHI_EXP)
        return "the sink of norm=l1+sink is an extra logit under exp, so it needs phi=exp";
    if (n->norm.kind == NORM_L1 && !(n->norm.value >= 0))
        return "the C of norm=l1+C must not be negative, or Z could be 0 or change its sign";
    if (n->norm.kind == NORM_CONST && !(n->norm.value > 0)) return "norm=const:X divides by X, which must be above 0";
    if (n->post.kind == POST_REWEIGHT && !(n->post.value > 0)) return "the power of post=reweight must be above 0";
    if (n->post.kind == POST_REWEIGHT && n->post.value > 1e6)
        return "the power of post=reweight must be at most 1e6; beyond that, float32 cannot represent its slope";
    if (!(n->cap >= 0)) return "the C of cap=C must be above 0, or 0 for no cap";
    if (!normalizer_has(n, SCALAR_S) && (n->fixed || !isnan(n->s_start)))
        return "this normalizer has no s to start or fix; s exists with scale=logn, logn-bias and pn";
    return NULL;
}

static bool check(const Normalizer *n, char *message, size_t size) {
    const char *reason = meaningless(n);
#ifdef ATTN_ONLY
    for (size_t i = 0; !reason && i < COUNT(PRESETS); i++)
        if (!strcmp(PRESETS[i].name, ATTN_ONLY) && !same_stages(&PRESETS[i].normalizer, n))
            reason = "this program was built only for " ATTN_ONLY "; run `make` without ATTN= to build all normalizers";
#endif
    if (reason) snprintf(message, size, "%s", reason);
    return !reason;
}

bool normalizer_fits(const Normalizer *normalizer, size_t L, char *message, size_t size) {
    if (normalizer->scale.kind != SCALE_LOG_L || L > 1) return true;
    snprintf(message, size, "%s: scale=log:L divides by ln L, which is 0 for L = 1", normalizer->text);
    return false;
}

bool normalizer_parse(Normalizer *out, const char *text, char *message, size_t size) {
    if (strlen(text) >= NORMALIZER_TEXT) {
        snprintf(message, size, "the text is longer than %d characters", NORMALIZER_TEXT - 1);
        return false;
    }
    char words[NORMALIZER_TEXT], near[64];
    strcpy(words, text);
    char *override = normalizer_next_override(words);
    if (override) *override++ = 0;
    const Preset *preset = NULL;
    for (size_t i = 0; i < COUNT(PRESETS); i++)
        if (!strcmp(PRESETS[i].name, words)) preset = &PRESETS[i];
    if (!preset) {
        const char *plus = strchr(words, '+');
        if (!words[0])
            snprintf(message, size, "unknown normalizer: the name is empty. Run `--attn help` for the full list");
        else if (plus)
            snprintf(
                message, size,
                "unknown override '%s'. Expected qk=, scale=, offset=, phi=, norm=, post=, cap=, window=, rope=, s= or "
                "fixed",
                plus + 1);
        else
            snprintf(message, size, "unknown normalizer.%s Run `--attn help` for the full list",
                     nearest_word(NAMES + 1, words, near, sizeof near));
        return false;
    }
    *out = preset->normalizer;
    while (override) {
        char *next = normalizer_next_override(override);
        if (next) *next++ = 0;
        if (!apply_override(out, override, message, size)) return false;
        override = next;
    }
    strcpy(out->text, text);
    return check(out, message, size);
}

// ---------------------------------------------------------------------------------------------------------------------
// Printing

const char *normalizer_stage_text(const Normalizer *normalizer, size_t i, char *out, size_t size) {
    Stage stage = stage_at(normalizer, i);
    const Value *v = &STAGES[i].values[stage.kind];
    if (v->takes[0] == ':' || (v->takes[0] && stage.value != 0))
        snprintf(out, size, "%s%c%s", v->name, v->takes[0], number_text(stage.value).text);
    else snprintf(out, size, "%s", v->name);
    return out;
}

bool normalizer_equal(const Normalizer *a, const Normalizer *b) {
    return same_stages(a, b) && a->cap == b->cap && a->fixed == b->fixed && (!a->fixed || same_start(a, b));
}

// Writes the normalizer as a preset with overrides. Returns false if no override can undo some part of the preset.
static bool write_by_preset(const Normalizer *normalizer, const Preset *preset, char *out, size_t size) {
    const Normalizer *base = &preset->normalizer;
    char text[64];
    bool has_s = normalizer_has(normalizer, SCALAR_S), start_differs = has_s && !same_start(base, normalizer);
    if (base->fixed && (!has_s || !normalizer->fixed)) return false;
    if (!isnan(base->s_start) && isnan(normalizer->s_start)) return false;
    size_t at = (size_t)snprintf(out, size, "%s", preset->name);
    for (size_t i = 0; i < STAGE_COUNT && at < size; i++)
        if (!same_stage(base, normalizer, i))
            at += (size_t)snprintf(out + at, size - at, "+%s=%s", stage_names[i],
                                   normalizer_stage_text(normalizer, i, text, sizeof text));
    if (start_differs && at < size)
        at += (size_t)snprintf(out + at, size - at, "+s=%s", number_text(normalizer->s_start).text);
    if (normalizer->cap != 0 && at < size)
        at += (size_t)snprintf(out + at, size - at, "+cap=%s", number_text(normalizer->cap).text);
    if (normalizer->fixed && !base->fixed && at < size) at += (size_t)snprintf(out + at, size - at, "+fixed");
    return at < size;
}

const char *normalizer_shortest(const Normalizer *normalizer, char *out, size_t size) {
    char text[512];
    snprintf(out, size, "%s", normalizer->text);
    for (size_t i = 0; i < COUNT(PRESETS); i++)
        if (write_by_preset(normalizer, &PRESETS[i], text, sizeof text) && strlen(text) < strlen(out))
            snprintf(out, size, "%s", text);
    return out;
}

static const char DEFINITIONS[] =
    "  z = c (q k) + o is the score of a key k for a query q, and f = phi(z), which is 0 where k is not visible.\n"
    "  c is the scale and o the offset; A = f/Z is the key's weight before post, and Z the norm, one for each query.\n"
    "  n is the number of keys that the query sees, itself included; d is the head size.\n"
    "  L is the sequence length that the model was trained with, stored in its checkpoint.\n"
    "  T is the length of the sequence that is processed now; it may be longer than L.\n";

static const char SOURCES[] =
    "Sources: [SSMax] arXiv 2501.19399; [LSSA] arXiv 2501.13428; [GAU] kexue.fm 9019, on the gated attention unit of\n"
    "  arXiv 2202.10447; [Softer-Max] markusz.dev/softermax (the last two have no arXiv number of their own).\n";

enum { LABEL_SIZE = 128, TABLE_COLUMNS = STAGE_COUNT + 1 };
typedef struct {
    char text[TABLE_COLUMNS][LABEL_SIZE];
} TableRow;

static TableRow row_of(const Preset *preset) {
    enum { SCALE_COLUMN = 2 };
    TableRow row;
    char *scale = row.text[SCALE_COLUMN];
    snprintf(row.text[0], LABEL_SIZE, "%s", preset->name);
    for (size_t i = 0; i < STAGE_COUNT; i++) normalizer_stage_text(&preset->normalizer, i, row.text[i + 1], LABEL_SIZE);
    if (preset->normalizer.fixed)
        snprintf(scale + strlen(scale), LABEL_SIZE - strlen(scale), ", s = %s fixed",
                 number_text(preset->normalizer.s_start).text);
    return row;
}

static bool is_built(const Preset *preset) {
#ifdef ATTN_ONLY
    return strcmp(preset->name, ATTN_ONLY) == 0;
#else
    return preset != NULL;
#endif
}

static void widen(int *width, const char *text) {
    if ((int)strlen(text) > *width) *width = (int)strlen(text);
}

static void print_row(const TableRow *row, const int *widths, const char *source) {
    printf(" ");
    for (size_t i = 0; i < TABLE_COLUMNS; i++) printf(" %-*s", widths[i], row->text[i]);
    printf(" %s\n", source);
}

static void print_presets(void) {
    TableRow header = {{"name"}};
    int widths[TABLE_COLUMNS] = {0};
    for (size_t i = 0; i < STAGE_COUNT; i++) snprintf(header.text[i + 1], LABEL_SIZE, "%s", stage_names[i]);
    for (size_t c = 0; c < TABLE_COLUMNS; c++) {
        widen(&widths[c], header.text[c]);
        for (size_t i = 0; i < COUNT(PRESETS); i++)
            if (is_built(&PRESETS[i])) widen(&widths[c], row_of(&PRESETS[i]).text[c]);
    }
    print_row(&header, widths, "source");
    for (size_t i = 0; i < COUNT(PRESETS); i++) {
        TableRow row = row_of(&PRESETS[i]);
        if (is_built(&PRESETS[i])) print_row(&row, widths, PRESETS[i].source);
    }
}

static void print_values(void) {
    char label[LABEL_SIZE];
    int width = 0;
    for (int pass = 0; pass < 2; pass++) {    // measure, then print
        for (size_t i = 0; i < STAGE_COUNT; i++)
            for (size_t j = 0; j < STAGES[i].count; j++) {
                const Value *v = &STAGES[i].values[j];
                const char *format = v->takes[0] == '+' ? "%s=%s[%s]" : "%s=%s%s";
                snprintf(label, sizeof label, format, stage_names[i], v->name, v->takes);
                if (pass) printf("  %-*s %s\n", width, label, v->formula);
                else widen(&width, label);
            }
    }
    printf("  %-*s %s\n", width, "s=X",
           "initial value of s (default: 1/mean(ln n over a sequence of L), or 1 with pn)");
    printf("  %-*s %s\n", width, "fixed", "s is not trained");
    printf("  %-*s %s\n", width, "cap=C", "C tanh(z/C) takes the place of z; 0: none");
    printf("  %-*s %s\n", width, "window=W",
           "of a layer: a query sees itself and the W - 1 keys before it; n is at most W");
    printf("  %-*s %s\n", width, "rope=none|THETA",
           "of a layer: q and k are not rotated, or RoPE has a base of its own");
}

static void print_table(void) {
    printf(
        "--attn NAME, NAME+stage=value+..., or a list [COUNT*]NAME...,[COUNT*]NAME... that is dealt to the layers from the\n"
        "first on, again and again, with at most 64 entries; run --attn help:NAME+... to see one normalizer's formulas\n%s\n",
        DEFINITIONS);
    print_presets();
    printf("\n");
    print_values();
    printf("\nSpecifications with the same meaning have the same shortest name, for example:\n");
    static const char *const EXAMPLES[] = {"softmax+norm=l1+1", "softmax+qk=l2+scale=logd-logn+phi=softplus",
                                           "relu2-n+norm=l1"};
    for (size_t i = 0; i < COUNT(EXAMPLES); i++) {
        Normalizer example;
        char message[1024], name[NORMALIZER_TEXT];
        if (normalizer_parse(&example, EXAMPLES[i], message, sizeof message))
            printf("  %s is %s\n", EXAMPLES[i], normalizer_shortest(&example, name, sizeof name));
    }
    printf("\n%s", SOURCES);
}

static void print_one(const char *text) {
    Normalizer normalizer;
    char message[1024], name[NORMALIZER_TEXT], value[64], labels[STAGE_COUNT][LABEL_SIZE];
    int width = 0;
    if (text[strcspn(text, ",*")])
        fail(EXIT_USAGE,
             "--attn help:%.400s: expected one normalizer, such as help:ssmax+norm=l1+1, found a list or a count.",
             text);
    if (!normalizer_parse(&normalizer, text, message, sizeof message))
        fail(EXIT_USAGE, "--attn help:%.400s: %s.", text, message);
    for (size_t i = 0; i < STAGE_COUNT; i++) {
        snprintf(labels[i], LABEL_SIZE, "%s=%s", stage_names[i],
                 normalizer_stage_text(&normalizer, i, value, sizeof value));
        widen(&width, labels[i]);
    }
    printf("%s\n", text);
    for (size_t i = 0; i < STAGE_COUNT; i++) {
        Stage stage = stage_at(&normalizer, i);
        const Value *v = &STAGES[i].values[stage.kind];
        printf("  %-*s %s", width, labels[i], v->formula);
        if (v->takes[0]) printf("; %s = %s", v->takes + 1, number_text(stage.value).text);
        printf("\n");
    }
    if (normalizer_has(&normalizer, SCALAR_S) && !isnan(normalizer.s_start))
        printf("  s=%-*s %s\n", width - 2, number_text(normalizer.s_start).text,
               normalizer.fixed ? "fixed" : "initial value of s");
    else if (normalizer.fixed) printf("  %-*s s keeps its initial value\n", width, "fixed");
    printf("%sshortest equivalent name: %s\n", DEFINITIONS, normalizer_shortest(&normalizer, name, sizeof name));
}

bool normalizer_help(const char *text) {
    if (strncmp(text, "help", 4) != 0 || (text[4] && text[4] != ':')) return false;
    if (text[4]) print_one(text + 5);
    else print_table();
    flush_stdout("the normalizers");
    return true;
}
