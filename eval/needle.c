#include "eval/needle.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "math/random.h"
#include "runtime/human.h"
#include "runtime/path.h"

// What surrounds the haystack and asks for the number. %s is the city.
static const struct {
    const char *opening;    // a special token that comes first, or NULL for end-of-text
    const char *before;     // the haystack
    const char *question;
    const char *closing;    // a special token after the question, or NULL
    const char *turn;       // another one, after a newline, or NULL
    const char *answer;     // follows
} CHATS[] = {
    // clang-format off
    [CHAT_RAW]    = {NULL, "", "\nWhat is the special magic %s number? The special magic %s number is:", NULL, NULL, ""},
    [CHAT_SQUAD]  = {NULL, "", "\n\nQuestion: What is the special magic %s number?\n\nAnswer:", NULL, NULL, ""},
    [CHAT_CHATML] = {"<|im_start|>", "user\n", "\n\nWhat is the special magic %s number?", "<|im_end|>", "<|im_start|>",
                     "assistant\n"},
    // clang-format on
};
static const char DIGITS[] = "0123456789", NEEDLE[] = "\nThe special magic %s number is:", NUMBER[] = " %s.",
                  NEEDLE_END[] = "\n";

static const char REMEDY[] = "Add data, or reduce --seq-lens.";

enum {
    TEXT = 512,       // bytes of a piece of a prompt that is not haystack
    HAY_BLOCK = 64    // tokens of the data that are read together
};

// ---- prompts

// A special token's id, or a clear error. Without a text: end-of-text.
static int32_t special(const Eval *e, const char *text) {
    if (!text) return e->config->end_of_text;
    int32_t id = tokenizer_special(e->tokenizer, text);
    if (id >= 0 && (size_t)id < e->config->vocab) return id;
    fail(EXIT_USAGE, "--chat chatml: %s: the model has no special token %s. Use --chat raw or squad.", e->folder, text);
}

void needle_close(Needle *n) {
    free(n->hay);
    free(n->tokens);
    free(n->previous);
    free(n->scores);
    free(n->answer_ids);
    free(n->answer);
    shards_close(n->shards);
}

// All random choices of a sample: the same for every length, depth and normalizer.
enum { DRAW_CITY, DRAW_NUMBER, DRAW_HAYSTACK, DRAW_DEPTH, DRAWS };

static uint64_t draw(const Needle *n, int what) {
    return random_u64((uint64_t)n->e->o.seed, n->trial.sample, (uint64_t)what);
}

static void draw_city(const Needle *n, char *out) {
    size_t count = 0, at;
    for (const char *c = cities_text; *c; c++) count += *c == '\n';
    at = draw(n, DRAW_CITY) % count;
    const char *line = cities_text;
    for (; at > 0; at--) line = strchr(line, '\n') + 1;
    snprintf(out, MAX_CITY, "%.*s", (int)strcspn(line, "\n"), line);
}

static void draw_number(const Needle *n, char *out) {
    uint64_t bits = draw(n, DRAW_NUMBER);
    size_t digits = (size_t)n->e->o.digits;
    out[0] = (char)('1' + bits % 9);
    bits /= 9;
    for (size_t i = 1; i < digits; i++, bits /= 10) out[i] = (char)('0' + bits % 10);
    out[digits] = 0;
}

// Text from a random place of the data, which continues at its start after its end; without the end-of-text tokens.
static void read_haystack(Needle *n) {
    const Eval *e = n->e;
    Error error;
    int32_t block[HAY_BLOCK + 1];
    uint64_t first = draw(n, DRAW_HAYSTACK) % n->windows;
    size_t count = 0;
    for (uint64_t i = 0; count < n->longest; i++) {
        if (i == n->windows)
            fail(EXIT_INPUT, "%s: only %zu tokens other than end-of-text; expected %zu.\n  %s", e->o.data, count,
                 n->longest, REMEDY);
        if (!shards_window(n->shards, (first + i) % n->windows, block, NULL, &error)) fail_with(&error);
        for (size_t t = 0; t < HAY_BLOCK; t++)
            if (block[t] != e->config->end_of_text) n->hay[count++] = block[t];
    }
}

static void put(Needle *n, const int32_t *ids, size_t count) {
    memcpy(n->tokens + n->trial.count, ids, count * sizeof *ids);
    n->trial.count += count;
}

static void put_id(Needle *n, int32_t id) {
    put(n, &id, 1);
}

static size_t encode(const Needle *n, int32_t *ids, const char *format, const char *word) {
    char text[TEXT];
    int length = snprintf(text, sizeof text, format, word, word);
    return tokenizer_encode_at(n->e->tokenizer, INSIDE, text, (size_t)length, ids, TEXT);
}

static void put_text(Needle *n, const char *format, const char *word) {
    int32_t ids[TEXT];
    put(n, ids, encode(n, ids, format, word));
}

static void put_question(Needle *n) {
    const Eval *e = n->e;
    put_text(n, CHATS[e->o.chat].question, n->trial.city);
    if (!CHATS[e->o.chat].turn) return;
    put_id(n, n->closing);
    put_text(n, "\n", "");
    put_id(n, n->turn);
    put_text(n, CHATS[e->o.chat].answer, "");
}

// Returns the number of tokens of the needle.
static size_t put_needle(Needle *n) {
    NeedleTrial *t = &n->trial;
    size_t start = t->count;
    put_text(n, NEEDLE, t->city);
    t->number_at = t->count;
    put_text(n, NUMBER, t->number);
    t->number_end = t->count;
    put_text(n, NEEDLE_END, "");
    return t->count - start;
}

// `hay` tokens of haystack, with the needle after the first `before` of them.
static void make_prompt(Needle *n, size_t hay, size_t before) {
    const char *system = n->e->o.system;
    n->trial.count = 0;
    put_id(n, n->opening);
    if (system) {
        put_text(n, "system\n%s", system);
        put_id(n, n->closing);
        put_text(n, "\n", "");
        put_id(n, n->turn);
    }
    put_text(n, CHATS[n->e->o.chat].before, "");
    put(n, n->hay, before);
    put_needle(n);
    put(n, n->hay + before, hay - before);
    put_question(n);
}

// The sample's city and number.
static void name_needle(Needle *n) {
    const EvalOptions *o = &n->e->o;
    NeedleTrial *t = &n->trial;
    if (o->city) snprintf(t->city, sizeof t->city, "%s", o->city);
    else draw_city(n, t->city);
    if (o->number) snprintf(t->number, sizeof t->number, "%s", o->number);
    else draw_number(n, t->number);
}

// ---- settings

// Do the tokens of the text spell it? A byte-level vocabulary may lack some bytes, and text may not be UTF-8.
static bool can_write(const Needle *n, const char *text) {
    int32_t ids[TEXT];
    size_t count = encode(n, ids, "%s", text), length = 0, at = 0;
    for (size_t i = 0; i < count; i++) {
        const char *bytes = tokenizer_token(n->e->tokenizer, ids[i], &length);
        if ((size_t)ids[i] >= n->e->config->vocab) return false;
        if (strlen(text + at) < length || memcmp(bytes, text + at, length) != 0) return false;
        at += length;
    }
    return !text[at];
}

// A tokenizer that cannot write the needle would turn every answer into a wrong one.   name: "city" or "number"
static void check_word(const Needle *n, const char *name, const char *word, bool given) {
    FolderPath path = folder_path(n->e->folder, tokenizer_files[0]);
    if (can_write(n, word)) return;
    if (given) fail(EXIT_USAGE, "--%s %s: %s has no tokens for it. Choose another.", name, word, path.text);
    fail(EXIT_USAGE,
         "%s: it has no tokens for the %s %s, which was drawn for sample %zu.\n"
         "  Set --%s to one that this tokenizer can write, or try another --seed.",
         path.text, name, word, n->trial.sample + 1, name);
}

// Checks a text around the city, the number or the haystack.
static void check_text(const Needle *n, const char *format) {
    char text[TEXT], shown[TEXT];
    snprintf(text, sizeof text, format, n->trial.city, n->trial.city);
    if (can_write(n, text)) return;
    snprintf(shown, sizeof shown, "%s", text + strspn(text, "\n"));
    shown[strcspn(shown, "\n")] = 0;
    fail(EXIT_INPUT,
         "%s: it has no tokens for all of \"%s\", the needle's or the question's text (the city is %s).\n"
         "  This task needs a tokenizer that can write it. Choose another model.",
         folder_path(n->e->folder, tokenizer_files[0]).text, shown, n->trial.city);
}

// Everything that a prompt has beside the haystack.
static void check_texts(const Needle *n) {
    const EvalOptions *o = &n->e->o;
    check_word(n, "city", n->trial.city, o->city);
    check_word(n, "number", n->trial.number, o->number);
    check_text(n, NEEDLE);
    check_text(n, " .\n");
    check_text(n, CHATS[o->chat].before);
    check_text(n, CHATS[o->chat].question);
    check_text(n, CHATS[o->chat].answer);
    if (o->system && !can_write(n, o->system))
        fail(EXIT_USAGE, "--system: %s has no tokens for this text. Choose another.",
             folder_path(n->e->folder, tokenizer_files[0]).text);
}

// The most tokens that a needle has (*needle), and a prompt without its haystack and needle (*frame), over all samples.
static void measure_prompts(Needle *n, size_t *needle, size_t *frame) {
    *needle = *frame = 0;
    for (size_t sample = 0; sample < (size_t)n->e->o.samples; sample++) {
        n->trial = (NeedleTrial){.sample = sample};
        name_needle(n);
        check_texts(n);
        size_t here = put_needle(n);
        make_prompt(n, 0, 0);
        if (here > *needle) *needle = here;
        if (n->trial.count - here > *frame) *frame = n->trial.count - here;
    }
    n->trial = (NeedleTrial){0};
}

static void check_words(const EvalOptions *o) {
    if (o->system && o->chat != CHAT_CHATML) fail(EXIT_USAGE, "--system needs --chat chatml.");
    if (o->system && strlen(o->system) > TEXT / 2)
        fail(EXIT_USAGE, "--system: expected at most %d bytes, found %zu.", TEXT / 2, strlen(o->system));
    if (o->city && (!*o->city || strlen(o->city) >= MAX_CITY))
        fail(EXIT_USAGE, "--city: expected a name of 1 to %d bytes.", MAX_CITY - 1);
    if (o->city && o->city[strcspn(o->city, DIGITS)])
        fail(EXIT_USAGE,
             "--city %s: expected a name without digits. A number in the answer counts as the needle's, which --number "
             "sets.",
             o->city);
    if (o->number && (!*o->number || strlen(o->number) > MAX_DIGITS || o->number[strspn(o->number, DIGITS)]))
        fail(EXIT_USAGE, "--number %s: expected 1 to %d digits.", o->number, MAX_DIGITS);
}

// The lengths of --seq-lens, which must exceed the needle's.
static void read_lengths(Needle *n, size_t needle) {
    n->length_count = eval_lengths(n->e, n->lengths);
    for (size_t i = 0; i < n->length_count; i++) {
        if (n->lengths[i] <= needle)
            fail(EXIT_USAGE, "--seq-lens %zu: too short; the needle alone has up to %zu tokens.", n->lengths[i],
                 needle);
        if (n->lengths[i] > n->longest) n->longest = n->lengths[i];
    }
}

// A haystack is read in blocks of HAY_BLOCK + 1 tokens.
static void open_haystack(Needle *n) {
    Eval *e = n->e;
    Error error;
    ShardsConfig config = {.T = 1, .vocab = e->config->vocab, .end_of_text = e->config->end_of_text, .remedy = REMEDY};
    size_t needed = n->longest > HAY_BLOCK ? n->longest : HAY_BLOCK + 1;
    if (!(n->shards = shards_open(e->o.data, config, &error))) fail_with(&error);
    if (shards_tokens(n->shards) < needed)
        fail(EXIT_INPUT, "%s: too little data: %s tokens; the haystack for contexts of %s needs at least %s.\n  %s",
             e->o.data, human_grouped(shards_tokens(n->shards)).text, human_grouped(n->longest).text,
             human_grouped(needed).text, REMEDY);
    shards_close(n->shards);
    config.T = HAY_BLOCK;
    if (!(n->shards = shards_open(e->o.data, config, &error))) fail_with(&error);
    n->windows = shards_windows(n->shards);
    e->data = n->shards;
    n->hay = allocate(n->longest + HAY_BLOCK, sizeof *n->hay, "the prompts");
    for (n->trial.sample = 0; n->trial.sample < (size_t)e->o.samples; n->trial.sample++) read_haystack(n);    // a check
    n->trial = (NeedleTrial){0};
}

// The most positions that a prompt of this length and its answer need, whose last token is not fed.
static size_t positions_of(const Needle *n, size_t length) {
    return length + n->frame + n->answer_tokens - 1;
}

void needle_settle(Needle *n, Eval *e) {
    const EvalOptions *o = &e->o;
    size_t needle, heads = e->config->layers * e->config->heads;
    *n = (Needle){.e = e, .depth_count = o->random_depth ? 1 : o->depths.count};
    check_words(o);
    n->opening = special(e, CHATS[o->chat].opening);
    n->closing = CHATS[o->chat].closing ? special(e, CHATS[o->chat].closing) : -1;
    n->turn = CHATS[o->chat].turn ? special(e, CHATS[o->chat].turn) : -1;
    n->tokens = allocate(4 * TEXT, sizeof *n->tokens, "the prompts");
    measure_prompts(n, &needle, &n->frame);
    free(n->tokens);
    read_lengths(n, needle);
    open_haystack(n);
    n->answer_tokens = (size_t)o->max_new_tokens;
    size_t digits = o->number ? strlen(o->number) : (size_t)o->digits;
    if (!n->answer_tokens) n->answer_tokens = o->chat == CHAT_CHATML ? 48 : digits + 4;
    n->trials = n->length_count * (size_t)o->samples * n->depth_count;
    e->longest = positions_of(n, n->longest);
    e->work = 0;
    for (size_t i = 0; i < n->length_count; i++) e->work += (uint64_t)o->samples * n->depth_count * n->lengths[i];
    n->tokens = allocate(n->longest + n->frame, sizeof *n->tokens, "the prompts");
    n->previous = allocate(n->longest + n->frame, sizeof *n->previous, "the prompts");
    n->answer_ids = allocate(n->answer_tokens, sizeof *n->answer_ids, "the prompts");
    size_t longest_token = 0, length;
    for (int32_t id = 0; (size_t)id < e->config->vocab; id++)
        if (tokenizer_token(e->tokenizer, id, &length) && length > longest_token) longest_token = length;
    n->answer = allocate(n->answer_tokens * longest_token + 1, 1, "the prompts");
    n->scores = allocate(2 * heads, sizeof *n->scores, "the prompts");
    n->mean_scores = n->scores + heads;
}

// ---- results

static void begin_length(Needle *n) {
    Eval *e = n->e;
    size_t T = n->trial.length;
    RopeAngles angles = eval_angles(e, 0, T);
    n->theta = angles.theta;
    memset(n->right, 0, sizeof n->right);
    memset(n->first_digit, 0, sizeof n->first_digit);
    memset(n->not_finite, 0, sizeof n->not_finite);
    memset(n->mean_scores, 0, e->config->layers * e->config->heads * sizeof *n->mean_scores);
    n->row = eval_row(e);
    cJSON_AddNumberToObject(n->row, "seq_len", (double)T);
    cJSON_AddNumberToObject(n->row, "rope_theta", n->theta);
    n->trial_rows = cJSON_CreateArray();
}

static cJSON *score_rows(const Needle *n, const double *scores, double divisor) {
    cJSON *rows = cJSON_CreateArray();
    size_t heads = n->e->config->heads;
    for (size_t l = 0; l < n->e->config->layers; l++) {
        cJSON *row = cJSON_CreateArray();
        for (size_t h = 0; h < heads; h++)
            cJSON_AddItemToArray(row, cJSON_CreateNumber(scores[l * heads + h] / divisor));
        cJSON_AddItemToArray(rows, row);
    }
    return rows;
}

// The head with the highest mean needle score, if all are finite.
static void print_best_head(const Needle *n, bool finite) {
    size_t heads = n->e->config->heads, all = heads * n->e->config->layers, best = 0;
    double trials = (double)n->e->o.samples * (double)n->depth_count;
    for (size_t i = 1; i < all; i++)
        if (n->mean_scores[i] > n->mean_scores[best]) best = i;
    printf(" %10.4f", shown(finite ? n->mean_scores[best] / trials : NAN));
    if (finite) printf(", layer %zu, head %zu", best / heads, best % heads);
    printf("\n");
}

static void end_length(Needle *n) {
    const EvalOptions *o = &n->e->o;
    double samples = (double)o->samples, right = 0;
    cJSON *depths = cJSON_AddArrayToObject(n->row, "depths");
    bar_clear(&n->e->bar);
    printf("%8zu %10s", n->trial.length, human_count(n->theta).text);
    for (size_t d = 0; d < n->depth_count; d++) {
        cJSON *depth = cJSON_CreateObject();
        double here = n->not_finite[d] ? (double)NAN : (double)n->right[d] / samples;
        if (!o->random_depth) cJSON_AddNumberToObject(depth, "depth", (double)o->depths.values[d]);
        cJSON_AddNumberToObject(depth, "right", here);
        cJSON_AddNumberToObject(depth, "first_digit", n->not_finite[d] ? NAN : (double)n->first_digit[d] / samples);
        cJSON_AddItemToArray(depths, depth);
        printf(" %7.1f%%", shown(100 * here));
        right += here / (double)n->depth_count;
    }
    printf(" %9.1f%%", shown(100 * right));
    print_best_head(n, isfinite(right));
    fflush(stdout);
    cJSON_AddNumberToObject(n->row, "right", right);
    cJSON_AddItemToObject(n->row, "needle_scores", score_rows(n, n->mean_scores, samples * (double)n->depth_count));
    cJSON_AddItemToObject(n->row, "trials", n->trial_rows);
}

static NeedleVerdict verdict(const Needle *n) {
    if (!n->finite) return NEEDLE_NOT_FINITE;
    const char *digits = n->answer + strcspn(n->answer, DIGITS);
    size_t length = strspn(digits, DIGITS);
    if (length == strlen(n->trial.number) && !memcmp(digits, n->trial.number, length)) return NEEDLE_RIGHT;
    return digits[0] == n->trial.number[0] ? NEEDLE_FIRST_DIGIT : NEEDLE_WRONG;
}

static cJSON *int_array(const int32_t *ids, size_t count) {
    return cJSON_CreateIntArray(ids, (int)count);
}

// A line of OUT/prompts.jsonl.
static void save_prompt(const Needle *n) {
    Eval *e = n->e;
    const NeedleTrial *t = &n->trial;
    cJSON *line = cJSON_CreateObject();
    cJSON_AddStringToObject(line, "model", e->name);
    cJSON_AddStringToObject(line, "attn", e->config->attn.text);
    cJSON_AddNumberToObject(line, "seq_len", (double)t->length);
    cJSON_AddNumberToObject(line, "depth", t->depth);
    cJSON_AddNumberToObject(line, "sample", (double)t->sample);
    cJSON_AddItemToObject(line, "number", int_array((int32_t[]){(int32_t)t->number_at, (int32_t)t->number_end}, 2));
    cJSON_AddItemToObject(line, "tokens", int_array(t->tokens, t->count));
    cJSON_AddItemToObject(line, "answer", int_array(n->answer_ids, n->answered));
    char *text = cJSON_PrintUnformatted(line);
    if (!text) fail(EXIT_RESOURCE, "out of memory for prompts.jsonl.");
    if (!e->prompts) e->prompts = eval_file(e, "prompts.jsonl");
    eval_file_write(e->prompts, text, strlen(text));
    eval_file_write(e->prompts, "\n", 1);
    free(text);
    cJSON_Delete(line);
}

static void end_trial(Needle *n) {
    static const char *const NAMES[] = {"wrong", "first digit right", "right", "not finite"};
    const NeedleTrial *t = &n->trial;
    size_t heads = n->e->config->heads, all = heads * n->e->config->layers, best = 0;
    NeedleVerdict result = verdict(n);
    n->right[t->depth_at] += result == NEEDLE_RIGHT;
    n->first_digit[t->depth_at] += result == NEEDLE_FIRST_DIGIT;
    n->not_finite[t->depth_at] += result == NEEDLE_NOT_FINITE;
    eval_count(n->e, n->finite, t->length);
    for (size_t i = 0; i < all; i++) {
        n->mean_scores[i] += n->scores[i];
        if (n->scores[i] > n->scores[best]) best = i;
    }
    cJSON *row = cJSON_CreateObject();
    cJSON_AddNumberToObject(row, "depth", t->depth);
    cJSON_AddNumberToObject(row, "sample", (double)t->sample);
    cJSON_AddStringToObject(row, "city", t->city);
    cJSON_AddStringToObject(row, "number", t->number);
    cJSON_AddItemToObject(row, "answer", n->finite ? cJSON_CreateString(n->answer) : cJSON_CreateNull());
    cJSON_AddStringToObject(row, "verdict", NAMES[result]);
    cJSON_AddNumberToObject(row, "best_score", n->scores[best]);
    cJSON_AddNumberToObject(row, "best_layer", (double)(best / heads));
    cJSON_AddNumberToObject(row, "best_head", (double)(best % heads));
    if (n->trials <= 100) cJSON_AddItemToObject(row, "needle_scores", score_rows(n, n->scores, 1));
    cJSON_AddItemToArray(n->trial_rows, row);
    if (n->e->o.save_prompts) save_prompt(n);
}

void needle_begin(Needle *n) {
    const EvalOptions *o = &n->e->o;
    n->at = 0;
    printf("needles found, %zu for each length and depth, and the head with the highest mean needle score\n%8s %10s",
           (size_t)o->samples, "length", "theta");
    for (size_t d = 0; d < n->depth_count; d++) {
        if (o->random_depth) printf("   random");
        else printf(" %7lld%%", (long long)o->depths.values[d]);
    }
    printf(" %10s %10s\n", "mean", "best head");
}

// Trials go through all depths of a sample, which share the haystack, then through the samples, then the lengths.
static void place_trial(Needle *n) {
    const EvalOptions *o = &n->e->o;
    size_t samples = (size_t)o->samples, each = samples * n->depth_count;
    NeedleTrial *t = &n->trial;
    *t = (NeedleTrial){.length_at = n->at / each,
                       .sample = (n->at / n->depth_count) % samples,
                       .depth_at = n->at % n->depth_count,
                       .tokens = n->tokens};
    t->length = n->lengths[t->length_at];
    t->positions = positions_of(n, t->length);
    if (o->random_depth) t->depth = 100 * random_uniform((uint64_t)o->seed, t->sample, DRAW_DEPTH);
    else t->depth = (double)o->depths.values[t->depth_at];
    name_needle(n);
    if (t->depth_at == 0) read_haystack(n);
    if (n->at % each == 0) begin_length(n);
}

// The number of tokens, in whole blocks, that the prompt shares with the previous one. The last token runs through the
// model in any case: its logits are needed.
static size_t shared_tokens(const Needle *n) {
    size_t shared = 0, most = n->trial.count < n->previous_count ? n->trial.count : n->previous_count;
    while (shared + 1 < most && n->tokens[shared] == n->previous[shared]) shared++;
    return (shared / SHARED_BLOCK) * SHARED_BLOCK;
}

bool needle_next(Needle *n) {
    size_t each = (size_t)n->e->o.samples * n->depth_count;
    if (n->at > 0) {
        end_trial(n);
        if (n->at % each == 0) end_length(n);
    }
    if (n->at == n->trials) {
        bar_end(&n->e->bar);
        return false;
    }
    int32_t *previous = n->previous;
    n->previous = n->tokens;
    n->previous_count = n->trial.count;
    n->tokens = previous;
    place_trial(n);
    size_t needle = put_needle(n), hay = n->trial.length - needle;
    make_prompt(n, hay, (size_t)((double)hay * n->trial.depth / 100));
    n->trial.shared = n->at % each ? shared_tokens(n) : 0;
    n->answer_length = n->answered = 0;
    n->finite = true;
    n->answer[0] = 0;
    n->at++;
    bar_next(&n->e->bar, n->trial.length);
    return true;
}

void needle_weights(Needle *n, const float *weights, size_t stride) {
    size_t heads = n->e->config->layers * n->e->config->heads;
    for (size_t i = 0; i < heads; i++) {
        n->scores[i] = 0;
        for (size_t j = n->trial.number_at; j < n->trial.number_end; j++) n->scores[i] += weights[i * stride + j];
    }
}

// Has a number ended in the answer?
static bool number_ended(const char *answer) {
    const char *digits = answer + strcspn(answer, DIGITS);
    return digits[strspn(digits, DIGITS)] != 0;
}

bool needle_answer(Needle *n, const float *logits) {
    const Eval *e = n->e;
    if (n->answered == n->answer_tokens || number_ended(n->answer)) return false;
    int32_t best = -1;
    size_t length = 0;
    for (int32_t id = 0; (size_t)id < e->config->vocab; id++) {
        n->finite = n->finite && isfinite(logits[id]);
        if (model_ends_text(e->config, id) && id != n->closing) continue;
        if (best < 0 || logits[id] > logits[best]) best = id;
    }
    if (!n->finite) return false;
    n->token = n->answer_ids[n->answered++] = best;
    if (best == n->closing) return false;
    const char *bytes = tokenizer_token(e->tokenizer, best, &length);
    for (size_t i = 0; i < length; i++) {
        bool plain = bytes[i] == '\n' || (bytes[i] >= ' ' && bytes[i] <= '~');
        n->answer[n->answer_length++] = plain ? bytes[i] : '?';    // a token may end within a character
    }
    n->answer[n->answer_length] = 0;
    return n->answered < n->answer_tokens && !number_ended(n->answer);
}
