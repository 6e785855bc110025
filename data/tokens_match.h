// Do token ids mean the same in two folders, a model's and that of its data?
#ifndef DATA_TOKENS_MATCH_H
#define DATA_TOKENS_MATCH_H

#include "data/shards.h"
#include "runtime/path.h"

// Does an id stand for the same token in both folders' tokenizer.json? One file may have more tokens than the other, or
// split text in another way. TOKENS_UNKNOWN: the files differ, and this program cannot read one of them.
typedef enum { TOKENS_EQUAL, TOKENS_DIFFER, TOKENS_UNKNOWN } TokenMatch;
TokenMatch tokens_match(const char *folder, const char *other);    // TOKENS_EQUAL if a folder has none

// The same for the folders of all shards. Sets *other to the first of them that does not match, if there is one.
TokenMatch tokens_match_shards(const char *folder, const Shards *shards, FolderPath *other);

#endif
