// Binary search in tables.
#ifndef RUNTIME_SEARCH_H
#define RUNTIME_SEARCH_H

#include <stddef.h>
#include <stdint.h>

// Returns the first of `count` rows whose key is at least `wanted`, or `count` if there is none. `keys` is the key of
// the first row; the others follow, each `stride` bytes after the one before, and ascend. Inline, so that the stride is
// a constant.
static inline size_t search(const uint32_t *keys, size_t count, size_t stride, uint32_t wanted) {
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (*(const uint32_t *)((const char *)keys + middle * stride) < wanted) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

// search() by a member of the rows of an array.
#define SEARCH(table, member, wanted) \
    search(&(table)[0].member, sizeof(table) / sizeof((table)[0]), sizeof((table)[0]), wanted)

#endif
