#include "normalizer.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/options.h"

typedef struct {
    const char *name;
    Normalizer normalizer;
    const char *source;
} Preset;

#define STAGE_(kind, value, ...) {kind, value}
#define STAGE(...) STAGE_(__VA_ARGS__, 0, )            // the value is 0 where the table names none
#define PRESET(name, qk, scale, offset, phi, norm, post, source) \
    {#name, {#name, STAGE(QK_##qk), STAGE(SCALE_##scale), STAGE(OFFSET_##offset), STAGE(PHI_##phi), STAGE(NORM_##norm), \
             STAGE(POST_##post), false, NAN}, source},
static const Preset PRESETS[] = {NORMALIZERS(PRESET)};

typedef struct {
    const char *name, *takes, *formula;
} Value;

#define VALUE(kind, name, takes, formula) {name, takes, formula},
static const Value QK[] = {QK_VALUES(VALUE)}, SCALE[] = {SCALE_VALUES(VALUE)}, OFFSET[] = {OFFSET_VALUES(VALUE)},
                   PHI[] = {PHI_VALUES(VALUE)}, NORM[] = {NORM_VALUES(VALUE)}, POST[] = {POST_VALUES(VALUE)};
#undef VALUE

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

// One row a stage: its name, its values, and where it lies in a Normalizer.
static const struct {
    const char *name;
    const Value *values;
    size_t count, offset;
} STAGES[] = {
    {"qk",     QK,     COUNT(QK),     offsetof(Normalizer, qk)},
    {"scale",  SCALE,  COUNT(SCALE),  offsetof(Normalizer, scale)},
    {"offset", OFFSET, COUNT(OFFSET), offsetof(Normalizer, offset)},
    {"phi",    PHI,    COUNT(PHI),    offsetof(Normalizer, phi)},
    {"norm",   NORM,   COUNT(NORM),   offsetof(Normalizer, norm)},
    {"post",   POST,   COUNT(POST),   offsetof(Normalizer, post)},
};

static Stage *stage_of(Normalizer *normalizer, size_t i) {
    return (Stage *)((char *)normalizer + STAGES[i].offset);
}

static bool read_number(const char *text, double *out) {
    char *end;
    errno = 0;
    *out = strtod(text, &end);
    return end != text && *end == 0 && errno == 0 && isfinite(*out);
}

// ---------------------------------------------------------------------------------------------------------------------------
// The nearest name, for a message about one that there is not.

static const char *nearest_preset(const char *name) {
    const char *best = PRESETS[0].name;
    size_t least = (size_t)-1;
    for (size_t i = 0; i < COUNT(PRESETS); i++) {
        size_t distance = edit_distance(name, strlen(name), PRESETS[i].name, strlen(PRESETS[i].name));
        if (distance < least) least = distance, best = PRESETS[i].name;
    }
    return best;
}

// ---------------------------------------------------------------------------------------------------------------------------
// Reading

bool normalizer_set_stage(Normalizer *normalizer, const char *stage, const char *value, char *message, size_t size) {
    for (size_t i = 0; i < COUNT(STAGES); i++) {
        if (strcmp(STAGES[i].name, stage) != 0) continue;
        for (size_t j = 0; j < STAGES[i].count; j++) {
            const Value *v = &STAGES[i].values[j];
            size_t length = strlen(v->name);
            if (strncmp(v->name, value, length) != 0) continue;
            double number = 0;
            if (value[length] && (!v->takes[0] || value[length] != v->takes[0] || !read_number(value + length + 1, &number) || number < 0))
                continue;
            *stage_of(normalizer, i) = (Stage){(int)j, number};
            return true;
        }
        int at = snprintf(message, size, "no such value for %s: '%s'. There is:", stage, value);
        for (size_t j = 0; j < STAGES[i].count && at > 0 && (size_t)at < size; j++)
            at += snprintf(message + at, size - (size_t)at, "%s %s%s", j ? "," : "", STAGES[i].values[j].name,
                           STAGES[i].values[j].takes[0] ? "[+C]" : "");
        return false;
    }
    snprintf(message, size, "no such stage: '%s'. There is: qk, scale, offset, phi, norm, post, s and fixed", stage);
    return false;
}

// A '+' starts an override only before a stage's name, "s=" or "fixed", so that l1+0.5 stays whole.
static char *next_override(char *text) {
    for (char *plus = strchr(text, '+'); plus; plus = strchr(plus + 1, '+')) {
        if (!strncmp(plus + 1, "s=", 2) || !strcmp(plus + 1, "fixed") || !strncmp(plus + 1, "fixed+", 6)) return plus;
        for (size_t i = 0; i < COUNT(STAGES); i++) {
            size_t length = strlen(STAGES[i].name);
            if (!strncmp(plus + 1, STAGES[i].name, length) && plus[1 + length] == '=') return plus;
        }
    }
    return NULL;
}

static bool apply_override(Normalizer *out, char *word, char *message, size_t size) {
    if (!strcmp(word, "fixed")) {
        out->fixed = true;
        return true;
    }
    char *equals = strchr(word, '=');
    *equals = 0;
    if (!strcmp(word, "s")) {
        if (read_number(equals + 1, &out->s_start)) return true;
        snprintf(message, size, "s=%s is not a finite number", equals + 1);
        return false;
    }
    return normalizer_set_stage(out, word, equals + 1, message, size);
}

// What has no meaning is refused with the reason.
static bool check(const Normalizer *n, char *message, size_t size) {
    if (!normalizer_has_s(n) && (n->fixed || !isnan(n->s_start))) {
        snprintf(message, size, "%s has no s to start or to fix: that needs scale=logn", n->text);
        return false;
    }
    return true;
}

bool normalizer_parse(Normalizer *out, const char *text, char *message, size_t size) {
    if (strlen(text) >= NORMALIZER_TEXT) {
        snprintf(message, size, "longer than %d characters", NORMALIZER_TEXT - 1);
        return false;
    }
    char words[NORMALIZER_TEXT];
    strcpy(words, text);
    char *override = next_override(words);
    if (override) *override++ = 0;
    const Preset *preset = NULL;
    for (size_t i = 0; i < COUNT(PRESETS); i++)
        if (!strcmp(PRESETS[i].name, words)) preset = &PRESETS[i];
    if (!preset) {
        snprintf(message, size, "no such normaliser. Nearest: %s. `--attn help` lists all of them", nearest_preset(words));
        return false;
    }
    *out = preset->normalizer;
    while (override) {
        char *next = next_override(override);
        if (next) *next++ = 0;
        if (!apply_override(out, override, message, size)) return false;
        override = next;
    }
    strcpy(out->text, text);
    return check(out, message, size);
}

// ---------------------------------------------------------------------------------------------------------------------------
// Telling

const char *normalizer_stage_text(const char *stage, Stage value, char *out, size_t size) {
    for (size_t i = 0; i < COUNT(STAGES); i++) {
        if (strcmp(STAGES[i].name, stage) != 0) continue;
        const Value *v = &STAGES[i].values[value.kind];
        if (v->takes[0] && value.value != 0)
            snprintf(out, size, "%s%c%.17g", v->name, v->takes[0], value.value);
        else
            snprintf(out, size, "%s", v->name);
        return out;
    }
    return NULL;
}

bool normalizer_has_s(const Normalizer *normalizer) {
    return normalizer->scale.kind == SCALE_LOGN;
}

double normalizer_s_start(const Normalizer *normalizer, int L) {
    if (!isnan(normalizer->s_start)) return normalizer->s_start;
    double sum = 0;
    for (int n = 1; n <= L; n++) sum += log(n);
    return sum > 0 ? L / sum : 1;
}

bool normalizer_equal(const Normalizer *a, const Normalizer *b) {
    for (size_t i = 0; i < COUNT(STAGES); i++) {
        const Stage *x = stage_of((Normalizer *)a, i), *y = stage_of((Normalizer *)b, i);
        if (x->kind != y->kind || x->value != y->value) return false;
    }
    return a->fixed == b->fixed;
}

void normalizer_print_table(void) {
    printf("--attn NAME, or NAME+stage=value+...\n\n  %-16s %-6s %-9s %-8s %-7s %-8s %-6s %s\n", "name", "qk", "scale", "offset", "phi",
           "norm", "post", "source");
    for (size_t i = 0; i < COUNT(PRESETS); i++) {
        static const int WIDTH[] = {6, 9, 8, 7, 8, 6};
        printf("  %-16s ", PRESETS[i].name);
        for (size_t j = 0; j < COUNT(STAGES); j++) {
            char text[64];
            Stage *value = stage_of((Normalizer *)&PRESETS[i].normalizer, j);
            printf("%-*s ", WIDTH[j], normalizer_stage_text(STAGES[j].name, *value, text, sizeof text));
        }
        printf("%s\n", PRESETS[i].source);
    }
    printf("\n");
    for (size_t i = 0; i < COUNT(STAGES); i++)
        for (size_t j = 0; j < STAGES[i].count; j++) {
            char text[64];
            snprintf(text, sizeof text, "%s=%s%s", STAGES[i].name, STAGES[i].values[j].name, STAGES[i].values[j].takes[0] ? "[+C]" : "");
            printf("  %-16s %s\n", text, STAGES[i].values[j].formula);
        }
    printf("  %-16s %s\n  %-16s %s\n", "s=X", "where s starts (else 1/mean(ln n over n = 1..L))", "fixed", "s is not trained");
}
