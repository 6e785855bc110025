#include "data/mixture.h"

#include <cjson/cJSON.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/human.h"

enum {
    OPEN_FILES = 256,    // of all sources together, which a process can keep open under any usual limit
    MAX_DIGITS = 6,      // of a weight, before and after the point each
    MAX_PERIOD = 1000000,
};

// ---- weights

// The text after the last colon of a word, if it looks like a number.
static const char *weight_of(const char *word) {
    const char *colon = strrchr(word, ':');
    return colon && colon[1] && strchr("0123456789.+-", colon[1]) ? colon + 1 : NULL;
}

bool mixture_has_weights(const char *text) {
    char path[PATH_MAX], *list = strdup(text), *rest = list;
    bool any = false;
    for (char *word; !any && (word = strtok_r(rest, ", ", &rest));) any = weight_of(word) != NULL;
    free(list);
    return any && !shards_first_path(text, path, sizeof path);
}

// Reads a decimal number above 0 in units of 10^-MAX_DIGITS. Returns 0 if it is not one.
static uint64_t read_weight(const char *text) {
    size_t whole = strspn(text, "0123456789");
    const char *point = text + whole;
    size_t fraction = *point == '.' ? strspn(point + 1, "0123456789") : 0;
    const char *end = *point == '.' ? point + 1 + fraction : point;
    if (*end || whole + fraction == 0 || whole > MAX_DIGITS || fraction > MAX_DIGITS) return 0;
    uint64_t weight = 0;
    for (size_t i = 0; i < whole; i++) weight = 10 * weight + (uint64_t)(text[i] - '0');
    for (size_t i = 0; i < MAX_DIGITS; i++) weight = 10 * weight + (i < fraction ? (uint64_t)(point[1 + i] - '0') : 0);
    return weight;
}

static uint64_t common_divisor(uint64_t a, uint64_t b) {
    while (b) {
        uint64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

// Divides the weights by their greatest common divisor, and sets the period.
static bool reduce_weights(Mixture *m, const char *text, Error *error) {
    uint64_t divisor = 0;
    for (size_t i = 0; i < m->count; i++) divisor = common_divisor(m->sources[i].weight, divisor);
    for (size_t i = 0; i < m->count; i++) m->period += m->sources[i].weight /= divisor;
    return m->period <= MAX_PERIOD ||
           error_set(error, EXIT_USAGE,
                     "%s: the order of the sources repeats only after %s sequences; at most %s are supported.\n"
                     "  Give weights with fewer digits.",
                     text, human_grouped(m->period).text, human_grouped(MAX_PERIOD).text);
}

// ---- the order of the sources

// Can the next sequence of a source be number n of the mixture (from 1)? Not if its count would exceed its share of n,
// rounded up.
static bool is_released(uint64_t taken, uint64_t weight, uint64_t period, uint64_t n) {
    return taken * period < n * weight;
}

// The last n at which the source's next sequence may come, lest its count fall below its share of n, rounded down.
static uint64_t deadline(uint64_t taken, uint64_t weight, uint64_t period) {
    return ((taken + 1) * period + weight - 1) / weight;
}

// Of the sources that may have the next sequence, the one with the earliest deadline gets it. This meets all deadlines:
// R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980).
static void fill_turns(Mixture *m) {
    uint64_t taken[MAX_SOURCES] = {0};
    for (uint64_t n = 1; n <= m->period; n++) {
        size_t best = 0;
        uint64_t earliest = UINT64_MAX;
        for (size_t i = 0; i < m->count; i++) {
            uint64_t weight = m->sources[i].weight, last = deadline(taken[i], weight, m->period);
            if (last >= earliest || !is_released(taken[i], weight, m->period, n)) continue;
            best = i;
            earliest = last;
        }
        m->turns[n - 1] = (Turn){(uint32_t)best, (uint32_t)taken[best]++};
    }
}

const Source *mixture_find(const Mixture *m, uint64_t *g) {
    Turn turn = m->turns[*g % m->period];
    const Source *source = &m->sources[turn.source];
    *g = (*g / m->period) * source->weight + turn.before;
    return source;
}

// ---- sources

static bool add_source(Mixture *m, const char *globs, uint64_t weight, Error *error) {
    Source *source = &m->sources[m->count];
    *source = (Source){.globs = strdup(globs), .weight = weight};
    m->count++;
    return source->globs || error_set(error, EXIT_RESOURCE, "out of memory for the list of sources");
}

// Adds the source of one word, GLOB:WEIGHT. `text` is all of them, for messages.
static bool add_weighted(Mixture *m, char *word, const char *text, Error *error) {
    const char *number = weight_of(word), *colon = strrchr(word, ':');
    if (m->count == MAX_SOURCES)
        return error_set(error, EXIT_USAGE, "expected at most %d sources, found more: %s", MAX_SOURCES, text);
    if (!number && colon && !strchr(colon, '/'))
        return error_set(error, EXIT_USAGE,
                         "%s: \"%s\": expected a weight after the colon, such as 0.7, found \"%s\".\n"
                         "  If the colon is part of the name, append a weight: \"%s:0.5\".",
                         text, word, colon + 1, word);
    if (!number)
        return error_set(error, EXIT_USAGE,
                         "%s: \"%s\" has no weight.\n  Give all sources a weight, as in \"%s:0.5\", or none.%s", text,
                         word, word, strchr(text, ' ') ? " A space separates sources; write ? for one in a name." : "");
    if (number - 1 == word)
        return error_set(error, EXIT_USAGE, "%s: \"%s\": expected the path or pattern of a shard before the weight.",
                         text, word);
    uint64_t weight = read_weight(number);
    if (!weight)
        return error_set(error, EXIT_USAGE,
                         "%s: \"%s\": expected a weight above 0 with at most %d digits before and "
                         "after the point, such as 0.7.",
                         text, number, MAX_DIGITS);
    word[number - 1 - word] = 0;
    return add_source(m, word, weight, error);
}

// Is there nothing between two commas, before the first or after the last?
static bool has_empty_source(const char *text) {
    bool empty = true;
    for (; *text; text++) {
        if (*text == ',' && empty) return true;
        if (*text != ' ') empty = *text == ',';
    }
    return empty;
}

static bool find_sources(Mixture *m, const char *text, Error *error) {
    m->weighted = mixture_has_weights(text);
    if (!m->weighted) return add_source(m, text, 1, error) && reduce_weights(m, text, error);
    if (has_empty_source(text))
        return error_set(error, EXIT_USAGE,
                         "%s: expected a source on both sides of each comma, found nothing.\n"
                         "  Name the missing source, or remove the comma.",
                         text);
    char *list = strdup(text), *rest = list;
    bool ok = list || error_set(error, EXIT_RESOURCE, "out of memory for the list of sources");
    for (char *word; ok && (word = strtok_r(rest, ", ", &rest));) ok = add_weighted(m, word, text, error);
    free(list);
    return ok && reduce_weights(m, text, error);
}

static void free_sources(Mixture *m) {
    for (size_t i = 0; i < m->count; i++) {
        free(m->sources[i].globs);
        shards_close(m->sources[i].shards);
    }
    m->count = 0;
}

bool mixture_first_path(const char *text, char *path, size_t size) {
    Mixture m = {0};
    Error ignored;
    bool found = find_sources(&m, text, &ignored) && shards_first_path(m.sources[0].globs, path, size);
    free_sources(&m);
    return found;
}

// Opens each source, with its share of the windows that are needed.
static bool open_sources(Mixture *m, ShardsConfig config, Error *error) {
    uint64_t needed = config.min_windows;
    config.open_files = OPEN_FILES / m->count;
    for (size_t i = 0; i < m->count; i++) {
        Source *source = &m->sources[i];
        config.min_windows = (needed * source->weight + m->period - 1) / m->period;
        source->shards = shards_open(source->globs, config, error);
        if (!source->shards) return false;
    }
    return true;
}

static bool open_all(Mixture *m, const char *text, ShardsConfig config, Error *error) {
    if (!find_sources(m, text, error) || !open_sources(m, config, error)) return false;
    m->turns = malloc(m->period * sizeof *m->turns);
    if (!m->turns) return error_set(error, EXIT_RESOURCE, "out of memory for the order of the sources of %s", text);
    fill_turns(m);
    return true;
}

Mixture *mixture_open(const char *text, ShardsConfig config, Error *error) {
    Mixture *m = calloc(1, sizeof *m);
    if (!m) error_set(error, EXIT_RESOURCE, "out of memory for the sources of %s", text);
    if (m && open_all(m, text, config, error)) return m;
    mixture_close(m);
    return NULL;
}

void mixture_close(Mixture *m) {
    if (!m) return;
    free_sources(m);
    free(m->turns);
    free(m);
}

bool mixture_masked(const Mixture *m) {
    bool masked = false;
    for (size_t i = 0; i < m->count; i++) masked = masked || shards_masked(m->sources[i].shards);
    return masked;
}

bool mixture_check_all(Mixture *m, Error *error) {
    for (size_t i = 0; i < m->count; i++)
        if (!shards_check_all(m->sources[i].shards, error)) return false;
    return true;
}

char *mixture_fingerprint(Mixture *m, Error *error) {
    if (!m->weighted) return shards_fingerprint(m->sources[0].shards, error);
    cJSON *json = cJSON_CreateObject(), *sources = cJSON_AddArrayToObject(json, "sources");
    bool ok = true;
    for (size_t i = 0; ok && i < m->count; i++) {
        char *print = shards_fingerprint(m->sources[i].shards, error);
        cJSON *source = print ? cJSON_Parse(print) : NULL;
        free(print);
        ok = source != NULL;
        cJSON_AddNumberToObject(source, "weight", (double)m->sources[i].weight);
        cJSON_AddItemToArray(sources, source);
    }
    char *text = ok ? cJSON_PrintUnformatted(json) : NULL;
    cJSON_Delete(json);
    return text;
}
