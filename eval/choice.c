#define _GNU_SOURCE    // asprintf
#include "eval/choice.h"

#include <limits.h>
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <wchar.h>
#include <wctype.h>

#include "runtime/json.h"

enum { MAX_LINE = 64 << 20 };    // bytes

// ---- text as lm_eval's hellaswag task prepares it (lm_eval/tasks/hellaswag/utils.py, version 0.4.13)

static void replace_all(char *text, const char *from, const char *to) {
    size_t old = strlen(from), new = strlen(to);    // new <= old
    char *out = text;
    for (const char *at = text; *at;) {
        if (!strncmp(at, from, old)) {
            memcpy(out, to, new);
            out += new;
            at += old;
        } else {
            *out++ = *at++;
        }
    }
    *out = 0;
}

// Removes each shortest [...] within a line.
static void remove_brackets(char *text) {
    char *out = text;
    for (const char *at = text; *at;) {
        size_t inside = *at == '[' ? strcspn(at, "]\n") : 0;
        if (inside && at[inside] == ']') at += inside + 1;
        else *out++ = *at++;
    }
    *out = 0;
}

// The length of the white space character at the start of the text, or 0: what Python's str.isspace() accepts.
static size_t space_at(const char *text) {
    static const char *const WIDE[] = {"\xC2\x85", "\u00A0", "\u1680", "\u2000", "\u2001", "\u2002", "\u2003",
                                       "\u2004",   "\u2005", "\u2006", "\u2007", "\u2008", "\u2009", "\u200A",
                                       "\u2028",   "\u2029", "\u202F", "\u205F", "\u3000"};
    char c = *text;
    if (c == ' ' || (c >= '\t' && c <= '\r') || (c >= 0x1C && c <= 0x1F)) return 1;
    for (size_t i = 0; i < sizeof WIDE / sizeof *WIDE; i++)
        if (!strncmp(text, WIDE[i], strlen(WIDE[i]))) return strlen(WIDE[i]);
    return 0;
}

// The length of the text without the white space at its end.
static size_t stripped_length(const char *text) {
    size_t length = strlen(text);
    while (length) {
        size_t last = length - 1;
        while (last && ((unsigned char)text[last] & 0xC0) == 0x80) last--;
        if (!space_at(text + last)) break;
        length = last;
    }
    return length;
}

static void strip(char *text) {
    size_t start = 0, step;
    text[stripped_length(text)] = 0;
    while ((step = space_at(text + start))) start += step;
    memmove(text, text + start, strlen(text + start) + 1);
}

static void clean(char *text) {
    strip(text);
    replace_all(text, " [title]", ". ");
    remove_brackets(text);
    replace_all(text, "  ", " ");
}

// Python's str.capitalize(): the first character in title case, the others in lower case. Not converted are the 48
// characters whose title case has several (as that of the German sharp s), and a sigma at the end of a Greek word.
static char *capitalize(const char *text) {
    locale_t utf8 = newlocale(LC_CTYPE_MASK, "C.UTF-8", (locale_t)0);
    if (!utf8) fail(EXIT_RESOURCE, "the system has no locale C.UTF-8, which HellaSwag's texts need.");
    char *out = allocate(2 * strlen(text) + 8, 1, "the questions"), *at = out;
    mbstate_t in_state = {0}, out_state = {0};
    locale_t before = uselocale(utf8);
    wctrans_t title = wctrans("totitle");
    for (size_t used; *text; text += used) {
        wchar_t wide;
        used = mbrtowc(&wide, text, strlen(text), &in_state);
        if (used > MB_LEN_MAX) break;    // not UTF-8, which json_parse() rejects
        wide = (wchar_t)(at == out ? towctrans((wint_t)wide, title) : towlower((wint_t)wide));
        at += wcrtomb(at, wide, &out_state);
    }
    uselocale(before);
    freelocale(utf8);
    return out;
}

// ---- questions

typedef struct {
    const char *path;
    size_t line;
} Where;

static bool has(const cJSON *json, const char *key) {
    return cJSON_GetObjectItemCaseSensitive(json, key) != NULL;
}

static const char *text_of(const cJSON *json, const char *key, Where at) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, key);
    if (!cJSON_IsString(item))
        fail(
            EXIT_INPUT,
            "%s: line %zu: expected a text as \"%s\".\n"
            "  A question has activity_label, ctx (or ctx_a and ctx_b), endings and label, or query, choices and gold.",
            at.path, at.line, key);
    return item->valuestring;
}

// An index: a number, or a text of digits as in HellaSwag's files.
static bool read_index(const cJSON *item, uint64_t *index) {
    if (!cJSON_IsString(item)) return json_u64(item, index);
    const char *text = item->valuestring;
    *index = strtoull(text, NULL, 10);
    return *text && !text[strspn(text, "0123456789")];
}

// The index of the right ending.
static size_t gold_of(const cJSON *json, size_t count, Where at) {
    const cJSON *label = cJSON_GetObjectItemCaseSensitive(json, "label");
    const cJSON *gold = cJSON_GetObjectItemCaseSensitive(json, "gold");
    uint64_t index, other;
    if (!read_index(label ? label : gold, &index) || index >= count)
        fail(EXIT_INPUT, "%s: line %zu: expected the right ending as \"label\" or \"gold\", from 0 to %zu.", at.path,
             at.line, count - 1);
    if (label && gold && (!read_index(gold, &other) || other != index))
        fail(EXIT_INPUT, "%s: line %zu: \"label\" and \"gold\" name different endings.", at.path, at.line);
    return (size_t)index;
}

static char *query_of(const cJSON *json, bool hellaswag, Where at) {
    if (!hellaswag) return strdup(text_of(json, "query", at));
    const char *label = text_of(json, "activity_label", at);
    char *query;
    if (has(json, "ctx_a")) {
        char *second = capitalize(text_of(json, "ctx_b", at));
        if (asprintf(&query, "%s: %s %s", label, text_of(json, "ctx_a", at), second) < 0) query = NULL;
        free(second);
    } else if (asprintf(&query, "%s: %s", label, text_of(json, "ctx", at)) < 0) query = NULL;
    if (!query) fail(EXIT_RESOURCE, "out of memory for the questions.");
    clean(query);
    return query;
}

static size_t encode(const Eval *e, const char *text, int32_t **ids) {
    size_t length = strlen(text);
    *ids = allocate(tokenizer_capacity(length), sizeof **ids, "the questions");
    return tokenizer_encode(e->tokenizer, text, length, *ids, tokenizer_capacity(length));
}

// The tokens of the query and " ending" together; those that the query alone does not have belong to the ending. Spaces
// at the query's end move to the ending. An empty query is an end-of-text token.
static ChoiceEnding make_ending(const Eval *e, const char *query, const char *ending, Where at) {
    ChoiceEnding out = {.length = eval_characters(ending)};
    size_t context = stripped_length(query), most = eval_length(e, 1);
    char *whole, where[PATH_MAX + 32];
    int32_t *ids;
    Error error;
    if (asprintf(&whole, "%s %s", query, ending) < 0) fail(EXIT_RESOURCE, "out of memory for the questions.");
    size_t count = encode(e, whole, &out.ids);
    snprintf(where, sizeof where, "%s: line %zu", at.path, at.line);
    if (!tokenizer_fits(e->tokenizer, out.ids, count, e->config->vocab, where, &error)) fail_with(&error);
    whole[context] = 0;
    out.from = encode(e, whole, &ids);
    out.count = count;
    free(ids);
    free(whole);
    if (out.from == 0) {
        memmove(out.ids + 1, out.ids, count * sizeof *out.ids);
        out.ids[0] = e->config->end_of_text;
        out.from = 1;
        out.count++;
    }
    size_t over = out.count > most + 1 ? out.count - most - 1 : 0;
    if (out.from >= out.count || over >= out.from)
        fail(EXIT_INPUT, "%s: line %zu: an ending of %zu tokens; expected at least 1 and at most %zu (--seq-lens).",
             at.path, at.line, out.count - (out.from < out.count ? out.from : out.count), most);
    memmove(out.ids, out.ids + over, (out.count - over) * sizeof *out.ids);
    out.count -= over;
    out.from -= over;
    return out;
}

static ChoiceQuestion make_question(const Eval *e, const cJSON *json, Where at) {
    bool hellaswag = has(json, "endings");
    const cJSON *endings = cJSON_GetObjectItemCaseSensitive(json, hellaswag ? "endings" : "choices"), *ending;
    ChoiceQuestion q = {.count = (size_t)cJSON_GetArraySize(endings)};
    if (!cJSON_IsArray(endings) || q.count < 2)
        fail(EXIT_INPUT, "%s: line %zu: expected a list of at least two \"endings\" or \"choices\".", at.path, at.line);
    q.gold = gold_of(json, q.count, at);
    q.endings = allocate(q.count, sizeof *q.endings, "the questions");
    char *query = query_of(json, hellaswag, at);
    size_t i = 0;
    cJSON_ArrayForEach(ending, endings) {
        if (!cJSON_IsString(ending))
            fail(EXIT_INPUT, "%s: line %zu: ending %zu (from 0) is not a text.", at.path, at.line, i);
        if (hellaswag) clean(ending->valuestring);
        q.endings[i++] = make_ending(e, query, ending->valuestring, at);
    }
    free(query);
    return q;
}

static void free_question(ChoiceQuestion *q) {
    for (size_t i = 0; i < q->count; i++) free(q->endings[i].ids);
    free(q->endings);
    *q = (ChoiceQuestion){0};
}

static void open_lines(Choice *c) {
    Error error;
    file_lines_close(c->lines);
    if (!(c->lines = file_lines_open(c->e->o.data, MAX_LINE, &error))) fail_with(&error);
}

// Reads the next question. Returns false after the last one.
static bool read_question(Choice *c) {
    Error error;
    FileLine line;
    const char *path = c->e->o.data;
    free_question(&c->question);
    do {
        if (!file_lines_next(c->lines, &line, &error)) fail_with(&error);
        if (!line.text) return false;
    } while (strspn(line.text, " \t\r") == line.length);
    cJSON *json = json_parse(line.text, line.length, (JsonPlace){path, line.number, line.offset}, &error);
    if (!json) {
        error.text[strcspn(error.text, "\n")] = 0;
        fail(EXIT_INPUT, "%s\n  A file of questions has one question per line, as a JSON object.", error.text);
    }
    c->question = make_question(c->e, json, (Where){path, line.number});
    cJSON_Delete(json);
    return true;
}

static void check_unchanged(const Choice *c, bool same) {
    if (!same)
        fail(EXIT_INPUT,
             "%s: the file changed during the evaluation.\n  Evaluate again, and do not change the file meanwhile.",
             c->e->o.data);
}

// After the last question.
static bool same_file(const Choice *c) {
    FileHash found = file_lines_hash(c->lines);
    return found.size == c->file.size && XXH128_isEqual(found.xxh3, c->file.xxh3);
}

// For eval.json.
static void describe_file(const Choice *c) {
    snprintf(c->e->questions, sizeof c->e->questions, "{\"files\": 1, \"questions\": %zu, \"xxh3_128\": \"%s\"}",
             c->question_count, file_hash_text(c->file.xxh3).text);
}

void choice_settle(Choice *c, Eval *e) {
    bool first = !c->question_count;
    *c = (Choice){.e = e, .file = c->file};
    e->work = 0;
    open_lines(c);
    for (; read_question(c); c->question_count++) {
        for (size_t i = 0; i < c->question.count; i++) {
            size_t inputs = c->question.endings[i].count - 1;
            if (inputs > e->longest) e->longest = inputs;
            e->work += inputs;
        }
    }
    if (!c->question_count) fail(EXIT_INPUT, "%s: expected one question per line, found none.", e->o.data);
    if (first) c->file = file_lines_hash(c->lines);
    check_unchanged(c, same_file(c));
    describe_file(c);
}

void choice_close(Choice *c) {
    free_question(&c->question);
    file_lines_close(c->lines);
}

void choice_begin(Choice *c) {
    c->ending = c->right = c->right_norm = c->not_finite = c->judged = 0;
    c->log_likelihoods = cJSON_CreateArray();
    open_lines(c);
}

const ChoiceEnding *choice_next(Choice *c) {
    if (c->ending == 0 && !read_question(c)) {
        check_unchanged(c, same_file(c));
        return NULL;
    }
    const ChoiceEnding *ending = &c->question.endings[c->ending];
    check_unchanged(c, ending->count - 1 <= c->e->longest);    // for which there is memory
    bar_next(&c->e->bar, ending->count - 1);
    return ending;
}

static void judge(Choice *c) {
    const ChoiceQuestion *q = &c->question;
    const ChoiceEnding *a = q->endings;
    size_t best = 0, best_norm = 0;
    bool finite = true;
    cJSON *list = cJSON_CreateArray();
    for (size_t j = 0; j < q->count; j++) finite = finite && isfinite(a[j].log_likelihood);
    eval_count(c->e, finite, c->judged++ + 1);
    c->not_finite += !finite;
    for (size_t j = 1; j < q->count; j++) {
        if (a[j].log_likelihood > a[best].log_likelihood) best = j;
        if (a[j].log_likelihood / (double)a[j].length > a[best_norm].log_likelihood / (double)a[best_norm].length)
            best_norm = j;
    }
    c->right += best == q->gold;
    c->right_norm += best_norm == q->gold;
    for (size_t j = 0; j < q->count; j++) cJSON_AddItemToArray(list, cJSON_CreateNumber(a[j].log_likelihood));
    cJSON_AddItemToArray(c->log_likelihoods, list);
}

void choice_add(Choice *c, double loss) {
    ChoiceQuestion *q = &c->question;
    q->endings[c->ending].log_likelihood = -loss;
    c->e->tokens += q->endings[c->ending].count - 1;
    if (++c->ending < q->count) return;
    judge(c);
    c->ending = 0;
}

// "0.1234", or "n/a" for a NaN.
static const char *error_text(double error, char *out, size_t size) {
    snprintf(out, size, isnan(error) ? "n/a" : "%.4f", error);
    return out;
}

void choice_end(Choice *c) {
    double n = (double)c->question_count, acc = (double)c->right / n, norm = (double)c->right_norm / n;
    char error[32];
    if (c->not_finite) acc = norm = NAN;
    // The standard error of a mean of zeros and ones, as lm_eval gives it: of one question, it has none.
    double acc_error = sqrt(acc * (1 - acc) / (n - 1)), norm_error = sqrt(norm * (1 - norm) / (n - 1));
    bar_end(&c->e->bar);
    printf("%9s %10s %10s %10s\n%9zu %10.4f %10.4f %10s\n", "questions", "acc", "acc_norm", "+-", c->question_count,
           acc, norm, error_text(norm_error, error, sizeof error));
    cJSON *row = eval_row(c->e);
    cJSON_AddNumberToObject(row, "questions", n);
    cJSON_AddNumberToObject(row, "acc", acc);
    cJSON_AddNumberToObject(row, "acc_stderr", acc_error);
    cJSON_AddNumberToObject(row, "acc_norm", norm);
    cJSON_AddNumberToObject(row, "acc_norm_stderr", norm_error);
    cJSON_AddItemToObject(row, "log_likelihoods", c->log_likelihoods);
}
