// Generates text from a checkpoint and prints it token by token, or holds a conversation. The layers are the
// trainer's (train_gpt2.c), the key-value cache is that of model/decode.h. This file adds prompts, batches of texts,
// turns, and the output to stdout.
#define WITHOUT_MAIN
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"    // only some of the trainer's functions are used here
#include "train_gpt2.c"

#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <unistd.h>

#include "math/random.h"
#include "model/checkpoint.h"
#include "model/decode.h"
#include "runtime/file.h"
#include "runtime/human.h"
#include "runtime/path.h"
#include "runtime/start.h"
#include "runtime/utf8.h"
#include "text/chat.h"
#include "text/sampler.h"
#include "text/tokenizer.h"
#pragma GCC diagnostic pop

typedef enum { SAMPLE_FP32, SAMPLE_BF16 } SampleType;

// What a conversation remembers by default, if the model was trained on longer texts.
enum { DEFAULT_CONTEXT = 8192 };
enum { PROMPT_BYTES = 64 << 20 };    // the longest --prompt-file and standard input
static const char CHATS[] = "auto|raw|chatml|qwen3|llama3|llama3.1|llama3.2|zephyr";

typedef struct {
    const char *model, *attn, *ignore_config_key, *prompt, *prompt_file, *system;
    TextList stop;
    int64_t max_new_tokens, top_k, seed, num_samples, threads, context;
    int dtype, chat;
    bool interactive;
    double temperature, top_p;
} SampleOptions;

typedef struct {
    const char *text;    // as given
    size_t length;
    int32_t *ids;
    size_t count;
} Prompt;

// The text of the tokens so far, up to the first of the --stop texts.
typedef struct {
    char *text;
    size_t length, room, printed;
    bool stopped;
} Written;

// A text that is being generated: sample number `sample` of a prompt. It occupies one sequence of the decoder's cache.
typedef struct {
    size_t prompt, sample;
    int32_t *ids;    // sampled so far; has room for max_new_tokens
    size_t count;
    Written written;    // the text of these ids, if there is a tokenizer
    bool done;
} Text;

typedef struct {
    SampleOptions o;
    Model model;
    AttentionList saved;    // of the checkpoint
    Decoder decoder;
    Tokenizer *tokenizer;    // NULL: prompts and texts are token ids
    Prompt *prompts;
    size_t prompt_count;
    Text texts[FEW_ROWS];    // the texts that are being generated together
    int32_t *sampled;        // (FEW_ROWS, max_new_tokens)
    Candidate *candidates;
    float *after_prompt;         // (V): the logits after the last prompt that was read
    const ChatTemplate *chat;    // of a conversation
    const char *system;          // its system message; empty: none
    size_t context, turns;       // the most tokens that it has; how many answers were given in it
    Written reply;               // its last answer
    Utf8Printer out;
    size_t current, shown;         // the text that is being printed, and how many of its ids have been
    bool begun;                    // has its prompt been printed?
    size_t longest;                // the longest text, including its prompt
    size_t read, sampled_count;    // tokens so far: of prompts, and sampled
    double reading, sampling;      // the seconds that they took
} Sampler;

// ---- flags and checkpoint

static const OptionsHelp HELP = {
    .usage =
        "Usage: sample_gpt2 --model DIR [flags]\n\n"
        "Prints each prompt and its continuation to stdout, and the speed to stderr. If there are several texts, a "
        "line\n\"---- prompt P, sample S\" precedes each. With --interactive, it prints only the answers.",
    .example = "--model out/quickstart --prompt \"The king is\" --max-new-tokens 100 --temperature 0.8",
    .page = "sampling.md"};

static void parse_flags(SampleOptions *o, int argc, char **argv) {
    *o = (SampleOptions){
        .max_new_tokens = 256, .temperature = 0.9, .top_k = 50, .top_p = 1, .seed = 1337, .num_samples = 1};
    Option table[] = {
        {"model", OPT_TEXT, &o->model, .any_bytes = true, .arg = "DIR", .group = "Model", .required = true,
         .help =
             "folder of a checkpoint, of a run (uses its newest checkpoint), or of a Hugging Face model (Llama, Mistral, Qwen2 or Qwen3)"},
        {"attn", OPT_TEXT, &o->attn, .arg = "NAME", .group = "Model",
         .help =
             "use another normalizer, or a list for the layers, instead of the checkpoint's; `--attn help` lists them"},
        {"ignore-config-key", OPT_TEXT, &o->ignore_config_key, .arg = "NAME[,...]", .group = "Model",
         .help = "unknown keys in config.json to ignore"},
        {"prompt", OPT_TEXT, &o->prompt, .any_bytes = true, .arg = "TEXT", .group = "Text",
         .help =
             "the text to continue (without this flag: end-of-text); -: read it from stdin; without a tokenizer: token ids 1,2,3"},
        {"prompt-file", OPT_TEXT, &o->prompt_file, .any_bytes = true, .arg = "F", .group = "Text",
         .help = "a file with one prompt per line; blank lines are ignored"},
        {"max-new-tokens", OPT_INT, &o->max_new_tokens, 1, MAX_SEQ_LEN, .arg = "N", .group = "Text",
         .help = "maximum number of tokens after a prompt; a text also ends at end-of-text"},
        {"num-samples", OPT_INT, &o->num_samples, 1, 1e6, .arg = "N", .group = "Text", .help = "texts per prompt"},
        {"stop", OPT_TEXT_LIST, &o->stop, .any_bytes = true, .arg = "TEXT", .group = "Text",
         .help = "a text or an answer ends before this text; repeat the flag for several"},
        {"interactive", OPT_SWITCH, &o->interactive, .group = "Conversation",
         .help = "answer each line of stdin; Ctrl-C stops an answer, Ctrl-D ends"},
        {"chat", OPT_CHOICE, &o->chat, .choices = CHATS, .group = "Conversation",
         .help = "the chat template; auto: the model's own; raw: continue the text so far"},
        {"system", OPT_TEXT, &o->system, .any_bytes = true, .arg = "TEXT", .group = "Conversation",
         .help = "the system message, in place of the template's own"},
        {"context", OPT_INT, &o->context, 0, MAX_SEQ_LEN, .arg = "N", .group = "Conversation",
         .help = "tokens of a conversation; 0: the length that the model was trained with, at most 8192"},
        {"temperature", OPT_FLOAT, &o->temperature, 0, 100, .arg = "X", .group = "Sampling",
         .help = "divides the logits; 0: always the most likely token"},
        {"top-k", OPT_INT, &o->top_k, 0, MAX_VOCAB, .arg = "N", .group = "Sampling",
         .help = "sample from the N most likely tokens; 0: all"},
        {"top-p", OPT_FLOAT, &o->top_p, 0, 1, .arg = "X", .group = "Sampling",
         .help = "then only from the fewest most likely tokens whose probabilities sum to X; 1: all"},
        {"seed", OPT_INT, &o->seed, 0, 9007199254740992.0, .arg = "N", .group = "Sampling",
         .help = "the same seed generates the same texts"},
        {"dtype", OPT_CHOICE, &o->dtype, .choices = "fp32|bf16", .group = "Machine",
         .help =
             "fp32: weights in float32; bf16: rounded to bfloat16 for matmuls, in half the memory; sums stay float32"},
        {"threads", OPT_INT, &o->threads, 0, MAX_THREADS, .arg = "N", .group = "Machine", .help = THREADS_HELP},
    };
    options_parse(table, sizeof table / sizeof *table, argc, argv, HELP);
    if (o->attn && normalizer_help(o->attn)) exit(EXIT_DONE);
    if (!o->model) fail(EXIT_USAGE, "--model is missing: name the folder of a checkpoint or a run.");
    if (o->prompt && o->prompt_file) fail(EXIT_USAGE, "--prompt and --prompt-file cannot be used together.");
    if (o->interactive && (o->prompt || o->prompt_file || o->num_samples > 1))
        fail(EXIT_USAGE,
             "--interactive reads from stdin: omit --prompt, --prompt-file and --num-samples, or --interactive.");
    if (!o->interactive && (o->chat || o->system || o->context))
        fail(EXIT_USAGE, "--chat, --system and --context need --interactive.");
    for (size_t i = 0; i < o->stop.count; i++)
        if (!*o->stop.values[i]) fail(EXIT_USAGE, "--stop is empty: expected a text that ends what is generated.");
    if (o->context && o->context <= o->max_new_tokens)
        fail(EXIT_USAGE, "--context %lld: expected more than --max-new-tokens, which is %lld.", (long long)o->context,
             (long long)o->max_new_tokens);
}

// Reads the model's shape, its normalizer, and the tokenizer, which is the same for all checkpoints of a run.
static bool read_config(Sampler *s, const char *folder, Error *error) {
    ModelConfig *config = &s->model.config;
    char message[1024];
    if (!model_config_read(config, folder, s->o.ignore_config_key, error)) return false;
    s->saved = config->attn;
    if (s->o.attn) {
        if (!attention_parse(&config->attn, s->o.attn, config->layers, message, sizeof message))
            fail(EXIT_USAGE, "--attn %.400s: %s.", s->o.attn, message);
        attention_warn_of_unused("--attn", s->o.attn, config->layers);
        attention_warn_of_start(&s->saved, &config->attn, config->layers, "--attn", s->o.attn);
        fprintf(stderr, "sample_gpt2: --attn %s; the checkpoint was trained with %s", s->o.attn, s->saved.text);
        const Tensor t = {.scalar = SCALAR_S, .layer = 0};
        if (config->attn.count == 1 && tensor_exists(&t, &config->attn) && !tensor_keeps(&t, &s->saved, &config->attn))
            fprintf(stderr, ": s = %.4f in every head", tensor_start(&t, config));
        fprintf(stderr, "\n");
    }
    bool has_tokenizer = access(folder_path(folder, tokenizer_files[0]).text, F_OK) == 0;
    int vocab, end_of_text;
    if (checkpoint_vanished(folder))
        return error_set(error, EXIT_INPUT, "%s: it was deleted while being read.", folder);
    const char *no_stop = s->o.stop.count ? "\n  --stop needs one that this program supports." : NULL;
    if (!has_tokenizer && no_stop)
        fail(EXIT_INPUT, "%s: expected a %s, found none.%s", folder, tokenizer_files[0], no_stop);
    if (!has_tokenizer || s->tokenizer || (s->tokenizer = tokenizer_open(folder, error))) return true;
    if (error->code != EXIT_INPUT || !tokenizer_ids(folder, &vocab, &end_of_text)) return false;
    if (s->o.interactive || no_stop)
        fail(EXIT_INPUT, "%s%s", error->text,
             no_stop ? no_stop : "\n  --interactive needs one that this program supports.");
    if (!s->prompt_count) warn("%s\n  Prompts and texts are token ids instead.", error->text);
    return true;
}

// ---- prompts

// Parses token ids "1,2,3". Returns false if there is anything else.
static bool read_ids(Prompt *p, size_t vocab) {
    const char *at = p->text, *end = p->text + p->length;
    while (at < end) {
        char *after;
        long id = strtol(at, &after, 10);
        if (after == at || after > end || id < 0 || (size_t)id >= vocab) return false;
        p->ids[p->count++] = (int32_t)id;
        at = after + strspn(after, " ");
        if (at < end && *at++ != ',') return false;
        if (at == end && at[-1] == ',') return false;
    }
    return true;
}

// The tokens of a prompt: as in transformers, with the tokenizer's token in front of a text.
static void encode_prompt(const Sampler *s, Prompt *p, const char *where, ExitCode code) {
    Error error;
    int32_t begins = tokenizer_begins(s->tokenizer);
    if (begins >= 0) p->ids[p->count++] = begins;
    p->count += tokenizer_encode(s->tokenizer, p->text, p->length, p->ids + p->count, tokenizer_capacity(p->length));
    if (tokenizer_fits(s->tokenizer, p->ids, p->count, s->model.config.vocab, where, &error)) return;
    error.code = code;
    fail_with(&error);
}

// Adds a prompt. `where` names it in messages. The text must remain valid, with a 0 byte somewhere after its end.
static void add_prompt(Sampler *s, const char *text, size_t length, const char *where, ExitCode code) {
    s->prompts = realloc(s->prompts, (s->prompt_count + 1) * sizeof *s->prompts);
    int32_t *ids = malloc((1 + tokenizer_capacity(length)) * sizeof *ids);
    if (!s->prompts || !ids) fail(EXIT_RESOURCE, "%s: out of memory for the prompts.", where);
    Prompt *p = &s->prompts[s->prompt_count++];
    *p = (Prompt){text, length, ids, 0};
    if (s->tokenizer) encode_prompt(s, p, where, code);
    else if (!read_ids(p, s->model.config.vocab))
        fail(code,
             "%s: expected comma-separated token ids below %zu, such as 1,2,3, found \"%.*s\".\n"
             "  The model's folder has no tokenizer.json that this program supports.",
             where, s->model.config.vocab, (int)(length < 40 ? length : 40), text);
    if (!p->count) p->ids[p->count++] = s->model.config.end_of_text;
    if (p->count + (size_t)s->o.max_new_tokens > MAX_SEQ_LEN)
        fail(code, "%s: %zu tokens plus --max-new-tokens %lld exceed the limit of %d.", where, p->count,
             (long long)s->o.max_new_tokens, MAX_SEQ_LEN);
}

static void read_prompt_file(Sampler *s) {
    Error error;
    size_t size, line = 1;
    char where[PATH_MAX], *text = file_read_stream(s->o.prompt_file, PROMPT_BYTES, &size, &error);
    if (!text) fail_with(&error);
    for (char *at = text; at < text + size; line++) {
        char *end = memchr(at, '\n', (size_t)(text + size - at)), *next = end ? end + 1 : text + size;
        if (!end) end = text + size;
        if (end > at && end[-1] == '\r') end--;
        snprintf(where, sizeof where, "%s: line %zu", s->o.prompt_file, line);
        if (end > at) add_prompt(s, at, (size_t)(end - at), where, EXIT_INPUT);
        at = next;
    }
    if (!s->prompt_count) fail(EXIT_INPUT, "%s: expected one prompt per line, found none.", s->o.prompt_file);
}

// --prompt -: stdin is a single prompt. A final newline (\n or \r\n) is dropped.
static void read_stdin(Sampler *s) {
    Error error;
    size_t length;
    char *text = file_read_stream(NULL, PROMPT_BYTES, &length, &error);
    if (!text) fail_with(&error);
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

// The template and the length of a conversation.
static void settle_conversation(Sampler *s, const char *folder) {
    const SampleOptions *o = &s->o;
    Error error;
    char name[16];
    const char *at = CHATS;
    for (int i = 0; i < o->chat; i++) at = strchr(at, '|') + 1;
    snprintf(name, sizeof name, "%.*s", (int)strcspn(at, "|"), at);
    s->chat = o->chat ? chat_template(name) : chat_template_in(folder, &s->system, &error);
    if (!s->chat) fail_with(&error);
    if (!s->tokenizer)
        fail(EXIT_INPUT, "%s: expected a tokenizer.json, which --interactive needs, found none.", folder);
    const char *missing = chat_missing(s->chat, s->tokenizer);
    if (missing)
        fail(EXIT_USAGE, "--chat %s: the tokenizer in %s has no special token %s. Use --chat raw, or another template.",
             s->chat->name, folder, missing);
    if (o->system && !*s->chat->system) fail(EXIT_USAGE, "--system: --chat raw has no system message.");
    if (o->system) s->system = o->system;
    size_t count;
    ChatTurn empty = {.first = true, .system = s->system && *s->system ? s->system : NULL, .text = ""};
    int32_t *ids = chat_encode(s->chat, s->tokenizer, empty, &count);
    if (!tokenizer_fits(s->tokenizer, ids, count, s->model.config.vocab, "the chat template", &error))
        fail_with(&error);
    free(ids);
    size_t most = s->model.config.seq_len;
    if (o->context) s->context = (size_t)o->context;
    else s->context = most < DEFAULT_CONTEXT ? most : DEFAULT_CONTEXT;
    if (s->context <= (size_t)o->max_new_tokens)
        fail(EXIT_USAGE,
             "--max-new-tokens %lld: expected fewer than the %zu tokens of a conversation.\n"
             "  Pass a smaller --max-new-tokens, or a larger --context.",
             (long long)o->max_new_tokens, s->context);
}

static size_t text_count(const Sampler *s) {
    return s->prompt_count * (size_t)s->o.num_samples;
}

static bool load(Sampler *s, const char *folder, Error *error) {
    Model *m = &s->model;
    size_t sequences = smaller(text_count(s), FEW_ROWS), longest = 0, new_tokens = (size_t)s->o.max_new_tokens;
    if (s->o.interactive) {
        settle_conversation(s, folder);
        sequences = 1;
        longest = s->context - new_tokens;
    }
    for (size_t i = 0; i < s->prompt_count; i++)
        if (s->prompts[i].count > longest) longest = s->prompts[i].count;
    size_t read = s->o.interactive ? s->context : longest + new_tokens - 1;    // a conversation reads its last token
    if (attention_p_keys(&m->config.attn, read) > m->config.seq_len)
        fail(
            EXIT_USAGE,
            "a prompt of %zu tokens plus --max-new-tokens %zu with %s: p_n is only learned for n up to %zu.\n  Reduce --max-new-tokens, or shorten the prompt.",
            longest, new_tokens, m->config.attn.text, m->config.seq_len);
    m->list = tensors_of(&m->config, NULL, 0);
    plan_parameters(m, false, s->o.dtype == SAMPLE_BF16 || weights_are_bf16(&m->config, folder));
    gemm_start(&m->mm, s->o.dtype == SAMPLE_BF16);
    // An answer may be withdrawn, and a prompt be copied from a text of an earlier write_texts(), which has grown.
    size_t back = s->o.interactive || text_count(s) > FEW_ROWS ? new_tokens : 0;
    plan_decoder(&s->decoder, m, &m->plan, sequences, longest + new_tokens, back);
    memory_add(&m->plan, "texts", (void **)&s->sampled, sequences * new_tokens * sizeof(int32_t));
    memory_add(&m->plan, "scratch", (void **)&s->candidates, m->config.vocab * sizeof *s->candidates);
    memory_add(&m->plan, "scratch", (void **)&s->after_prompt, FLOATS(m->config.vocab));
    m->plan.remedy = s->o.interactive ? "Use a smaller --context." : "Use a smaller --max-new-tokens.";
    memory_check(&m->plan, 1);
    memory_take(&m->plan);
    Weights weights = weights_of(m);
    if (!weights_load(&weights, folder, &s->saved, error)) return false;
    round_parameters(m);
    decoder_ready(&s->decoder);
    return true;
}

// Finds and loads the checkpoint. If it is deleted meanwhile, because its run is pruning, tries again with a newer one.
static void open_checkpoint(Sampler *s) {
    char folder[PATH_MAX];
    Error error;
    for (int attempt = 1;; attempt++) {
        if (!checkpoint_find("--model", s->o.model, folder, sizeof folder, &error)) fail_with(&error);
        if (read_config(s, folder, &error)) {
            if (!s->prompt_count && !s->o.interactive) read_prompts(s);
            if (load(s, folder, &error)) return;
        }
        if (attempt == CHECKPOINT_ATTEMPTS || !checkpoint_vanished(folder)) fail_with(&error);
        memory_release(&s->model.plan);
        free(s->decoder.caches);
        s->decoder.caches = NULL;
        tensors_free(&s->model.list);
        gemm_end(&s->model.mm);
    }
}

// ---- the text of the tokens

// Where a --stop text that ends at or after byte `end` may begin.
static size_t stop_start(const Sampler *s, size_t end) {
    size_t longest = 0;
    for (size_t j = 0; j < s->o.stop.count; j++)
        if (strlen(s->o.stop.values[j]) > longest) longest = strlen(s->o.stop.values[j]);
    return end > longest ? end - longest : 0;
}

// The first place in the text, from byte `from` on, where one of the --stop texts begins, or the text's length; with
// `partly` also where one may begin that continues after the text.
static size_t find_stop(const Sampler *s, const char *text, size_t from, size_t length, bool partly) {
    for (size_t i = from; s->o.stop.count && i < length; i++)
        for (size_t j = 0; j < s->o.stop.count; j++) {
            size_t size = strlen(s->o.stop.values[j]), here = size < length - i ? size : length - i;
            if ((partly || here == size) && !memcmp(text + i, s->o.stop.values[j], here)) return i;
        }
    return length;
}

// Appends a token's bytes. `first`: it begins a text, so that its first space may be the tokenizer's.
static void write_token(Sampler *s, Written *w, int32_t id, bool first) {
    size_t length = 0;
    const char *bytes = s->tokenizer ? tokenizer_token(s->tokenizer, id, &length) : NULL;
    if (first && length && *bytes == ' ' && tokenizer_adds_space(s->tokenizer)) {
        bytes++;
        length--;
    }
    if (w->length + length >= w->room) {
        w->room = 2 * (w->length + length) + 256;
        if (!(w->text = realloc(w->text, w->room))) fail(EXIT_RESOURCE, "out of memory for a text.");
    }
    if (length) memcpy(w->text + w->length, bytes, length);
    size_t end = w->length + length;
    w->length = find_stop(s, w->text, stop_start(s, w->length), end, false);
    w->stopped = w->length < end;
}

// Prints what is new in a text. What may be the start of a --stop text waits until it is known, or the text is done.
static void print_written(Sampler *s, Written *w, bool done) {
    size_t from = stop_start(s, w->length), end = w->length;
    if (!done) end = find_stop(s, w->text, from > w->printed ? from : w->printed, w->length, true);
    utf8_print(&s->out, w->text + w->printed, end - w->printed);
    w->printed = end;
}

// ---- printing

static void put_prompt(Sampler *s, const Text *t) {
    const Prompt *p = &s->prompts[t->prompt];
    if (text_count(s) > 1) printf("---- prompt %zu, sample %zu\n", t->prompt + 1, t->sample + 1);
    if (s->tokenizer) utf8_print(&s->out, p->text, p->length);
    for (size_t i = 0; !s->tokenizer && i < p->count; i++) printf("%s%d", i ? "," : "", p->ids[i]);
}

// Prints what is new in the first `count` texts. The text s->current is printed as it grows; later ones wait until it
// is done.
static void show(Sampler *s, size_t count) {
    for (; s->current < count; s->current++) {
        Text *t = &s->texts[s->current];
        if (!s->begun) {
            put_prompt(s, t);
            s->begun = true;
            s->shown = 0;
        }
        for (; !s->tokenizer && s->shown < t->count; s->shown++) printf(",%d", t->ids[s->shown]);
        print_written(s, &t->written, t->done);
        if (!t->done) break;
        utf8_print_end(&s->out);
        printf("\n");
        s->begun = false;
    }
    flush_stdout("the text");
}

// ---- generating

// Draws the token at a position of a text from the random stream with this number.
static int32_t draw_token(Sampler *s, float *logits, uint64_t stream, size_t count, size_t position) {
    const SampleOptions *o = &s->o;
    double u = random_uniform((uint64_t)o->seed, stream, count);
    int32_t token =
        sample_token(logits, s->candidates, s->model.config.vocab, o->temperature, (size_t)o->top_k, o->top_p, u);
    if (token >= 0) return token;
    if (s->begun) printf("\n");
    fail(EXIT_DIVERGED,
         "under %s, the logits after %zu token%s are not finite or all equal, so no token can be sampled.\n  %s",
         s->model.config.attn.text, position, position == 1 ? "" : "s",
         s->o.attn ? "The activations overflow under this --attn. Omit it, or use another normalizer."
                   : "The activations overflow: training has probably diverged. Use an earlier checkpoint.");
}

// Samples the next token. Sample i uses random stream i, independently of the other texts.
static void sample(Sampler *s, Text *t, float *logits) {
    size_t prompt = s->prompts[t->prompt].count;
    int32_t token = draw_token(s, logits, t->sample, t->count, prompt + t->count);
    s->sampled_count++;
    if (model_ends_text(&s->model.config, token)) {
        t->done = true;
        return;
    }
    write_token(s, &t->written, token, !t->count && !s->prompts[t->prompt].length);
    t->ids[t->count++] = token;
    t->done = t->written.stopped || t->count == (size_t)s->o.max_new_tokens;
}

// Generates the next token of each unfinished text. Returns false if all texts are finished.
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
    for (size_t i = 0; i < going; i++) sample(s, texts[i], logits + i * s->model.config.vocab);
    return true;
}

// Copies the cache of sequence `from`, up to position `count`, to sequence `to`.
static void copy_sequence(Decoder *d, size_t from, size_t to, size_t count) {
    const ModelConfig *c = &d->m->config;
    size_t heads = c->kv_heads, HS = head_size(c), VS = value_size(c);
    for (size_t l = 0; l < c->layers; l++) {
        size_t base = (size_t)*base_of(d, l, from), rows = count - base, kept = d->caches[l].kept;
        *base_of(d, l, to) = (int32_t)base;
        for (size_t h = 0; h < heads; h++) {
            size_t old = cached_row(d, l, from, base) + h * kept, new = cached_row(d, l, to, base) + h * kept;
            memcpy(d->k + new * HS, d->k + old * HS, FLOATS(rows * HS));
            memcpy(d->v + new * VS, d->v + old * VS, FLOATS(rows * VS));
        }
    }
    d->starts[to] = d->starts[from];
}

// Feeds the prompt of text i to sequence i and returns the logits after it. Samples of one prompt follow one another:
// it is read for the first of them, and copied from the text before for each of the others.
static float *read_prompt(Sampler *s, size_t i) {
    const Text *t = &s->texts[i];
    const Prompt *p = &s->prompts[t->prompt];
    float *logits = s->decoder.logits + i * s->model.config.vocab;
    size_t bytes = FLOATS(s->model.config.vocab);
    if (t->sample) {
        copy_sequence(&s->decoder, i ? i - 1 : FEW_ROWS - 1, i, p->count);
        return memcpy(logits, s->after_prompt, bytes);
    }
    double start = now();
    decode_prompt(&s->decoder, p->ids, p->count, i);
    s->reading += now() - start;
    s->read += p->count;
    memcpy(s->after_prompt, logits, bytes);
    return logits;
}

// Generates the texts `first` to `first + count - 1` together.
static void write_texts(Sampler *s, size_t first, size_t count) {
    size_t samples = (size_t)s->o.num_samples;
    for (size_t i = 0; i < count; i++)
        s->texts[i] = (Text){.prompt = (first + i) / samples,
                             .sample = (first + i) % samples,
                             .ids = s->sampled + i * (size_t)s->o.max_new_tokens,
                             .written = {.text = s->texts[i].written.text, .room = s->texts[i].written.room}};
    s->current = 0;
    for (size_t i = 0; i < count; i++) {
        show(s, i + 1);
        sample(s, &s->texts[i], read_prompt(s, i));
    }
    double start = now();
    do show(s, count);
    while (advance(s, count));
    s->sampling += now() - start;
    for (size_t i = 0; i < count; i++) {
        size_t length = s->prompts[s->texts[i].prompt].count + s->texts[i].count;
        if (length > s->longest) s->longest = length;
    }
}

// ---- a conversation

// Ctrl-C stops an answer. While a line is awaited, it ends the program.
static volatile sig_atomic_t awaiting_line, interrupted;

static void on_interrupt(int number) {
    (void)number;
    if (awaiting_line) _exit(EXIT_DONE);    // everything has been printed
    interrupted = 1;
}

// Reads a line without its end. Returns NULL at the end of input. From here to the next call, Ctrl-C stops the answer,
// and a second one has its usual effect.
static char *read_line(size_t *length) {
    struct sigaction action = {.sa_handler = on_interrupt, .sa_flags = (int)SA_RESETHAND};
    char *line = NULL;
    size_t room = 0;
    bool asked = isatty(STDIN_FILENO) && isatty(STDERR_FILENO);
    interrupted = 0;
    awaiting_line = 1;
    sigaction(SIGINT, &action, NULL);
    if (asked) fprintf(stderr, "> ");
    ssize_t count = getline(&line, &room, stdin);
    awaiting_line = 0;
    if (count < 0 && asked) fprintf(stderr, "\n");
    if (count < 0 && ferror(stdin)) fail(EXIT_INPUT, "--interactive: cannot read stdin: %s.", strerror(errno));
    while (count > 0 && strchr("\r\n", line[count - 1])) count--;
    *length = count > 0 ? (size_t)count : 0;
    if (count < 0) free(line);
    return count < 0 ? NULL : line;
}

// Prints the answer that follows `logits`, at position `from`. Returns the position after its last token, which is not
// in the cache if the answer is cut off.
static size_t answer(Sampler *s, float *logits, size_t from) {
    size_t at = from;
    int32_t end = chat_end(s->chat, s->tokenizer);
    Written *reply = &s->reply;
    *reply = (Written){.text = reply->text, .room = reply->room};
    s->begun = true;
    while (at < from + (size_t)s->o.max_new_tokens && !interrupted) {
        int32_t id = draw_token(s, logits, s->turns, at, at);
        if (id == end || model_ends_text(&s->model.config, id)) break;
        write_token(s, reply, id, at == from && *s->chat->answer);
        print_written(s, reply, false);
        flush_stdout("the text");
        if (reply->stopped) break;
        decode(&s->decoder, &(DecodeRow){id, 0, at++}, 1);
        logits = decode_logits(&s->decoder, 0, 1, 0);
    }
    print_written(s, reply, true);
    utf8_print_end(&s->out);
    printf("\n");
    flush_stdout("the text");
    s->turns++;
    return at;
}

// The tokens of a message, which are to follow `used` others. If they and an answer do not fit, the conversation starts
// over: *used becomes 0.
static int32_t *take_turn(const Sampler *s, ChatTurn turn, size_t *used, size_t *count) {
    size_t room = s->context - (size_t)s->o.max_new_tokens;
    turn.first = !*used;
    int32_t *ids = chat_encode(s->chat, s->tokenizer, turn, count);
    Error error;
    bool fits = tokenizer_fits(s->tokenizer, ids, *count, s->model.config.vocab, "the message", &error);
    if (fits && *used + *count <= room) return ids;
    free(ids);
    if (!fits) {
        warn("%s", error.text);
        return NULL;
    }
    if (!*used) {
        warn(
            "the message takes %zu tokens with its chat template; expected at most %zu. Shorten it, or pass a larger --context.",
            *count, room);
        return NULL;
    }
    warn("this message and its answer would exceed %zu tokens (--context); the conversation starts over with it.",
         s->context);
    *used = 0;
    return take_turn(s, turn, used, count);
}

static void converse(Sampler *s) {
    size_t used = 0, length, count;
    ChatTurn turn = {.system = s->system && *s->system ? s->system : NULL};
    bool first = true;
    for (char *line; (line = read_line(&length)); free(line)) {
        size_t mark = first ? file_mark(line, length) : 0;
        first = false;
        turn.text = line + mark;
        turn.length = length - mark;
        int32_t *ids = turn.length ? take_turn(s, turn, &used, &count) : NULL;
        if (!ids) continue;
        size_t last = decode_span(&s->decoder, ids, count, 0, used) - 1, from = used + count;
        used = answer(s, decode_logits(&s->decoder, last, 1, 0), from);
        turn.answer_length = s->reply.length;
        turn.answer = chat_kept(s->chat, s->reply.text ? s->reply.text : "", &turn.answer_length);
        if (turn.answer_length == s->reply.length && !s->reply.stopped) turn.answer = NULL;    // its tokens stay
        else used = from;
        free(ids);
    }
    free(s->reply.text);
}

// The first token of each text comes from its prompt's logits, and does not count in the speed of writing.
static void report_speed(const Sampler *s) {
    size_t decoded = s->sampled_count - text_count(s);
    fprintf(stderr, "sample_gpt2: read %s token%s in %.2f s, %.1f tokens/s", human_grouped(s->read).text,
            s->read == 1 ? "" : "s", s->reading, (double)s->read / s->reading);
    if (decoded)
        fprintf(stderr, "; then wrote %s in %.2f s, %.1f tokens/s", human_grouped(s->sampled_count).text, s->sampling,
                (double)decoded / s->sampling);
    fprintf(stderr, "\n");
}

int main(int argc, char **argv) {
    static Sampler s;
    s.out = utf8_printer(stdout);
    start_program("sample_gpt2");
    parse_flags(&s.o, argc, argv);
    start_threads(s.o.threads);
    open_checkpoint(&s);
    if (s.o.interactive) converse(&s);
    for (size_t first = 0; first < text_count(&s); first += FEW_ROWS)
        write_texts(&s, first, smaller(text_count(&s) - first, FEW_ROWS));
    flush_stdout("the text");
    if (s.longest > s.model.config.seq_len)
        warn("a text of %zu tokens exceeds the length of %zu with which the model was trained.", s.longest,
             s.model.config.seq_len);
    if (!s.o.interactive) report_speed(&s);
    return EXIT_DONE;
}
