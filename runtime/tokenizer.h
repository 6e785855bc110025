// Converts between text and token ids. Supports byte-level BPE with GPT-2's splitting of text into words, optionally
// with each digit as a word of its own: GPT-2's own 50,257 tokens, the vocabularies that data/tinystories.py trains,
// and SmolLM2's. Reads the tokenizer.json (Hugging Face's format) next to the shards and in each checkpoint folder.
// Produces the same ids as tiktoken's encode_ordinary (GPT-2) and the `tokenizers` library.
#ifndef RUNTIME_TOKENIZER_H
#define RUNTIME_TOKENIZER_H

#include <stddef.h>
#include <stdint.h>

#include "runtime/error.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Tokenizer Tokenizer;

// The files of a complete tokenizer, terminated by NULL; checkpoints copy them. The first is required, the others are
// for transformers' AutoTokenizer.
extern const char *const tokenizer_files[];

// Opens `path`, a tokenizer.json or a folder that contains one. Returns NULL with *error set if it is missing, not
// JSON, inconsistent, or unsupported. Supported is (unusable() in data/vocabulary.py implements the same rules;
// dev/tests/test_vocabulary.py compares the two):
//   - model: BPE without continuing_subword_prefix, end_of_word_suffix, dropout, byte_fallback or ignore_merges
//   - normalizer: none; pre_tokenizer: ByteLevel, with its regular expression and without add_prefix_space, alone or in
//     a Sequence after Digits (individual_digits)
//   - tokens: <|endoftext|>; one for each byte, or no unk_token; all named in ByteLevel's alphabet. Added tokens are
//     special; each has its id in model.vocab, or one that follows model.vocab's
//   - merges: distinct pairs of tokens whose concatenation is a token
Tokenizer *tokenizer_open(const char *path, Error *error);
void tokenizer_close(Tokenizer *tokenizer);    // NULL is allowed

// Encodes `length` bytes of text. All of it is ordinary text, including "<|endoftext|>". Invalid UTF-8 becomes U+FFFD,
// as with Python's errors="replace". A byte that has no token is dropped, as by the library; SmolLM2 lacks six control
// characters, and 0xF1 and 0xF2, which begin the characters of planes that Unicode leaves empty. Returns the number of
// ids and writes the first `capacity` of them (ids may be NULL if it is 0). A capacity of `length` is enough for valid
// UTF-8, 3 * length for any bytes. Thread-safe.
size_t tokenizer_encode(const Tokenizer *tokenizer, const char *text, size_t length, int32_t *ids, size_t capacity);

// Returns the bytes of one token, not null-terminated, and sets *length. Text is the concatenation of its tokens'
// bytes; a character of several bytes may be spread over several tokens, which matters when text is printed token by
// token. Returns NULL and a length of 0 for an id without a token.
const char *tokenizer_token(const Tokenizer *tokenizer, int32_t id, size_t *length);

// Writes the token's bytes as null-terminated UTF-8 without other NUL bytes, truncated to `size` bytes in all. Each
// part of a character that continues in another token becomes U+FFFD. An id without a token is an empty text.
void tokenizer_text(const Tokenizer *tokenizer, int32_t id, char *out, size_t size);

// For any tokenizer.json, including those that tokenizer_open() rejects: sets *vocab to the largest id plus one and
// *end_of_text to the id of "<|endoftext|>", or -1. Returns false if it has no ids.
bool tokenizer_ids(const char *path, int *vocab, int *end_of_text);

int tokenizer_vocab(const Tokenizer *tokenizer);          // the largest id plus one
int tokenizer_end_of_text(const Tokenizer *tokenizer);    // the id of "<|endoftext|>", 50256 in GPT-2

// Returns the id of the special token with this text, such as "<|im_start|>", or -1. Prompts in ChatML need them,
// because tokenizer_encode() never produces one.
int32_t tokenizer_special(const Tokenizer *tokenizer, const char *text);

#ifdef __cplusplus
}
#endif
#endif
