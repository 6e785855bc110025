// Chat templates: how a conversation is written in tokens. A template is a row of a table in chat.c.
//
// The special tokens of a prompt come from the template alone. What a person types is ordinary text, even if it is the
// name of a special token, which transformers' apply_chat_template() would take for the token.
#ifndef TEXT_CHAT_H
#define TEXT_CHAT_H

#include "text/tokenizer.h"

// In begin, system, user, answer and end, the names in `special` stand for these tokens.
typedef struct {
    const char *name;
    const char *special[4];       // names, up to the first NULL
    const char *begin;            // before the first message
    const char *system, *user;    // before a message of this role
    const char *answer;           // before the model's answer
    const char *end, *after;      // after each message: a special token, then text
    const char *preface;          // begins the system message, even if that is empty; for strftime(); or NULL
    bool begins;                  // does a conversation begin with tokenizer_begins()?
    bool ends_text;               // is `end` eos_token in the Jinja template?
    bool trims;                   // is white space around a message removed?
    bool forgets_thoughts;        // are answers of earlier turns cut up to "</think>"?
} ChatTemplate;

// The template with this name: raw (the text itself, without any turns), chatml, qwen3, llama3, llama3.1, llama3.2
// or zephyr. NULL for others.
const ChatTemplate *chat_template(const char *name);

// Recognizes the published template of a model by its chat_template.jinja or tokenizer_config.json, and sets *system to
// the system message with which it begins where there is no other, or to "". Returns NULL with *error set if the folder
// has no template, or another one.
const ChatTemplate *chat_template_in(const char *folder, const char **system, Error *error);

// Returns a special token of the template that the tokenizer does not have, or NULL.
const char *chat_missing(const ChatTemplate *chat, const Tokenizer *tokenizer);

// The token that ends an answer, or -1 if the template has none.
int32_t chat_end(const ChatTemplate *chat, const Tokenizer *tokenizer);

typedef struct {
    bool first;            // the first turn of a conversation; otherwise the model's answer comes before it
    const char *system;    // the system message of the first turn, or NULL
    const char *text;      // what the user says
    size_t length;
    const char *answer;    // what chat_kept() left of the answer before, if it is to be encoded anew; or NULL
    size_t answer_length;
} ChatTurn;

// Returns the part of an answer that later turns see, and sets *length to that of the part. Qwen3 forgets what it
// thought, and Llama 3 the white space around an answer.
const char *chat_kept(const ChatTemplate *chat, const char *answer, size_t *length);

// Returns the tokens of a turn, up to where the model's answer begins, and sets *count; free them. After an answer,
// they begin with turn.answer and the token that ends it. Out of memory ends the program.
int32_t *chat_encode(const ChatTemplate *chat, const Tokenizer *tokenizer, ChatTurn turn, size_t *count);

#endif
