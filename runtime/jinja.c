#include "runtime/jinja.h"

#include <ctype.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))
enum { MAX_DEPTH = 32, STRING = 1, EXPRESSION, BLOCK, TAG_END };    // bytes that a template may not have

// Conditions that never hold, and a loop that never runs: there are neither tools nor messages with tool calls, and the
// caller of apply_chat_template() does not set enable_thinking. In canonical form.
static const char *const NEVER[] = {
    "tools",
    "custom_tools is defined",
    "builtin_tools is defined",
    "builtin_tools is defined or tools is not none",
    "tools is not none",
    "tools is not none and not tools_in_user_message",
    "tools_in_user_message and not tools is none",
    "message.tool_calls",
    "\1tool_calls\1in message",
    "message.role==\1tool\1",
    "message.role==\1tool\1or message.role==\1ipython\1",
    "enable_thinking is defined and enable_thinking is false",
    "for tool_call in message.tool_calls",
};

// An if or a for that is open.
typedef struct {
    bool muted;      // is its present branch never rendered?
    bool written;    // has one of its branches a condition that was written?
} Frame;

typedef struct {
    char *out, *tag;    // the canonical form so far, and the content of the present tag
    size_t length;
    Frame frames[MAX_DEPTH];
    size_t depth;
} Canon;

static bool is_word(char c) {
    return isalnum((unsigned char)c) || c == '_';
}

static bool is_space(char c) {
    return c == ' ' || c == '\t' || c == '\n';
}

static void write_bytes(Canon *c, const char *bytes, size_t length) {
    for (size_t i = 0; i < c->depth; i++) {
        if (c->frames[i].muted) { return; }
    }
    memcpy(c->out + c->length, bytes, length);
    c->length += length;
}

static void write_tag(Canon *c, char kind, const char *tag) {
    write_bytes(c, &kind, 1);
    write_bytes(c, tag, strlen(tag));
    write_bytes(c, (char[]){TAG_END}, 1);
}

// Is this tag the statement with this name?
static bool is_statement(const char *tag, const char *name) {
    size_t length = strlen(name);
    return strncmp(tag, name, length) == 0 && !is_word(tag[length]);
}

static bool never(const char *condition) {
    condition += *condition == ' ';
    for (size_t i = 0; i < COUNT(NEVER); i++) {
        if (strcmp(condition, NEVER[i]) == 0) { return true; }
    }
    return false;
}

// Writes a statement, without the branches that are never rendered. Returns false if it is not understood.
static bool write_block(Canon *c, const char *tag) {
    Frame *top = c->depth ? &c->frames[c->depth - 1] : NULL;
    bool is_if = is_statement(tag, "if"), is_elif = is_statement(tag, "elif");
    if (is_statement(tag, "raw")) { return false; }
    if (is_if || is_statement(tag, "for")) {
        if (c->depth == MAX_DEPTH) { return false; }
        bool muted = never(is_if ? tag + strlen("if") : tag);
        if (!muted) { write_tag(c, BLOCK, tag); }
        c->frames[c->depth++] = (Frame){.muted = muted, .written = !muted};
        return true;
    }
    if (is_elif || is_statement(tag, "else")) {
        if (!top) { return false; }
        top->muted = is_elif && never(tag + strlen("elif"));
        if (top->muted) { return true; }
        if (is_elif && !top->written) { tag += strlen("el"); }    // the conditions before it never hold
        if (is_elif || top->written) { write_tag(c, BLOCK, tag); }
        top->written |= is_elif;
        return true;
    }
    if (is_statement(tag, "endif") || is_statement(tag, "endfor")) {
        if (!top) { return false; }
        c->depth--;
        if (!top->written) { return true; }
    }
    write_tag(c, BLOCK, tag);
    return true;
}

// Decodes the string that begins at `at` to `out`. Returns what follows it, or NULL if it is not understood.
static const char *read_string(const char *at, char **out) {
    char quote = *at++;
    *(*out)++ = STRING;
    for (; *at != quote; at++) {
        bool escaped = *at == '\\';
        at += escaped;
        if (!*at || (escaped && !strchr("n\\'\"", *at))) { return NULL; }
        *(*out)++ = escaped && *at == 'n' ? '\n' : *at;
    }
    *(*out)++ = STRING;
    return at + 1;
}

// Reads the content of a tag up to its end, which is `closer` and a brace. Returns what follows it, or NULL.
static const char *read_tag(const char *at, char closer, char *out, bool *minus) {
    const char *first = out;
    bool gap = false;
    while (*at) {
        *minus = *at == '-';
        if (at[*minus] == closer && at[*minus + 1] == '}') {
            *out = 0;
            return at + *minus + 2;
        }
        if (strchr("{}", *at) || (*at == '+' && at[1] == '%')) { return NULL; }
        bool space = is_space(*at);
        if (strchr("'\"", *at)) {
            at = read_string(at, &out);
            if (!at) { return NULL; }
        } else {
            if (gap && !space && out > first && is_word(out[-1]) && is_word(*at)) { *out++ = ' '; }
            if (!space) { *out++ = *at; }
            at++;
        }
        gap = space;
    }
    return NULL;
}

// What Jinja removes from the text in front of a tag, and in front of the text that follows one.
typedef enum { NOTHING, NEWLINE, ALL } Trim;

// Writes the text between two tags, of which the next begins at `to`, and returns that.
static const char *write_text(Canon *c, const char *from, const char *to, Trim before, bool first) {
    const char *next = to;
    while (before == ALL && from < to && is_space(*from)) { from++; }
    bool newline = before == NEWLINE && from < to && *from == '\n';
    from += newline;
    if (*next && next[2] == '-') {
        while (to > from && is_space(to[-1])) { to--; }
    } else if (*next && next[1] != '{' && next[2] != '+') {    // lstrip_blocks
        const char *line = to;
        while (line > from && strchr(" \t", line[-1])) { line--; }
        if (line > from ? line[-1] == '\n' : newline || first) { to = line; }
    }
    write_bytes(c, from, (size_t)(to - from));
    return next;
}

// Writes the tag at `at`. Returns what follows it and how that is trimmed, or NULL.
static const char *write_next(Canon *c, const char *at, Trim *trim) {
    char kind = at[1];
    bool minus;
    const char *content = at + 2 + (at[2] == '-' || at[2] == '+');
    if (kind == '#') {
        const char *end = strstr(content, "#}");
        if (!end || (end > content && end[-1] == '+')) { return NULL; }
        *trim = end > content && end[-1] == '-' ? ALL : NEWLINE;
        return end + 2;
    }
    at = read_tag(content, kind == '{' ? '}' : '%', c->tag, &minus);
    if (!at) { return NULL; }
    if (kind == '{') {
        write_tag(c, EXPRESSION, c->tag);
    } else if (!write_block(c, c->tag)) {
        return NULL;
    }
    *trim = kind == '{' ? NOTHING : NEWLINE;
    if (minus) { *trim = ALL; }
    return at;
}

// The first tag in a text, or its end.
static const char *find_tag(const char *at) {
    while (*at && !(*at == '{' && at[1] && strchr("{%#", at[1]))) { at++; }
    return at;
}

static bool write_all(Canon *c, const char *text) {
    Trim trim = NOTHING;
    for (const char *at = text; at;) {
        at = write_text(c, at, find_tag(at), trim, at == text);
        if (!*at) { return c->depth == 0; }
        at = write_next(c, at, &trim);
    }
    return false;
}

char *jinja_canonical(const char *text) {
    size_t length = strlen(text);
    Canon c = {.out = malloc(length + 1), .tag = malloc(length + 1)};
    char *copy = strdup(text);
    bool right = c.out && c.tag && copy;
    for (size_t i = 0; right && i < length; i++) { right = (unsigned char)text[i] >= ' ' || is_space(text[i]); }
    if (right && length && copy[length - 1] == '\n') { copy[length - 1] = 0; }    // Jinja drops it
    right = right && write_all(&c, copy);
    if (right) { c.out[c.length] = 0; }
    free(copy);
    free(c.tag);
    if (right) { return c.out; }
    free(c.out);
    return NULL;
}
