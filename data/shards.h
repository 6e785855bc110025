// Token shards, such as `*_train_000001.bin`: a header of 256 little-endian int32 (magic 20240520, version 1, token
// count, zeros), then the tokens as uint16; or with magic 20240801 and version 7 as uint32, for vocabularies over
// 65,536. A dataset may have shards of both kinds. A mask is a file of the same name with .mask (magic 20240521,
// version 1) and one byte per token, 1 if the token counts in the loss.
//
// All shards, sorted by name, form one stream of N tokens. With PACK_STREAM, it has W = (N - 1) / T windows of T + 1
// tokens; each starts T tokens after the previous one, and a window may span shards. With PACK_EXAMPLE, each of the W
// documents of at least two tokens is a window, truncated to T + 1 tokens or padded with end-of-text. Padding does not
// count, but a lone end-of-text is the last token of the document before it, and counts if its mask byte is 1. Sequence
// g is window order(g mod W) of epoch g div W.
#ifndef DATA_SHARDS_H
#define DATA_SHARDS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/error.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { PACK_STREAM, PACK_EXAMPLE } PackMode;    // in the order of "stream|example"

typedef struct {
    size_t T;           // inputs per window; a window has T + 1 tokens
    size_t vocab;       // every id must be below it
    int end_of_text;    // 50256 with GPT-2's tokens; each document starts with it
    uint64_t seed;      // determines the order
    bool shuffle;       // false: sequential
    PackMode pack;
    uint64_t min_windows;    // fewer windows are an error; a step needs this many sequences
    size_t open_files;       // at most this many files stay open, up to 64; 0: 64
    const char *remedy;      // the last line of that error: what the program's user can change, or NULL
} ShardsConfig;

typedef struct Shards Shards;

// Opens the shards that the globs match (separated by spaces or commas; plain paths also work) and checks the magic,
// version and size of each. Returns NULL on error: EXIT_INPUT if the data is invalid, EXIT_RESOURCE if memory runs out.
// PACK_EXAMPLE reads all tokens once to find where documents start.
Shards *shards_open(const char *globs, ShardsConfig config, Error *error);
void shards_close(Shards *shards);

// Writes the path of the first shard that the globs match without reading any file. Returns false if there is none.
bool shards_first_path(const char *globs, char *path, size_t size);

uint64_t shards_tokens(const Shards *shards);                  // N
uint64_t shards_windows(const Shards *shards);                 // W
size_t shards_count(const Shards *shards);                     // files
const char *shards_path(const Shards *shards, size_t file);    // by which the file of tokens was opened
// May some targets not count in the loss? True if there are .mask files or pack is PACK_EXAMPLE.
bool shards_masked(const Shards *shards);

// Reads the window of sequence number g.
//   tokens (T + 1) written   mask (T) written, or NULL: mask[t] is 1 if the target tokens[t + 1] counts in the loss
// An id outside the vocabulary, or a file that has shrunk since it was opened, is an error (EXIT_INPUT).
bool shards_window(Shards *shards, uint64_t g, int32_t *tokens, uint8_t *mask, Error *error);

// Does any target count in the first `windows` windows of the stream's order? If not, fails (EXIT_INPUT). Warns of
// shards in which none does, if `warns`. Reads each mask up to the first target that counts.
bool shards_check_targets(Shards *shards, uint64_t windows, bool warns, Error *error);

// Reads and checks every token and mask byte, for --dry-run.
bool shards_check_all(Shards *shards, Error *error);

// Returns JSON such as {"files": 2, "tokens": 123, "xxh3": "0123456789abcdef"}. The hash covers each file's name
// (without its folder), size, header, and first and last 4 KiB, masks included. For all practical purposes, equal text
// means equal data. The caller frees it; NULL is an error.
char *shards_fingerprint(Shards *shards, Error *error);

// Returns the window at `position` (below W) of an epoch. For each (seed, epoch) it is a bijection of 0..W-1, computed
// in O(1) memory.
uint64_t shards_order(uint64_t position, uint64_t W, uint64_t seed, uint64_t epoch);

// Where the document of each token begins in its row, for attention that stops at document boundaries: at the newest
// end-of-text token, which is the first of a document, or at 0.
//   first (B,T) written   tokens (B,T)
void document_starts(int32_t *first, const int32_t *tokens, size_t B, size_t T, int32_t end_of_text);

// Returns the sequence length of a step if --seq-len lists several: each of the n >= 1 lengths is equally likely, and
// the choice depends only on (seed, step).
size_t step_length(const int64_t *lengths, size_t n, uint64_t seed, uint64_t step);

#ifdef __cplusplus
}
#endif
#endif
