// Text to token ids and back, for byte-level BPE with GPT-2's way of splitting text into words: GPT-2's own 50,257 tokens
// and what data/tinystories.py trains. Reads the `tokenizer.json` (Hugging Face's format) that lies beside the shards and in
// each checkpoint folder. Ids are those of tiktoken's encode_ordinary (GPT-2) and of the `tokenizers` library.
#ifndef RUNTIME_TOKENIZER_H
#define RUNTIME_TOKENIZER_H

#include <stddef.h>
#include <stdint.h>

#include "runtime/error.h"

typedef struct Tokenizer Tokenizer;

// The files that make a folder's tokenizer complete, ended by NULL: a checkpoint copies them. The first is required; the
// others are for transformers' AutoTokenizer.
extern const char *const tokenizer_files[];

// Opens `path`, a tokenizer.json or a folder with one.
// NULL and *error set when it is missing, not JSON, not of the kind above, or contradicts itself.
Tokenizer *tokenizer_open(const char *path, Error *error);
void tokenizer_close(Tokenizer *tokenizer);   // NULL is fine

// Encodes length bytes of text; all of it is ordinary text, "<|endoftext|>" too. Broken UTF-8 counts as U+FFFD, as Python's
// errors="replace" does. Returns how many ids the text has, and writes the first `capacity` of them (ids may be NULL with 0).
// A capacity of `length` is enough for valid UTF-8, 3 * length for any bytes. Threads may share a tokenizer.
size_t tokenizer_encode(const Tokenizer *tokenizer, const char *text, size_t length, int32_t *ids, size_t capacity);

// The bytes of one token, *length of them (no final 0 is promised), for text that is written out as it comes: a character of
// several bytes may be spread over several tokens. NULL and 0 for an id that has no token. Text is decoded by joining these.
const char *tokenizer_token(const Tokenizer *tokenizer, int32_t id, size_t *length);

int tokenizer_vocab(const Tokenizer *tokenizer);          // one more than the largest id
int tokenizer_end_of_text(const Tokenizer *tokenizer);    // the id of "<|endoftext|>", 50256 in GPT-2

#endif
