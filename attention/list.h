// The attention of each layer: a normalizer, a window and a position rule. --attn is a list, [COUNT*]NAME[+stage=value
// ...],... It is dealt to the layers from the first on and repeats until every layer has one.
#ifndef ATTENTION_LIST_H
#define ATTENTION_LIST_H

#include "attention/normalizer.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NO_ROPE (-1.0)

typedef struct {
    Normalizer normalizer;
    size_t window;    // a query sees itself and the window - 1 keys before it; 0: all keys before it
    double rope;      // the base of RoPE's wavelengths; 0: the model's; NO_ROPE: q and k are not rotated
} LayerAttention;

typedef struct {
    LayerAttention layer;
    size_t count;    // consecutive layers
} AttentionItem;

enum { ATTENTION_TEXT = 2048, ATTENTION_ITEMS = 64 };

// After attention_parse() for a model, every item belongs to at least one layer.
typedef struct {
    char text[ATTENTION_TEXT];    // as given to --attn
    AttentionItem items[ATTENTION_ITEMS];
    size_t count;
} AttentionList;

// Parses --attn for a model with this many layers; what is beyond them is left out. layers = 0: keeps the whole list.
// On failure, returns false with a message that names the entry and lists the valid choices.
bool attention_parse(AttentionList *out, const char *text, size_t layers, char *message, size_t size);

// Warns of entries that a model with this many layers does not use. The list was given as `flag text`.
void attention_warn_of_unused(const char *flag, const char *text, size_t layers);

const LayerAttention *attention_at(const AttentionList *list, size_t layer);

// The largest n, the number of keys that a query sees, in a sequence of T.
static inline size_t attention_keys(const LayerAttention *layer, size_t T) {
    return layer->window && layer->window < T ? layer->window : T;
}

// The rotated layers share one table of RoPE's angles for each base. The number of tables; the table of a layer,
// NO_TABLE if it is not rotated; and the base of a table, 0 for the model's.
#define NO_TABLE ((size_t)-1)
size_t attention_tables(const AttentionList *list);
size_t attention_table(const AttentionList *list, size_t layer);
double attention_table_base(const AttentionList *list, size_t table);

// The same for windows: how many there are, that of a layer, NO_TABLE if it sees all keys, and the size of one.
size_t attention_windows(const AttentionList *list);
size_t attention_window(const AttentionList *list, size_t layer);
size_t attention_window_size(const AttentionList *list, size_t window);

// The list with the shortest names of the same meaning.
const char *attention_shortest(const AttentionList *list, char *out, size_t size);

// The list in words: "9 x softmax, window 256; 3 x ssmax, no RoPE"
const char *attention_description(const AttentionList *list, size_t layers, char *out, size_t size);

// Do all layers of a model compute the same under both?
bool attention_equal(const AttentionList *a, const AttentionList *b, size_t layers);

// Does any layer have, or train, this scalar?
bool attention_has(const AttentionList *list, Scalar scalar);
bool attention_trains(const AttentionList *list, Scalar scalar);

// The largest n for which the layers with p_n need it, in a sequence of T; 0 without such a layer.
size_t attention_p_keys(const AttentionList *list, size_t T);

// As the functions of one normalizer, for all layers.
bool attention_fits(const AttentionList *list, size_t L, char *message, size_t size);
void attention_warn_of_start(const AttentionList *from, const AttentionList *to, size_t layers, const char *flag,
                             const char *value);
AttentionList attention_by_row(const AttentionList *list);

// What an engine with full attention, RoPE of one base and uncapped scores cannot compute, such as "+window="; NULL if
// it can compute all layers.
const char *attention_beyond_plain(const AttentionList *list);

#ifdef __cplusplus
}
#endif
#endif
