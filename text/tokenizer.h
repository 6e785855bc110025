// Converts between text and token ids, as tokenizer.json (Hugging Face's format) says, which is next to the shards and
// in each checkpoint folder. Produces the same ids as the `tokenizers` library, and as tiktoken's encode_ordinary for
// GPT-2. Two kinds of BPE are supported:
//   - byte-level: GPT-2 and the vocabularies that data/ trains, SmolLM2, Llama 3, Qwen2 and Qwen3
//   - on characters, with byte fallback, as SentencePiece: Llama 2, TinyLlama, Mistral
#ifndef TEXT_TOKENIZER_H
#define TEXT_TOKENIZER_H

#include <stddef.h>
#include <stdint.h>

#include "runtime/error.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Tokenizer Tokenizer;

// The files of a complete tokenizer, terminated by NULL; checkpoints copy them. The first is required, the others are
// for transformers' AutoTokenizer, and may have the chat template.
extern const char *const tokenizer_files[];
enum { TOKENIZER_SETTINGS = 1, TOKENIZER_TEMPLATE = 2 };    // the indices of tokenizer_config.json and the template
enum { TEMPLATE_BYTES = 1 << 20 };                          // the largest chat_template.jinja

// What a checkpoint stores of file `i` of a tokenizer's folder: JSON or text in UTF-8, and tokenizer_config.json
// without what names Python code (auto_map), which transformers would run under trust_remote_code=True. A link out of
// the folder is an error unless `follow_links`. The caller frees the result. Returns NULL on error.
char *tokenizer_file(const char *folder, size_t i, bool follow_links, Error *error);

// Opens `path`, a tokenizer.json or a folder that contains one. Returns NULL with *error set if it is missing, not
// JSON, inconsistent, or unsupported. Supported is (unusable() in data/vocabulary.py implements the same rules;
// dev/tests/test_vocabulary.py compares the two):
//   - model: BPE without continuing_subword_prefix, end_of_word_suffix or dropout
//   - byte-level: normalizer NFC or none; pre_tokenizer ByteLevel with its regular expression, alone or in a Sequence
//     after Digits (individual_digits); or a Sequence of Split by Llama 3's or Qwen's pattern and ByteLevel without.
//     One token for each byte, or no unk_token; all named in ByteLevel's alphabet
//   - byte_fallback: normalizer Prepend "▁" and Replace " " by "▁", or pre_tokenizer Metaspace without split. A token
//     for each byte, "<0x00>" to "<0xFF>"; no ignore_merges
//   - a token between documents: <|endoftext|>, <|begin_of_text|> or <s>
//   - added tokens: each has its id in model.vocab, or one that follows model.vocab's. Those that are not special are
//     found in text as they are (no normalized, single_word, lstrip, rstrip)
//   - merges: distinct pairs of tokens whose concatenation is a token
Tokenizer *tokenizer_open(const char *path, Error *error);
void tokenizer_close(Tokenizer *tokenizer);    // NULL is allowed

// Encodes `length` bytes of text. All of it is ordinary text, including "<|endoftext|>"; no token is put in front.
// Invalid UTF-8 becomes U+FFFD, as with Python's errors="replace". A byte that has no token is dropped, as by the
// library; SmolLM2 lacks six control characters, and 0xF1 and 0xF2, which begin the characters of planes that Unicode
// leaves empty. Returns the number of ids and writes the first `capacity` of them (ids may be NULL if it is 0).
// tokenizer_capacity() is always enough. Thread-safe.
size_t tokenizer_encode(const Tokenizer *tokenizer, const char *text, size_t length, int32_t *ids, size_t capacity);

// The same for a text that does not start a document. Llama 2 and its kin put a space in front of a document, some of
// them also after a special token, but never into a text.
typedef enum { AT_START, AFTER_SPECIAL, INSIDE } TextPlace;
size_t tokenizer_encode_at(const Tokenizer *tokenizer, TextPlace place, const char *text, size_t length, int32_t *ids,
                           size_t capacity);

static inline size_t tokenizer_capacity(size_t length) {
    return 3 * length + 1;
}

// Returns the bytes of one token, not null-terminated, and sets *length. Text is the concatenation of its tokens'
// bytes (without the first space, if tokenizer_adds_space()); a character of several bytes may be spread over several
// tokens, which matters when text is printed token by token. Returns NULL and a length of 0 for an id without a token.
const char *tokenizer_token(const Tokenizer *tokenizer, int32_t id, size_t *length);

// Do the tokens of a document start with a space that is not part of its text?
bool tokenizer_adds_space(const Tokenizer *tokenizer);

// Writes the token's bytes as null-terminated UTF-8 without other NUL bytes, truncated to `size` bytes in all. Each
// part of a character that continues in another token becomes U+FFFD. An id without a token is an empty text.
void tokenizer_text(const Tokenizer *tokenizer, int32_t id, char *out, size_t size);

// For any tokenizer.json, including those that tokenizer_open() rejects: sets *vocab to the largest id plus one and
// *end_of_text to the id of the token between documents, or -1. Returns false if it has no ids.
bool tokenizer_ids(const char *path, int *vocab, int *end_of_text);

int tokenizer_vocab(const Tokenizer *tokenizer);    // the largest id plus one

// Some tokenizers have more ids than their model. Returns false if one of these ids is not below `vocab`, the model's,
// with an error that begins with `where` and names its token.
bool tokenizer_fits(const Tokenizer *tokenizer, const int32_t *ids, size_t count, size_t vocab, const char *where,
                    Error *error);

// The id of the token that the library puts in front of every text, as post_processor in tokenizer.json says, such as
// <s> or <|begin_of_text|>; -1: none. tokenizer_encode() does not write it.
int32_t tokenizer_begins(const Tokenizer *tokenizer);

// The id of the token between documents: <|endoftext|> (50256 in GPT-2), or else <|begin_of_text|>, or else <s>.
int tokenizer_end_of_text(const Tokenizer *tokenizer);

// Returns the id of the special token with this text, such as "<|im_start|>", or -1. Prompts of a chat need them,
// because tokenizer_encode() never produces one.
int32_t tokenizer_special(const Tokenizer *tokenizer, const char *text);

#ifdef __cplusplus
}
#endif
#endif
