// Token shards: `*_train_000001.bin`, 256 little-endian int32 (magic 20240520, version 1, token count, rest 0), then
// the tokens as uint16; and masks beside them, the same name with .mask (magic 20240521, one byte a token, 1 where it
// counts).
//
// All shards, in the order of their names, are one stream of N tokens. PACK_STREAM: W = (N - 1) / T windows of T + 1
// tokens, each starting T after the last, so that a window may span shards. PACK_EXAMPLE: W is the number of documents
// of at least two tokens, each one a window, cut to T + 1 or padded with end-of-text. Sequence g is window order(g mod
// W) of epoch g div W.
#ifndef RUNTIME_SHARDS_H
#define RUNTIME_SHARDS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/error.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { PACK_STREAM, PACK_EXAMPLE } PackMode;    // as in "stream|example"

typedef struct {
    size_t T;           // inputs a window; the window has T + 1 tokens
    int vocab;          // ids must be below it
    int end_of_text;    // 50256 with GPT-2's tokens; each document starts with it
    uint64_t seed;      // of the order
    bool shuffle;       // false: in sequence
    PackMode pack;
    uint64_t min_windows;    // fewer are an error: the sequences of one step
} ShardsConfig;

typedef struct Shards Shards;

// Opens the shards that the globs match (several with spaces or commas between; a file's plain name will do) and checks
// each one's magic, version and size. NULL with the error filled in: EXIT_INPUT for what is wrong in the data,
// EXIT_RESOURCE for memory. With PACK_EXAMPLE all tokens are read once, to find where the documents start.
Shards *shards_open(const char *globs, ShardsConfig config, Error *error);
void shards_close(Shards *shards);

// The path of the first shard that the globs match, nothing read; false where there is none.
bool shards_first_path(const char *globs, char *path, size_t size);

uint64_t shards_tokens(const Shards *shards);     // N
uint64_t shards_windows(const Shards *shards);    // W
size_t shards_count(const Shards *shards);        // files
// Some targets may not count: there are .mask files, or pack is PACK_EXAMPLE.
bool shards_masked(const Shards *shards);

// The window of sequence number g.
//   tokens (T + 1) written   mask (T) written, or NULL: mask[t] is 1 where the target tokens[t + 1] counts in the loss
// An id at or above the vocabulary, or a file that shrank since it was opened, is an error (EXIT_INPUT).
bool shards_window(Shards *shards, uint64_t g, int32_t *tokens, uint8_t *mask, Error *error);

// Reads every token and mask byte and checks it, for --dry-run.
bool shards_check_all(Shards *shards, Error *error);

// {"files": 2, "tokens": 123, "xxh3": "0123456789abcdef"} as JSON: over each file's name (without its folder), size,
// header and first and last 4 KiB, masks included. Equal text means the same data for all practical purposes. The
// caller frees it; NULL is an error.
char *shards_fingerprint(Shards *shards, Error *error);

// The window that stands at `position` (below W) of an epoch: a bijection of 0..W-1 made from (seed, epoch), in O(1)
// memory.
uint64_t shards_order(uint64_t position, uint64_t W, uint64_t seed, uint64_t epoch);

// The sequence length of a step where --seq-len lists several: one of them, each equally likely, by (seed, step). n >=
// 1.
size_t step_length(const int64_t *lengths, size_t n, uint64_t seed, uint64_t step);

#ifdef __cplusplus
}
#endif
#endif
