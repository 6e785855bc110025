#include "runtime/chat.h"

#include <ctype.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/file.h"
#include "runtime/json.h"

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))
#define HEADER(role) "<|start_header_id|>" role "<|end_header_id|>\n\n"
#define SYSTEM_BEGIN "<|im_start|>system"

static const ChatTemplate TEMPLATES[] = {
    {.name = "raw", .begin = "", .system = "", .user = "", .answer = "", .end = "", .after = ""},
    {.name = "chatml",    // SmolLM2, Qwen
     .mark = "<|im_start|>",
     .special = {"<|im_start|>", "<|im_end|>"},
     .begin = "",
     .system = SYSTEM_BEGIN "\n",
     .user = "<|im_start|>user\n",
     .answer = "<|im_start|>assistant\n",
     .end = "<|im_end|>",
     .after = "\n"},
    {.name = "llama3",
     .mark = "<|start_header_id|>",
     .special = {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"},
     .begin = "<|begin_of_text|>",
     .system = HEADER("system"),
     .user = HEADER("user"),
     .answer = HEADER("assistant"),
     .end = "<|eot_id|>",
     .after = "",
     .trims = true},
    {.name = "zephyr",    // also TinyLlama; <|user|> and its like are ordinary text
     .mark = "<|user|>\n' + message['content'] + eos_token",
     .special = {"</s>"},
     .begin = "",
     .system = "<|system|>\n",
     .user = "<|user|>\n",
     .answer = "<|assistant|>\n",
     .end = "</s>",
     .after = "\n"},
};

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
    snprintf(path, sizeof(path), "%s/%s", folder, tokenizer_files[1]);
    if (access(path, F_OK) != 0) { return true; }
    cJSON *json = json_read(path, error);
    const char *found = template_text(cJSON_GetObjectItemCaseSensitive(json, "chat_template"));
    if (found && !(*text = strdup(found))) { error_set(error, EXIT_RESOURCE, "%s: out of memory.", path); }
    bool right = json && (!found || *text);
    cJSON_Delete(json);
    return right;
}

// The length of a newline in a string of Jinja, which may be written as it is or as backslash-n. 0: there is none.
static size_t newline_length(const char *at) {
    if (*at == '\n') { return 1; }
    return strncmp(at, "\\n", 2) == 0 ? 2 : 0;
}

// Does a template have this text at `at`? Jinja knows two spellings of a newline and two quotes.
static bool has_mark(const char *at, const char *mark) {
    for (; *mark; mark++) {
        size_t length = *mark == '\n' ? newline_length(at) : *at == *mark;
        if (*mark == '\'' && *at == '"') { length = 1; }
        if (!length) { return false; }
        at += length;
    }
    return true;
}

// The first template whose mark is in a text, or NULL.
static const ChatTemplate *recognize(const char *text) {
    for (size_t i = 0; i < COUNT(TEMPLATES); i++) {
        for (const char *at = text; TEMPLATES[i].mark && *at; at++) {
            if (has_mark(at, TEMPLATES[i].mark)) { return &TEMPLATES[i]; }
        }
    }
    return NULL;
}

// Copies a string of Jinja, which `quote` ends, up to "<|im_end|>". Returns false if the string ends before, or if an
// expression begins.
static bool copy_system(const char *from, char quote, char *out, size_t size) {
    static const char end[] = "<|im_end|>";
    size_t written = 0;
    for (; strncmp(from, end, strlen(end)) != 0; from++) {
        bool escaped = *from == '\\';
        from += escaped;
        if (!*from || written + 1 >= size || (!escaped && (*from == quote || *from == '{'))) { return false; }
        out[written++] = escaped && *from == 'n' ? '\n' : *from;
    }
    out[written] = 0;
    return written > 0;
}

// Finds the system message that a template of ChatML has as a literal, where there is no other.
static void find_system(const char *text, char *system, size_t size) {
    system[0] = 0;
    for (const char *at = strstr(text, SYSTEM_BEGIN); at; at = strstr(at + 1, SYSTEM_BEGIN)) {
        const char *from = at + strlen(SYSTEM_BEGIN);
        size_t newline = newline_length(from);
        char quote = at > text ? at[-1] : 0;
        if (newline && copy_system(from + newline, quote, system, size)) { return; }
        system[0] = 0;
    }
}

const ChatTemplate *chat_template_in(const char *folder, char *system, size_t size, Error *error) {
    static const char remedy[] = "Name one with --chat chatml, llama3 or zephyr if the model was trained with it, or "
                                 "pass --chat raw to have your text continued.";
    char *text;
    if (!read_template(folder, &text, error)) { return NULL; }
    const ChatTemplate *found = text ? recognize(text) : NULL;
    system[0] = 0;
    if (found) { find_system(text, system, size); }
    if (!found) {
        error_set(error, EXIT_USAGE, "%s: %s.\n  %s", folder,
                  text ? "its chat template is none of those that this program knows"
                       : "expected a chat template in chat_template.jinja or tokenizer_config.json, found none",
                  remedy);
    }
    free(text);
    return found;
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

static void add_special(Writer *w, const char *name) {
    flush(w);
    w->ids = grown(w->ids, (w->count + 1) * sizeof(*w->ids));
    w->ids[w->count++] = tokenizer_special(w->tokenizer, name);
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

static void add_message(Writer *w, const char *before, const char *text, size_t length) {
    add_part(w, before);
    while (w->chat->trims && length && isspace((unsigned char)text[length - 1])) { length--; }
    for (; w->chat->trims && length && isspace((unsigned char)*text); text++) { length--; }
    add_text(w, text, length);
    add_end(w);
}

int32_t *chat_encode(const ChatTemplate *chat, const Tokenizer *tokenizer, ChatTurn turn, size_t *count) {
    Writer w = {.chat = chat, .tokenizer = tokenizer, .place = turn.first ? AT_START : INSIDE};
    if (turn.first) {
        add_part(&w, chat->begin);
    } else {
        add_end(&w);
    }
    if (turn.first && turn.system) { add_message(&w, chat->system, turn.system, strlen(turn.system)); }
    add_message(&w, chat->user, turn.text, turn.length);
    add_part(&w, chat->answer);
    flush(&w);
    free(w.text);
    *count = w.count;
    return w.ids;
}
