#include "text/chat.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <xxhash.h>

#include "runtime/file.h"
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

// The published templates: the XXH3 hash of the Jinja text without newlines at its end, and the system message with
// which a conversation begins that has none. Files have the newlines in its strings as such or as escapes.
// clang-format off
#define SMOLLM2 "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
#define QWEN2   "You are a helpful assistant"
#define QWEN25  "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
static const struct {
    const char *name;
    uint64_t hash;
    const char *system;
} PUBLISHED[] = {
    {"chatml",   0xa04f41d813a07b13, ""},       // ChatML
    {"chatml",   0x4c6e807ee5fe9f4a, ""},       // ChatML; escapes
    {"chatml",   0xda206a9e46a4ac01, ""},       // ChatML, unset
    {"chatml",   0x846f9032c2079ea2, ""},       // ChatML, unset; escapes
    {"chatml",   0x99ab995e9629dacd, SMOLLM2},  // SmolLM2
    {"chatml",   0x83059ddcb62b07a0, SMOLLM2},  // SmolLM2; escapes
    {"chatml",   0x20f20c2b5139eaee, QWEN2},    // Qwen2
    {"chatml",   0x8dc1c6775f9ced80, QWEN2},    // Qwen2; escapes
    {"chatml",   0x2469c9508f79506e, QWEN25},   // Qwen2.5
    {"chatml",   0x8fb5d937b1e8f5d0, ""},       // Qwen3-2507
    {"qwen3",    0xc9e0155c80737cf2, ""},       // Qwen3
    {"qwen3",    0x19d8702fd872dc04, ""},       // Qwen3, first
    {"llama3",   0x9799ad6e2dea0594, ""},       // Llama 3
    {"llama3",   0x866fc8fa50da12fe, ""},       // Llama 3; escapes
    {"llama3",   0xb97891b7adc1beb8, ""},       // Llama 3, first
    {"llama3",   0x80e4830e93c6d9f7, ""},       // Llama 3, first; escapes
    {"llama3.1", 0x6ca7779b7730196a, ""},       // Llama 3.1, 3.3
    {"llama3.2", 0xc3d57e38f5ff0756, ""},       // Llama 3.2
    {"zephyr",   0x1db34e9fc60441d8, ""},       // Zephyr, TinyLlama
    {"zephyr",   0xd9fe74edcb57aa82, ""},       // Zephyr, TinyLlama; escapes
};
// clang-format on

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
    for (size_t i = 0; i < COUNT(TEMPLATES); i++)
        if (strcmp(TEMPLATES[i].name, name) == 0) return &TEMPLATES[i];
    return NULL;
}

const char *chat_missing(const ChatTemplate *chat, const Tokenizer *tokenizer) {
    for (size_t i = 0; i < COUNT(chat->special) && chat->special[i]; i++)
        if (tokenizer_special(tokenizer, chat->special[i]) < 0) return chat->special[i];
    return NULL;
}

int32_t chat_end(const ChatTemplate *chat, const Tokenizer *tokenizer) {
    return tokenizer_special(tokenizer, chat->end);
}

// ---- recognizing a template

// The text of a chat_template in tokenizer_config.json: a string, or the one named "default" of a list. Or NULL.
static const char *template_text(const cJSON *item) {
    const cJSON *entry;
    if (!cJSON_IsArray(item)) return cJSON_GetStringValue(item);
    cJSON_ArrayForEach(entry, item) {
        const char *name = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(entry, "name"));
        if (name && strcmp(name, "default") == 0)
            return cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(entry, "template"));
    }
    return NULL;
}

// Reads the Jinja template of a folder into new memory, or sets *text to NULL if there is none. Returns false on error.
static bool read_template(const char *folder, char **text, Error *error) {
    char path[PATH_MAX];
    size_t size;
    *text = NULL;
    snprintf(path, sizeof(path), "%s/chat_template.jinja", folder);
    if (access(path, F_OK) == 0) return (*text = file_read(path, TEMPLATE_BYTES, &size, error)) != NULL;
    snprintf(path, sizeof(path), "%s/%s", folder, tokenizer_files[TOKENIZER_SETTINGS]);
    if (access(path, F_OK) != 0) return true;
    cJSON *json = json_read(path, JSON_LARGE, error);
    const char *found = template_text(cJSON_GetObjectItemCaseSensitive(json, "chat_template"));
    if (found && !(*text = strdup(found))) error_set(error, EXIT_RESOURCE, "%s: out of memory.", path);
    bool right = json && (!found || *text);
    cJSON_Delete(json);
    return right;
}

// The row of PUBLISHED with this hash, or -1.
static int published(uint64_t hash) {
    for (size_t i = 0; i < COUNT(PUBLISHED); i++)
        if (PUBLISHED[i].hash == hash) return (int)i;
    return -1;
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
    if (access(path, F_OK) != 0) return true;
    cJSON *json = json_read(path, JSON_LARGE, error);
    bool right = json != NULL;
    for (size_t i = 0; right && i < COUNT(tokens); i++) {
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, tokens[i].key);
        const char *name = token_name(item);
        if (!*tokens[i].name || !item || (name && strcmp(name, tokens[i].name) == 0)) continue;
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
        if (!strstr(text, FAMILIES[i].mark)) continue;
        snprintf(like, sizeof(like), " with %s, as in those of %s", FAMILIES[i].mark, FAMILIES[i].whose);
    }
    if (text) {
        error_set(error, EXIT_USAGE,
                  "%s: unknown chat template (hash 0x%016llx)%s. It may write a conversation in another way than the "
                  "templates that this program has.\n  %s",
                  folder, (unsigned long long)hash, like, remedy);
    } else {
        error_set(error, EXIT_USAGE,
                  "%s: expected a chat template in chat_template.jinja or tokenizer_config.json, found none.\n  %s",
                  folder, remedy);
    }
}

const ChatTemplate *chat_template_in(const char *folder, const char **system, Error *error) {
    char *text;
    *system = "";
    if (!read_template(folder, &text, error)) return NULL;
    size_t length = text ? strlen(text) : 0;
    while (length && text[length - 1] == '\n') length--;
    uint64_t hash = XXH3_64bits(text, length);
    int row = text ? published(hash) : -1;
    const ChatTemplate *found = row >= 0 ? chat_template(PUBLISHED[row].name) : NULL;
    if (!found) reject(folder, text, hash, error);
    free(text);
    if (!found || !has_its_tokens(found, folder, error)) return NULL;
    *system = PUBLISHED[row].system;
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
    while (at < end && is_space(utf8_get(at, (size_t)(end - at), &width))) at += width;
    const uint8_t *last = at;
    for (const uint8_t *next = at; next < end; next += width)
        if (!is_space(utf8_get(next, (size_t)(end - next), &width))) last = next + width;
    *length = (size_t)(last - at);
    return (const char *)at;
}

const char *chat_kept(const ChatTemplate *chat, const char *answer, size_t *length) {
    static const char end[] = "</think>";
    size_t thought = 0;
    for (size_t i = strlen(end); chat->forgets_thoughts && i <= *length; i++)
        if (memcmp(answer + i - strlen(end), end, strlen(end)) == 0) thought = i;
    while (thought && thought < *length && answer[thought] == '\n') thought++;
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
    if (!memory) fail(EXIT_RESOURCE, "out of memory for a message.");
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
    if (!w->length) return;
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
            if (strncmp(part, w->chat->special[i], size) != 0) continue;
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
    if (w->chat->trims) text = trim(text, &length);
    add_text(w, text, length);
    add_end(w);
}

static void add_system(Writer *w, const char *text) {
    if (!text && !w->chat->preface) return;
    add_part(w, w->chat->system);
    if (w->chat->preface) add_preface(w);
    add_message(w, text ? text : "", text ? strlen(text) : 0);
}

int32_t *chat_encode(const ChatTemplate *chat, const Tokenizer *tokenizer, ChatTurn turn, size_t *count) {
    Writer w = {.chat = chat, .tokenizer = tokenizer, .place = turn.first ? AT_START : INSIDE};
    if (turn.first) {
        int32_t begins = chat->begins ? tokenizer_begins(tokenizer) : -1;
        if (begins >= 0) add_id(&w, begins);
        add_part(&w, chat->begin);
        add_system(&w, turn.system);
    } else {
        if (turn.answer) add_text(&w, turn.answer, turn.answer_length);
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
