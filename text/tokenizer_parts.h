// What a Tokenizer consists of: tokenizer_json.c fills it in, tokenizer.c encodes and decodes with it.
#ifndef TEXT_TOKENIZER_PARTS_H
#define TEXT_TOKENIZER_PARTS_H

#include "text/pretokenize.h"
#include "text/tokenizer.h"

typedef struct {
    const char *bytes;    // what it stands for in text; NULL if no token has this id
    size_t length;
} Token;

typedef struct {
    int32_t left, right, result;
} Merge;

// A row of added_tokens.
typedef struct {
    Token name;
    int32_t id;
    bool special;       // its name in a text is ordinary text
    bool normalized;    // the library searches for it in normalized text, which only a special one may ask for
    int32_t prefix;     // the index of the longest name that this one starts with, or -1
} Added;

// Which space comes before a part of the text, where parts are what lies between added tokens.
typedef enum {
    LEAD_NONE,
    LEAD_EVERY_PART,      // always (Llama 2)
    LEAD_IF_MISSING,      // before each part that does not start with one
    LEAD_FIRST_MISSING    // the same, but only at the start of a document
} Lead;

struct Tokenizer {
    char *path;
    char *bytes;    // the bytes of all tokens, concatenated
    size_t bytes_used;
    Token *tokens;    // by id
    int vocab, end_of_text;
    int32_t begins;    // the token that the library puts in front of a text, or -1
    Split split;
    bool characters;     // symbols start as characters, and as bytes where these have no token
    bool nfc;            // is text normalized to NFC?
    bool whole_words;    // is a word that is a token not merged (ignore_merges)?
    Lead lead;
    Added *added;    // ordered by name, those with the same name by id from the largest
    size_t added_count;
    bool starts_added[256];    // does a name in `added` start with this byte?
    int32_t byte_id[256];      // -1: the byte has no token and is dropped
    Merge *merges;             // by rank
    size_t merges_count;
    uint32_t *pairs;    // hash table of (left, right): rank + 1, or 0
    uint32_t *names;    // hash table of the bytes of model.vocab's tokens: id + 1, or 0
    size_t pairs_mask, names_mask;
    uint64_t seed;    // of both tables, random and odd: nobody can write a file whose entries collide
};

// The slots of the two hash tables (open addressing, at most half full) where this entry is or would be.
uint32_t *tokenizer_pair_slot(const Tokenizer *t, int32_t left, int32_t right);
uint32_t *tokenizer_name_slot(const Tokenizer *t, const void *bytes, size_t length);

// The index of the last of t->added whose name is not above the text in order, or -1. All added names that the text
// starts with are this one or, one after another, its prefixes.
int32_t tokenizer_added_before(const Tokenizer *t, const void *text, size_t length);

#endif
