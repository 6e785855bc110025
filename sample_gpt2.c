// Writes text from a checkpoint: prompt in, continuation out as it comes. The layers and the key-value cache are the
// trainer's, train_gpt2.c section 5; here are prompts, texts in the making, and what goes to stdout.
#define WITHOUT_MAIN
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"    // of the trainer's layers only some serve here
#include "train_gpt2.c"

#include <errno.h>
#include <limits.h>
#include <unistd.h>

#include "run/checkpoint.h"
#include "runtime/file.h"
#include "runtime/human.h"
#include "runtime/random.h"
#include "runtime/sampler.h"
#include "runtime/start.h"
#include "runtime/tokenizer.h"
#pragma GCC diagnostic pop

typedef struct {
    const char *model, *attn, *ignore_config_key, *prompt, *prompt_file;
    int64_t max_new_tokens, top_k, seed, num_samples, threads;
    double temperature, top_p;
} SampleOptions;

typedef struct {
    const char *text;    // as it was given
    size_t length;
    int32_t *ids;
    size_t count;
} Prompt;

// One text in the making: sample number `sample` of a prompt, in a sequence of the decoder's cache.
typedef struct {
    size_t prompt, sample;
    int32_t *ids;    // drawn so far; its room is max_new_tokens
    size_t count;
    bool done;
} Text;

// Bytes of UTF-8 on their way to stdout: a character goes out when it is whole.
typedef struct {
    unsigned char bytes[4], low, high;    // low..high: what the next byte may be
    size_t have, need;
} Utf8;

typedef struct {
    SampleOptions o;
    Model model;
    Normalizer saved;    // the checkpoint's own
    Decoder decoder;
    Tokenizer *tokenizer;    // NULL: prompts and texts are token ids
    Prompt *prompts;
    size_t prompt_count;
    Text texts[FEW_ROWS];    // those being written at a time
    int32_t *drawn;          // (FEW_ROWS, max_new_tokens)
    Utf8 utf8;
    size_t current, shown;     // the text that stdout stands in, and how many of its ids are there
    bool begun;                // is its prompt there?
    size_t tokens, longest;    // drawn in all; the longest text, with its prompt
} Sampler;

// ---- what is to be done

static bool has_file(const char *folder, const char *name) {
    char path[PATH_MAX + 64];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return access(path, F_OK) == 0;
}

static void parse_flags(SampleOptions *o, int argc, char **argv) {
    *o = (SampleOptions){
        .max_new_tokens = 256, .temperature = 0.9, .top_k = 50, .top_p = 1, .seed = 1337, .num_samples = 1};
    Option table[] = {
        {"model", OPT_TEXT, &o->model, .arg = "DIR", .group = "Model",
         .help = "a checkpoint's folder, or a run's: then its newest checkpoint"},
        {"attn", OPT_TEXT, &o->attn, .arg = "NAME", .group = "Model",
         .help = "another attention normalizer than the checkpoint's; `--attn help` lists them"},
        {"ignore-config-key", OPT_TEXT, &o->ignore_config_key, .arg = "NAME[,...]", .group = "Model",
         .help = "keys of config.json that are not known here and change nothing"},
        {"prompt", OPT_TEXT, &o->prompt, .arg = "TEXT", .group = "Text",
         .help =
             "how the text begins; -: read it from stdin; none: end-of-text. Without a tokenizer, token ids: 1,2,3"},
        {"prompt-file", OPT_TEXT, &o->prompt_file, .arg = "F", .group = "Text",
         .help = "a file of prompts, one a line; blank lines are left out"},
        {"max-new-tokens", OPT_INT, &o->max_new_tokens, 1, MAX_SEQ_LEN, .arg = "N", .group = "Text",
         .help = "most tokens after a prompt; end-of-text ends a text before"},
        {"num-samples", OPT_INT, &o->num_samples, 1, 1e6, .arg = "N", .group = "Text", .help = "texts for each prompt"},
        {"temperature", OPT_FLOAT, &o->temperature, 0, 100, .arg = "X", .group = "Drawing",
         .help = "divides the logits; 0: always the likeliest token"},
        {"top-k", OPT_INT, &o->top_k, 0, MAX_VOCAB, .arg = "N", .group = "Drawing",
         .help = "draw among the N likeliest tokens; 0: all"},
        {"top-p", OPT_FLOAT, &o->top_p, 0, 1, .arg = "X", .group = "Drawing",
         .help = "and among the fewest that have this much of their probability; 1: all"},
        {"seed", OPT_INT, &o->seed, 0, 9007199254740992.0, .arg = "N", .group = "Drawing",
         .help = "the same seed draws the same texts"},
        {"threads", OPT_INT, &o->threads, 0, MAX_THREADS, .arg = "N", .group = "Machine", .help = THREADS_HELP},
    };
    options_parse(
        table, sizeof table / sizeof *table, argc, argv,
        "Usage: sample_gpt2 --model DIR [flags]\n\nWrites each prompt and its continuation to stdout, the speed to stderr. Several texts have a line\n"
        "\"---- prompt P, sample S\" above each.");
    if (o->attn && normalizer_help(o->attn)) exit(EXIT_DONE);
    if (!o->model) fail(EXIT_USAGE, "--model is missing: the folder of a checkpoint or of a run.");
    if (o->prompt && o->prompt_file) fail(EXIT_USAGE, "--prompt and --prompt-file: give one of them.");
}

static void find_checkpoint(const char *given, char *folder, size_t size) {
    uint64_t step;
    snprintf(folder, size, "%s", given);
    if (has_file(given, "config.json") || checkpoint_newest(given, folder, size, &step)) return;
    fail(EXIT_INPUT,
         "--model %s: expected a checkpoint's folder (with config.json) or a run's (with ckpt/step-*), found neither.",
         given);
}

// The model's shape, its normalizer, and the tokenizer, which is the same in all checkpoints of a run.
static bool read_config(Sampler *s, const char *folder, Error *error) {
    ModelConfig *config = &s->model.config;
    char message[1024];
    if (!model_config_read(config, folder, s->o.ignore_config_key, error)) return false;
    s->saved = config->attn;
    if (s->o.attn) {
        if (!normalizer_parse(&config->attn, s->o.attn, message, sizeof message))
            fail(EXIT_USAGE, "--attn %s: %s.", s->o.attn, message);
        fprintf(stderr, "sample_gpt2: --attn %s; the checkpoint was trained with %s", s->o.attn, s->saved.text);
        if (normalizer_has(&config->attn, SCALAR_S) && !normalizer_keeps(&s->saved, &config->attn, SCALAR_S))
            fprintf(stderr, ": s = %.4f in all heads", normalizer_start(&config->attn, SCALAR_S, config->seq_len));
        fprintf(stderr, "\n");
    }
    bool has_tokenizer = has_file(folder, tokenizer_files[0]);
    int vocab, end_of_text;
    if (checkpoint_vanished(folder))
        return error_set(error, EXIT_INPUT, "%s: it was removed while it was read.", folder);
    if (!has_tokenizer) return true;
    if (!s->tokenizer && !(s->tokenizer = tokenizer_open(folder, error))) {
        if (error->code != EXIT_INPUT || !tokenizer_ids(folder, &vocab, &end_of_text)) return false;
        if (!s->prompt_count) warn("%s\n  Prompts and texts are token ids instead.", error->text);
        return true;
    }
    if (tokenizer_vocab(s->tokenizer) > config->vocab)
        return error_set(error, EXIT_INPUT, "%s: its tokenizer has %d tokens, the model a vocabulary of %d.", folder,
                         tokenizer_vocab(s->tokenizer), config->vocab);
    config->end_of_text = tokenizer_end_of_text(s->tokenizer);
    return true;
}

// ---- prompts

// Token ids "1,2,3" in place of text. False where there is something else.
static bool read_ids(Prompt *p, int vocab) {
    const char *at = p->text, *end = p->text + p->length;
    while (at < end) {
        char *after;
        long id = strtol(at, &after, 10);
        if (after == at || after > end || id < 0 || id >= vocab) return false;
        p->ids[p->count++] = (int32_t)id;
        at = after + strspn(after, " ");
        if (at < end && *at++ != ',') return false;
        if (at == end && at[-1] == ',') return false;
    }
    return true;
}

// Adds a prompt; `where` names it in messages. The text must stay, with a 0 byte somewhere after its end.
static void add_prompt(Sampler *s, const char *text, size_t length, const char *where, ExitCode code) {
    s->prompts = realloc(s->prompts, (s->prompt_count + 1) * sizeof *s->prompts);
    int32_t *ids = malloc((3 * length + 1) * sizeof *ids);
    if (!s->prompts || !ids) fail(EXIT_RESOURCE, "%s: out of memory for the prompts.", where);
    Prompt *p = &s->prompts[s->prompt_count++];
    *p = (Prompt){text, length, ids, 0};
    if (s->tokenizer) p->count = tokenizer_encode(s->tokenizer, text, length, ids, 3 * length);
    else if (!read_ids(p, s->model.config.vocab))
        fail(code,
             "%s: expected token ids below %d with commas between, such as 1,2,3, found \"%.*s\".\n"
             "  The model's folder has no tokenizer.json that this program can read text with.",
             where, s->model.config.vocab, (int)(length < 40 ? length : 40), text);
    if (!p->count) p->ids[p->count++] = s->model.config.end_of_text;
    if (p->count + (size_t)s->o.max_new_tokens > MAX_SEQ_LEN)
        fail(code, "%s: %zu tokens and --max-new-tokens %lld are more than %d together.", where, p->count,
             (long long)s->o.max_new_tokens, MAX_SEQ_LEN);
}

static void read_prompt_file(Sampler *s) {
    Error error;
    size_t size, line = 1;
    char where[PATH_MAX], *text = file_read(s->o.prompt_file, 64 << 20, &size, &error);
    if (!text) fail_with(&error);
    for (char *at = text; at < text + size; line++) {
        char *end = memchr(at, '\n', (size_t)(text + size - at)), *next = end ? end + 1 : text + size;
        if (!end) end = text + size;
        if (end > at && end[-1] == '\r') end--;
        snprintf(where, sizeof where, "%s: line %zu", s->o.prompt_file, line);
        if (end > at) add_prompt(s, at, (size_t)(end - at), where, EXIT_INPUT);
        at = next;
    }
    if (!s->prompt_count) fail(EXIT_INPUT, "%s: expected prompts, one a line, found none.", s->o.prompt_file);
}

// --prompt -: all of stdin is one prompt, without the newline (\n or \r\n) at its end.
static void read_stdin(Sampler *s) {
    size_t length = 0, room = 1 << 16;
    char *text = malloc(room);
    while (text) {
        length += fread(text + length, 1, room - length - 1, stdin);
        if (length < room - 1) break;
        text = realloc(text, room *= 2);
    }
    if (!text) fail(EXIT_RESOURCE, "--prompt -: out of memory for the prompt.");
    if (ferror(stdin)) fail(EXIT_INPUT, "--prompt -: stdin cannot be read: %s.", strerror(errno));
    if (length && text[length - 1] == '\n') {
        length--;
        if (length && text[length - 1] == '\r') length--;
    }
    text[length] = 0;
    add_prompt(s, text, length, "--prompt -", EXIT_INPUT);
}

static void read_prompts(Sampler *s) {
    const char *prompt = s->o.prompt ? s->o.prompt : "";
    if (s->o.prompt_file) read_prompt_file(s);
    else if (!strcmp(prompt, "-")) read_stdin(s);
    else add_prompt(s, prompt, strlen(prompt), "--prompt", EXIT_USAGE);
}

// ---- memory and weights

static size_t text_count(const Sampler *s) {
    return s->prompt_count * (size_t)s->o.num_samples;
}

static bool load(Sampler *s, const char *folder, Error *error) {
    Model *m = &s->model;
    size_t sequences = text_count(s) < FEW_ROWS ? text_count(s) : FEW_ROWS, longest = 0,
           new_tokens = (size_t)s->o.max_new_tokens;
    for (size_t i = 0; i < s->prompt_count; i++)
        if (s->prompts[i].count > longest) longest = s->prompts[i].count;
    if (normalizer_has(&m->config.attn, SCALAR_P) && longest + new_tokens - 1 > (size_t)m->config.seq_len)
        fail(EXIT_USAGE, "a prompt of %zu tokens and --max-new-tokens %zu under %s: p_n is learned for n up to %d.",
             longest, new_tokens, m->config.attn.text, m->config.seq_len);
    m->list = tensors_of(&m->config, NULL, 0);
    plan_parameters(m, false, false);
    plan_decoder(&s->decoder, m, &m->plan, sequences, longest + new_tokens);
    memory_add(&m->plan, "texts", (void **)&s->drawn, sequences * new_tokens * sizeof(int32_t));
    if ((double)m->plan.total > (double)memory_available())
        fail(EXIT_RESOURCE,
             "this needs %s of memory, and %s is free: %zu text%s at a time, of up to %zu tokens.\n"
             "  A smaller --max-new-tokens needs less.",
             human_bytes((double)m->plan.total).text, human_bytes((double)memory_available()).text, sequences,
             sequences == 1 ? "" : "s", longest + new_tokens);
    memory_take(&m->plan);
    Weights weights = weights_of(m);
    if (!weights_load(&weights, folder, &s->saved, error)) return false;
    decoder_ready(&s->decoder);
    return true;
}

// Finds and loads the checkpoint; another one where that of a run is pruned meanwhile.
static void open_checkpoint(Sampler *s) {
    char folder[PATH_MAX];
    Error error;
    for (int attempt = 1;; attempt++) {
        find_checkpoint(s->o.model, folder, sizeof folder);
        if (read_config(s, folder, &error)) {
            if (!s->prompt_count) read_prompts(s);
            if (load(s, folder, &error)) return;
        }
        if (attempt == CHECKPOINT_ATTEMPTS || !checkpoint_vanished(folder)) fail_with(&error);
        memory_release(&s->model.plan);
        tensors_free(&s->model.list);
    }
}

// ---- to stdout

// A sequence that cannot become a character any more is shown as U+FFFD, as Python's errors="replace" does.
static void utf8_end(Utf8 *u) {
    if (u->have) fputs("\xEF\xBF\xBD", stdout);
    u->have = 0;
}

static void utf8_put(Utf8 *u, unsigned char c) {
    if (u->have && (c < u->low || c > u->high)) utf8_end(u);
    bool first = !u->have;
    if (first)
        u->need = c < 0x80                 ? 1
                  : c >= 0xC2 && c <= 0xDF ? 2
                  : c >= 0xE0 && c <= 0xEF ? 3
                  : c >= 0xF0 && c <= 0xF4 ? 4
                                           : 0;
    u->low = first && c == 0xE0 ? 0xA0 : first && c == 0xF0 ? 0x90 : 0x80;    // no overlong forms,
    // No surrogates, nothing above U+10FFFF.
    u->high = first && c == 0xED ? 0x9F : first && c == 0xF4 ? 0x8F : 0xBF;
    u->bytes[u->have++] = c;
    if (!u->need) utf8_end(u);
    if (u->have == u->need) fwrite(u->bytes, 1, u->have, stdout), u->have = 0;
}

static void put_token(Sampler *s, int32_t id) {
    size_t length = 0;
    const char *bytes = s->tokenizer ? tokenizer_token(s->tokenizer, id, &length) : NULL;
    if (!s->tokenizer) printf(",%d", id);
    for (size_t i = 0; i < length; i++) utf8_put(&s->utf8, (unsigned char)bytes[i]);
}

static void put_prompt(Sampler *s, const Text *t) {
    const Prompt *p = &s->prompts[t->prompt];
    if (text_count(s) > 1) printf("---- prompt %zu, sample %zu\n", t->prompt + 1, t->sample + 1);
    for (size_t i = 0; s->tokenizer && i < p->length; i++) utf8_put(&s->utf8, (unsigned char)p->text[i]);
    for (size_t i = 0; !s->tokenizer && i < p->count; i++) printf("%s%d", i ? "," : "", p->ids[i]);
}

// Shows what is new of the first `count` texts: the one at s->current grows as it comes, those behind it wait until it
// is done.
static void show(Sampler *s, size_t count) {
    for (; s->current < count; s->current++) {
        const Text *t = &s->texts[s->current];
        if (!s->begun) put_prompt(s, t), s->begun = true, s->shown = 0;
        for (; s->shown < t->count; s->shown++) put_token(s, t->ids[s->shown]);
        if (!t->done) break;
        utf8_end(&s->utf8);
        printf("\n");
        s->begun = false;
    }
    fflush(stdout);
}

// ---- texts

// Draws the next token. Sample i has stream i of the random numbers, whatever stands beside it.
static void draw(Sampler *s, Text *t, float *logits) {
    const SampleOptions *o = &s->o;
    double u = random_uniform((uint64_t)o->seed, t->sample, t->count);
    int32_t token = sample_token(logits, (size_t)s->model.config.vocab, o->temperature, (size_t)o->top_k, o->top_p, u);
    s->tokens++;
    if (token == s->model.config.end_of_text) {
        t->done = true;
        return;
    }
    t->ids[t->count++] = token;
    t->done = t->count == (size_t)o->max_new_tokens;
}

// One token more for each text that is not done. False when all are.
static bool advance(Sampler *s, size_t count) {
    DecodeRow rows[FEW_ROWS];
    Text *texts[FEW_ROWS];
    size_t going = 0;
    for (size_t i = 0; i < count; i++) {
        Text *t = &s->texts[i];
        if (t->done) continue;
        texts[going] = t;
        rows[going++] = (DecodeRow){t->ids[t->count - 1], i, s->prompts[t->prompt].count + t->count - 1};
    }
    if (!going) return false;
    decode(&s->decoder, rows, going);
    float *logits = decode_logits(&s->decoder, 0, going, 0);
    for (size_t i = 0; i < going; i++) draw(s, texts[i], logits + i * (size_t)s->model.config.vocab);
    return true;
}

// The texts number `first` to `first + count - 1`, together.
static void write_texts(Sampler *s, size_t first, size_t count) {
    size_t samples = (size_t)s->o.num_samples;
    for (size_t i = 0; i < count; i++)
        s->texts[i] = (Text){.prompt = (first + i) / samples,
                             .sample = (first + i) % samples,
                             .ids = s->drawn + i * (size_t)s->o.max_new_tokens};
    s->current = 0;
    for (size_t i = 0; i < count; i++) {
        const Prompt *p = &s->prompts[s->texts[i].prompt];
        show(s, i + 1);
        draw(s, &s->texts[i], decode_prompt(&s->decoder, p->ids, p->count, i));
    }
    do show(s, count);
    while (advance(s, count));
    for (size_t i = 0; i < count; i++) {
        size_t length = s->prompts[s->texts[i].prompt].count + s->texts[i].count;
        if (length > s->longest) s->longest = length;
    }
}

int main(int argc, char **argv) {
    static Sampler s;
    start_program("sample_gpt2");
    parse_flags(&s.o, argc, argv);
    start_threads(s.o.threads);
    open_checkpoint(&s);
    double start = now();
    for (size_t first = 0; first < text_count(&s); first += FEW_ROWS)
        write_texts(&s, first, text_count(&s) - first < FEW_ROWS ? text_count(&s) - first : FEW_ROWS);
    if (fflush(stdout) != 0 || ferror(stdout))
        fail(EXIT_RESOURCE, "stdout: the text could not be written: %s.", strerror(errno));
    if (s.longest > (size_t)s.model.config.seq_len)
        warn("a text of %zu tokens goes beyond the %d that the model was trained with.", s.longest,
             s.model.config.seq_len);
    double seconds = now() - start;
    fprintf(stderr, "sample_gpt2: %s token%s in %.2f s, %.1f tokens/s\n", human_grouped(s.tokens).text,
            s.tokens == 1 ? "" : "s", seconds, (double)s.tokens / seconds);
    return EXIT_DONE;
}
