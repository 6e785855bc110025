#include "runtime/chat.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <xxhash.h>

#include "runtime/file.h"
#include "runtime/jinja.h"
#include "runtime/json.h"
#include "runtime/utf8.h"

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))
#define HEADER(role) "<|start_header_id|>" role "<|end_header_id|>\n\n"

#define CHATML                                                                                                         \
    .special = {"<|im_start|>", "<|im_end|>"}, .begin = "", .system = "<|im_start|>system\n",                          \
    .user = "<|im_start|>user\n", .answer = "<|im_start|>assistant\n", .end = "<|im_end|>", .after = "\n"
#define LLAMA3                                                                                                         \
    .special = {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"},                        \
    .begin = "<|begin_of_text|>", .system = HEADER("system"), .user = HEADER("user"), .answer = HEADER("assistant"),   \
    .end = "<|eot_id|>", .after = "", .trims = true

static const ChatTemplate TEMPLATES[] = {
    {.name = "raw", .begin = "", .system = "", .user = "", .answer = "", .end = "", .after = "", .begins = true},
    {.name = "chatml", CHATML},    // SmolLM2, Qwen2, Qwen2.5, Qwen3-2507
    {.name = "qwen3", CHATML, .forgets_thoughts = true},
    {.name = "llama3", LLAMA3},
    {.name = "llama3.1", LLAMA3, .preface = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"},
    {.name = "llama3.2", LLAMA3, .preface = "Cutting Knowledge Date: December 2023\nToday Date: %d %b %Y\n\n"},
    {.name = "zephyr",    // also TinyLlama; <|user|> and its like are ordinary text
     .special = {"</s>"},
     .begin = "",
     .system = "<|system|>\n",
     .user = "<|user|>\n",
     .answer = "<|assistant|>\n",
     .end = "</s>",
     .ends_text = true,
     .after = "\n"},
};

// The published templates, by the XXH3 hash of their canonical form without the default system message.
static const struct {
    const char *name;
    uint64_t hash;
} PUBLISHED[] = {
    {"chatml", 0x6121c477d8a4f085},      // ChatML alone
    {"chatml", 0xb4bdf1d318979232},      // after a statement that sets add_generation_prompt
    {"chatml", 0x3776391f32ac2d9c},      // SmolLM2, Qwen2
    {"chatml", 0x01fbbd1141806c81},      // Qwen2.5
    {"chatml", 0x7cb0063fed8841d1},      // Qwen3-2507
    {"qwen3", 0x07f837f1ae9f8a20},       // the first files
    {"qwen3", 0x2ce00fd567fe72a4},       // later ones
    {"llama3", 0x9fb2c5e55883cae8},      // the first files
    {"llama3", 0x74ae7d022604dc42},      // later ones
    {"llama3.1", 0x95c33b1c81cf5bab},    // also Llama 3.3
    {"llama3.2", 0xa46747ea855481cc},    // today's date
    {"zephyr", 0x2f03d1cf1eef1295},      // also TinyLlama
};

// What tells apart the templates that are rejected, for the message. First match wins.
// clang-format off
static const struct {
    const char *mark, *whose;
} FAMILIES[] = {
    {"<|im_sep|>", "Phi-4"},
    {"[INST]", "Mistral and Llama 2"},
    {"<start_of_turn>", "Gemma"},
    {"<think>", "models that think"},
    {"<|im_start|>", "ChatML"},
    {"<|start_header_id|>", "Llama 3"},
    {"<|assistant|>", "Zephyr"},
};
// clang-format on

const ChatTemplate *chat_template(const char *name) {
    for (size_t i = 0; i < COUNT(TEMPLATES); i++) {
        if (strcmp(TEMPLATES[i].name, name) == 0) { return &TEMPLATES[i]; }
    }
    return NULL;
}

const char *chat_missing(const ChatTemplate *chat, const Tokenizer *tokenizer) {
    for (size_t i = 0; i < COUNT(chat->special) && chat->special[i]; i++) {
        if (tokenizer_special(tokenizer, chat->special[i]) < 0) { return chat->special[i]; }
    }
    return NULL;
}

int32_t chat_end(const ChatTemplate *chat, const Tokenizer *tokenizer) {
    return tokenizer_special(tokenizer, chat->end);
}

// ---- recognizing a template

// The text of a chat_template in tokenizer_config.json: a string, or the one named "default" of a list. Or NULL.
static const char *template_text(const cJSON *item) {
    const cJSON *entry;
    if (!cJSON_IsArray(item)) { return cJSON_GetStringValue(item); }
    cJSON_ArrayForEach(entry, item) {
        const char *name = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(entry, "name"));
        if (name && strcmp(name, "default") == 0) {
            return cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(entry, "template"));
        }
    }
    return NULL;
}

// Reads the Jinja template of a folder into new memory, or sets *text to NULL if there is none. Returns false on error.
static bool read_template(const char *folder, char **text, Error *error) {
    char path[PATH_MAX];
    size_t size;
    *text = NULL;
    snprintf(path, sizeof(path), "%s/chat_template.jinja", folder);
    if (access(path, F_OK) == 0) { return (*text = file_read(path, 1 << 20, &size, error)) != NULL; }
    snprintf(path, sizeof(path), "%s/%s", folder, tokenizer_files[TOKENIZER_SETTINGS]);
    if (access(path, F_OK) != 0) { return true; }
    cJSON *json = json_read(path, error);
    const char *found = template_text(cJSON_GetObjectItemCaseSensitive(json, "chat_template"));
    if (found && !(*text = strdup(found))) { error_set(error, EXIT_RESOURCE, "%s: out of memory.", path); }
    bool right = json && (!found || *text);
    cJSON_Delete(json);
    return right;
}

// Moves the system message that a template of ChatML has as a literal out of its canonical form, where \5 takes its
// place. Returns false if it is too long, or has special tokens.
static bool take_system(char *text, char *system, size_t size) {
    static const char begin[] = "\1<|im_start|>system\n", end[] = "<|im_end|>\n\1";
    system[0] = 0;
    for (char *at = strstr(text, begin); at; at = strstr(at, begin)) {
        at += strlen(begin);
        char *last = strstr(at, end);
        if (!last || last == at || memchr(at, 1, (size_t)(last - at))) { continue; }
        size_t length = (size_t)(last - at);
        if (length >= size) { return false; }
        memcpy(system, at, length);
        system[length] = 0;
        if (strstr(system, "<|im_start|>") || strstr(system, "<|im_end|>")) { return false; }
        *at = 5;
        memmove(at + 1, last, strlen(last) + 1);
        break;
    }
    return true;
}

// The template that renders as this Jinja text does, or NULL. Sets *hash to 0 if the text is not understood.
static const ChatTemplate *recognize(const char *text, char *system, size_t size, uint64_t *hash) {
    char *canonical = jinja_canonical(text);
    const ChatTemplate *found = NULL;
    bool right = canonical && take_system(canonical, system, size);
    *hash = right ? XXH3_64bits(canonical, strlen(canonical)) : 0;
    for (size_t i = 0; right && i < COUNT(PUBLISHED); i++) {
        if (PUBLISHED[i].hash == *hash) { found = chat_template(PUBLISHED[i].name); }
    }
    if (!found) { system[0] = 0; }
    free(canonical);
    return found;
}

// The name of a special token in tokenizer_config.json, or NULL: a string, or an object.
static const char *token_name(const cJSON *item) {
    return cJSON_GetStringValue(cJSON_IsObject(item) ? cJSON_GetObjectItemCaseSensitive(item, "content") : item);
}

// Templates write bos_token and eos_token, which are settings: does tokenizer_config.json give them the names that this
// template has? A missing key, or a missing file, says nothing.
static bool has_its_tokens(const ChatTemplate *chat, const char *folder, Error *error) {
    const struct {
        const char *key, *name;
    } tokens[] = {{"bos_token", chat->begin}, {"eos_token", chat->ends_text ? chat->end : ""}};
    char path[PATH_MAX];
    snprintf(path, sizeof(path), "%s/%s", folder, tokenizer_files[TOKENIZER_SETTINGS]);
    if (access(path, F_OK) != 0) { return true; }
    cJSON *json = json_read(path, error);
    bool right = json != NULL;
    for (size_t i = 0; right && i < COUNT(tokens); i++) {
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, tokens[i].key);
        const char *name = token_name(item);
        if (!*tokens[i].name || !item || (name && strcmp(name, tokens[i].name) == 0)) { continue; }
        right = error_set(error, EXIT_USAGE,
                          "%s: \"%s\" is %s%s%s; the chat template \"%s\" is known with \"%s\".\n  If the model was "
                          "trained with that, name the template with --chat.",
                          path, tokens[i].key, name ? "\"" : "", name ? name : "no name", name ? "\"" : "", chat->name,
                          tokens[i].name);
    }
    cJSON_Delete(json);
    return right;
}

static void reject(const char *folder, const char *text, uint64_t hash, Error *error) {
    static const char remedy[] =
        "If the model was trained with a template that this program has, name it with --chat (see --help); or pass "
        "--chat raw to have your text continued.";
    char like[100] = "";
    for (size_t i = 0; text && i < COUNT(FAMILIES) && !*like; i++) {
        if (!strstr(text, FAMILIES[i].mark)) { continue; }
        snprintf(like, sizeof(like), " with %s, as in those of %s", FAMILIES[i].mark, FAMILIES[i].whose);
    }
    if (text) {
        char which[32] = "";    // for a new row of PUBLISHED
        if (hash) { snprintf(which, sizeof(which), " (hash 0x%016llx)", (unsigned long long)hash); }
        error_set(error, EXIT_USAGE,
                  "%s: unknown chat template%s%s. It may write a conversation in another way than the templates that "
                  "this program has.\n  %s",
                  folder, which, like, remedy);
    } else {
        error_set(error, EXIT_USAGE,
                  "%s: expected a chat template in chat_template.jinja or tokenizer_config.json, found none.\n  %s",
                  folder, remedy);
    }
}

const ChatTemplate *chat_template_in(const char *folder, char *system, size_t size, Error *error) {
    char *text;
    uint64_t hash = 0;
    system[0] = 0;
    if (!read_template(folder, &text, error)) { return NULL; }
    const ChatTemplate *found = text ? recognize(text, system, size, &hash) : NULL;
    if (!found) { reject(folder, text, hash, error); }
    if (found && !has_its_tokens(found, folder, error)) { found = NULL; }
    free(text);
    return found;
}

// ---- the text of a message

// Is this white space for Python's str.strip(), which Jinja's trim calls?
static bool is_space(uint32_t c) {
    return (c >= 0x9 && c <= 0xD) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

// Invalid UTF-8 counts as U+FFFD, which is no white space.
static const char *trim(const char *text, size_t *length) {
    const uint8_t *at = (const uint8_t *)text, *end = at + *length;
    size_t width;
    while (at < end && is_space(utf8_get(at, (size_t)(end - at), &width))) { at += width; }
    const uint8_t *last = at;
    for (const uint8_t *next = at; next < end; next += width) {
        if (!is_space(utf8_get(next, (size_t)(end - next), &width))) { last = next + width; }
    }
    *length = (size_t)(last - at);
    return (const char *)at;
}

const char *chat_kept(const ChatTemplate *chat, const char *answer, size_t *length) {
    static const char end[] = "</think>";
    size_t thought = 0;
    for (size_t i = strlen(end); chat->forgets_thoughts && i <= *length; i++) {
        if (memcmp(answer + i - strlen(end), end, strlen(end)) == 0) { thought = i; }
    }
    while (thought && thought < *length && answer[thought] == '\n') { thought++; }
    answer += thought;
    *length -= thought;
    return chat->trims ? trim(answer, length) : answer;
}

// ---- the tokens of a turn

typedef struct {
    const ChatTemplate *chat;
    const Tokenizer *tokenizer;
    char *text;    // since the last special token
    size_t length;
    TextPlace place;    // of that text
    int32_t *ids;
    size_t count;
} Writer;

static void *grown(void *old, size_t size) {
    void *memory = realloc(old, size);
    if (!memory) { fail(EXIT_RESOURCE, "out of memory for a message."); }
    return memory;
}

static void add_text(Writer *w, const char *text, size_t length) {
    w->text = grown(w->text, w->length + length + 1);
    memcpy(w->text + w->length, text, length);
    w->length += length;
}

// Encodes the text so far. What lies between two special tokens is encoded together, as by transformers.
static void flush(Writer *w) {
    size_t room = tokenizer_capacity(w->length);
    if (!w->length) { return; }
    w->ids = grown(w->ids, (w->count + room) * sizeof(*w->ids));
    w->count += tokenizer_encode_at(w->tokenizer, w->place, w->text, w->length, w->ids + w->count, room);
    w->length = 0;
}

static void add_id(Writer *w, int32_t id) {
    w->ids = grown(w->ids, (w->count + 1) * sizeof(*w->ids));
    w->ids[w->count++] = id;
}

static void add_special(Writer *w, const char *name) {
    flush(w);
    add_id(w, tokenizer_special(w->tokenizer, name));
    w->place = AFTER_SPECIAL;
}

// Adds a text of the template, in which special tokens stand by their names.
static void add_part(Writer *w, const char *part) {
    for (size_t length; *part; part += length) {
        const char *special = NULL;
        length = 1;
        for (size_t i = 0; i < COUNT(w->chat->special) && w->chat->special[i]; i++) {
            size_t size = strlen(w->chat->special[i]);
            if (strncmp(part, w->chat->special[i], size) != 0) { continue; }
            special = w->chat->special[i];
            length = size;
        }
        if (special) {
            add_special(w, special);
        } else {
            add_text(w, part, 1);
        }
    }
}

static void add_end(Writer *w) {
    add_part(w, w->chat->end);
    add_part(w, w->chat->after);
}

// Today's date; or that of $SOURCE_DATE_EPOCH, seconds since 1970, in UTC
// (https://reproducible-builds.org/specs/source-date-epoch/).
static struct tm date(void) {
    const char *text = getenv("SOURCE_DATE_EPOCH");
    time_t seconds = text ? (time_t)strtoll(text, NULL, 10) : time(NULL);
    if (!text) return *localtime(&seconds);
    const struct tm *found = gmtime(&seconds);
    if (!found || !*text || text[strspn(text, "0123456789")])
        fail(EXIT_USAGE, "SOURCE_DATE_EPOCH=%s: expected seconds since 1970, such as 1707436800. Correct or unset it.",
             text);
    return *found;
}

// In the C locale, as Python's strftime().
static void add_preface(Writer *w) {
    char text[100];
    struct tm day = date();
    size_t length = strftime(text, sizeof(text), w->chat->preface, &day);
    add_text(w, text, length);
}

static void add_message(Writer *w, const char *text, size_t length) {
    if (w->chat->trims) { text = trim(text, &length); }
    add_text(w, text, length);
    add_end(w);
}

static void add_system(Writer *w, const char *text) {
    if (!text && !w->chat->preface) { return; }
    add_part(w, w->chat->system);
    if (w->chat->preface) { add_preface(w); }
    add_message(w, text ? text : "", text ? strlen(text) : 0);
}

int32_t *chat_encode(const ChatTemplate *chat, const Tokenizer *tokenizer, ChatTurn turn, size_t *count) {
    Writer w = {.chat = chat, .tokenizer = tokenizer, .place = turn.first ? AT_START : INSIDE};
    if (turn.first) {
        int32_t begins = chat->begins ? tokenizer_begins(tokenizer) : -1;
        if (begins >= 0) { add_id(&w, begins); }
        add_part(&w, chat->begin);
        add_system(&w, turn.system);
    } else {
        if (turn.answer) { add_text(&w, turn.answer, turn.answer_length); }
        add_end(&w);
    }
    add_part(&w, chat->user);
    add_message(&w, turn.text, turn.length);
    add_part(&w, chat->answer);
    flush(&w);
    free(w.text);
    *count = w.count;
    return w.ids;
}
