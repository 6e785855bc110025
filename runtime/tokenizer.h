// Text to token ids and back, for byte-level BPE with GPT-2's way of splitting text into words: GPT-2's own 50,257
// tokens and what data/tinystories.py trains. Reads the `tokenizer.json` (Hugging Face's format) that lies beside the
// shards and in each checkpoint folder. Ids are those of tiktoken's encode_ordinary (GPT-2) and of the `tokenizers`
// library.
#ifndef RUNTIME_TOKENIZER_H
#define RUNTIME_TOKENIZER_H

#include <stddef.h>
#include <stdint.h>

#include "runtime/error.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Tokenizer Tokenizer;

// The files that make a folder's tokenizer complete, ended by NULL: a checkpoint copies them. The first is required;
// the others are for transformers' AutoTokenizer.
extern const char *const tokenizer_files[];

// Opens `path`, a tokenizer.json or a folder with one. NULL and *error set when it is missing, not JSON, contradicts
// itself, or asks for what this file does not do. The rule, which unusable() in data/vocabulary.py has too
// (dev/tests/test_vocabulary.py compares them):
//   - model: BPE; no prefix or suffix of words, no dropout, byte_fallback or ignore_merges
//   - normalizer: none; pre_tokenizer: ByteLevel alone, with its regular expression and no space added in front
//   - tokens: one for each byte, their names in ByteLevel's alphabet; <|endoftext|>; no added tokens but special
//     ones, numbered after the others
//   - merges: each pair once, of two tokens whose joint is a token
Tokenizer *tokenizer_open(const char *path, Error *error);
void tokenizer_close(Tokenizer *tokenizer);    // NULL is fine

// Encodes length bytes of text; all of it is ordinary text, "<|endoftext|>" too. Broken UTF-8 counts as U+FFFD, as
// Python's errors="replace" does. Returns how many ids the text has, and writes the first `capacity` of them (ids may
// be NULL with 0).
// A capacity of `length` is enough for valid UTF-8, 3 * length for any bytes. Threads may share a tokenizer.
size_t tokenizer_encode(const Tokenizer *tokenizer, const char *text, size_t length, int32_t *ids, size_t capacity);

// The bytes of one token, *length of them (no final 0 is promised), for text that is written out as it comes: a
// character of several bytes may be spread over several tokens. NULL and 0 for an id that has no token. Text is decoded
// by joining these.
const char *tokenizer_token(const Tokenizer *tokenizer, int32_t id, size_t *length);

// Of any tokenizer.json, also one that tokenizer_open() rejects: one more than the largest id, and the id of
// "<|endoftext|>" or -1. False where it has no ids.
bool tokenizer_ids(const char *path, int *vocab, int *end_of_text);

int tokenizer_vocab(const Tokenizer *tokenizer);          // one more than the largest id
int tokenizer_end_of_text(const Tokenizer *tokenizer);    // the id of "<|endoftext|>", 50256 in GPT-2

#ifdef __cplusplus
}
#endif
#endif
