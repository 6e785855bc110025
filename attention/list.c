// Tested by dev/tests/test_normalizer.c.
#include "attention/list.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/error.h"
#include "runtime/number.h"

// ---------------------------------------------------------------------------------------------------------------------
// Reading

// Parses window=W or rope=none|THETA.
static bool apply_layer_value(LayerAttention *layer, const char *word, char *message, size_t size) {
    const char *value = strchr(word, '=') + 1;
    double number;
    bool is_number = normalizer_number(value, &number);
    if (word[0] == 'w') {
        bool whole = is_number && number >= 1 && number <= INT_MAX && !value[strspn(value, "0123456789")];
        if (whole) layer->window = (size_t)number;
        else snprintf(message, size, "window=%s: expected a whole number of keys from 1 to %d", value, INT_MAX);
        return whole;
    }
    if (!strcmp(value, "none")) {
        layer->rope = NO_ROPE;
        return true;
    }
    bool base = is_number && number > 1 && number <= 1e12;
    if (base) layer->rope = number;
    else snprintf(message, size, "rope=%s: expected none, or a base of RoPE above 1 and at most 1e12", value);
    return base;
}

// Parses NAME[+stage=value...]; the values of the layer are taken out of the normalizer's text.
static bool parse_layer(LayerAttention *layer, char *text, char *message, size_t size) {
    char of_normalizer[ATTENTION_TEXT];
    char *word = normalizer_next_override(text);
    if (word) *word++ = 0;
    size_t length = (size_t)snprintf(of_normalizer, sizeof of_normalizer, "%s", text);
    while (word) {
        char *next = normalizer_next_override(word);
        if (next) *next++ = 0;
        if (!normalizer_is_layer_value(word))
            length += (size_t)snprintf(of_normalizer + length, sizeof of_normalizer - length, "+%s", word);
        else if (!apply_layer_value(layer, word, message, size)) return false;
        word = next;
    }
    return normalizer_parse(&layer->normalizer, of_normalizer, message, size);
}

static bool parse_item(AttentionItem *item, char *text, char *message, size_t size) {
    size_t digits = strspn(text, "0123456789");
    *item = (AttentionItem){.count = 1};
    if (digits && text[digits] == '*') {
        item->count = digits < 7 ? strtoul(text, NULL, 10) : 0;
        text += digits + 1;
        if (!item->count) {
            snprintf(message, size, "expected a count from 1 to 999999 before '*'");
            return false;
        }
    }
    return parse_layer(&item->layer, text, message, size);
}

bool attention_parse(AttentionList *out, const char *text, size_t layers, char *message, size_t size) {
    char words[ATTENTION_TEXT];
    bool several = strchr(text, ',') != NULL;
    size_t dealt = 0;
    *out = (AttentionList){0};
    if (strlen(text) >= ATTENTION_TEXT) {
        snprintf(message, size, "the text is longer than %d characters", ATTENTION_TEXT - 1);
        return false;
    }
    strcpy(out->text, text);
    strcpy(words, text);
    char *rest = words;
    for (size_t i = 0; rest; i++) {
        char entry[128], why[1024];
        char *word = strsep(&rest, ",");
        AttentionItem item;
        snprintf(entry, sizeof entry, "%s", word);
        if (!parse_item(&item, word, why, sizeof why)) {
            if (several) snprintf(message, size, "entry %zu of the list, '%s': %s", i + 1, entry, why);
            else snprintf(message, size, "%s", why);
            return false;
        }
        if (layers && dealt + item.count > layers) item.count = layers - dealt;
        if (!item.count) continue;
        if (out->count == ATTENTION_ITEMS) {
            snprintf(message, size,
                     "the layers use more than %d entries of the list; COUNT*NAME stands for equal neighbors",
                     ATTENTION_ITEMS);
            return false;
        }
        dealt += item.count;
        out->items[out->count++] = item;
    }
    return true;
}

void attention_warn_of_unused(const char *flag, const char *text, size_t layers) {
    char words[ATTENTION_TEXT], message[1024], unused[256] = "";
    size_t dealt = 0, at = 0;
    snprintf(words, sizeof words, "%s", text);
    for (char *rest = words, *word; (word = strsep(&rest, ","));) {
        AttentionList one = {.count = 1};
        char shortest[ATTENTION_TEXT];
        if (!parse_item(&one.items[0], word, message, sizeof message)) return;
        size_t count = one.items[0].count, left = dealt < layers ? layers - dealt : 0;
        dealt += count;
        if (count <= left) continue;
        one.items[0].count = count - left;
        attention_shortest(&one, shortest, sizeof shortest);
        bool fits = at + strlen(shortest) + sizeof ", , ..." < sizeof unused;
        at += (size_t)snprintf(unused + at, sizeof unused - at, "%s%s", at ? ", " : "", fits ? shortest : "...");
        if (!fits) break;
    }
    if (unused[0])
        warn("%s %s: the model has %zu layer%s, so these entries are unused: %s.", flag, text, layers,
             layers == 1 ? "" : "s", unused);
}

// ---------------------------------------------------------------------------------------------------------------------
// Asking

const LayerAttention *attention_at(const AttentionList *list, size_t layer) {
    size_t period = 0, i = 0;
    for (size_t j = 0; j < list->count; j++) period += list->items[j].count;
    for (layer %= period; layer >= list->items[i].count; i++) layer -= list->items[i].count;
    return &list->items[i].layer;
}

static bool same_layer(const LayerAttention *a, const LayerAttention *b) {
    return normalizer_equal(&a->normalizer, &b->normalizer) && a->window == b->window && a->rope == b->rope;
}

bool attention_equal(const AttentionList *a, const AttentionList *b, size_t layers) {
    bool equal = true;
    for (size_t l = 0; l < layers && equal; l++) equal = same_layer(attention_at(a, l), attention_at(b, l));
    return equal;
}

typedef enum { ROPE, WINDOW } LayerValue;

static double value_of(const LayerAttention *layer, LayerValue which) {
    return which == ROPE ? layer->rope : (double)layer->window;
}

// The distinct values are numbered in the order of their first layers. NO_ROPE and the window of all keys do not count.
static bool is_first(const AttentionList *list, LayerValue which, size_t item) {
    double value = value_of(&list->items[item].layer, which);
    size_t i = 0;
    while (i < item && value_of(&list->items[i].layer, which) != value) i++;
    return i == item && value != (which == ROPE ? NO_ROPE : 0);
}

static size_t distinct(const AttentionList *list, LayerValue which) {
    size_t count = 0;
    for (size_t i = 0; i < list->count; i++) count += is_first(list, which, i);
    return count;
}

static double distinct_value(const AttentionList *list, LayerValue which, size_t number) {
    size_t i = 0;
    while (!is_first(list, which, i) || number-- > 0) i++;
    return value_of(&list->items[i].layer, which);
}

static size_t number_of(const AttentionList *list, LayerValue which, size_t layer) {
    double value = value_of(attention_at(list, layer), which);
    size_t number = 0;
    if (value == (which == ROPE ? NO_ROPE : 0)) return NO_TABLE;
    while (distinct_value(list, which, number) != value) number++;
    return number;
}

size_t attention_tables(const AttentionList *list) {
    return distinct(list, ROPE);
}

size_t attention_table(const AttentionList *list, size_t layer) {
    return number_of(list, ROPE, layer);
}

double attention_table_base(const AttentionList *list, size_t table) {
    return distinct_value(list, ROPE, table);
}

size_t attention_windows(const AttentionList *list) {
    return distinct(list, WINDOW);
}

size_t attention_window(const AttentionList *list, size_t layer) {
    return number_of(list, WINDOW, layer);
}

size_t attention_window_size(const AttentionList *list, size_t window) {
    return (size_t)distinct_value(list, WINDOW, window);
}

bool attention_has(const AttentionList *list, Scalar scalar) {
    bool any = false;
    for (size_t i = 0; i < list->count; i++) any |= normalizer_has(&list->items[i].layer.normalizer, scalar);
    return any;
}

bool attention_trains(const AttentionList *list, Scalar scalar) {
    bool any = false;
    for (size_t i = 0; i < list->count; i++) any |= normalizer_trains(&list->items[i].layer.normalizer, scalar);
    return any;
}

size_t attention_p_keys(const AttentionList *list, size_t T) {
    size_t most = 0;
    for (size_t i = 0; i < list->count; i++) {
        const LayerAttention *layer = &list->items[i].layer;
        size_t keys = normalizer_has(&layer->normalizer, SCALAR_P) ? attention_keys(layer, T) : 0;
        if (keys > most) most = keys;
    }
    return most;
}

bool attention_fits(const AttentionList *list, size_t L, char *message, size_t size) {
    for (size_t i = 0; i < list->count; i++)
        if (!normalizer_fits(&list->items[i].layer.normalizer, L, message, size)) return false;
    return true;
}

void attention_warn_of_start(const AttentionList *from, const AttentionList *to, size_t layers, const char *flag,
                             const char *value) {
    bool warned = false;
    for (size_t l = 0; l < layers && !warned; l++)
        warned =
            normalizer_warn_of_start(&attention_at(from, l)->normalizer, &attention_at(to, l)->normalizer, flag, value);
}

AttentionList attention_by_row(const AttentionList *list) {
    AttentionList by_row = *list;
    for (size_t i = 0; i < list->count; i++)
        by_row.items[i].layer.normalizer = normalizer_by_row(&list->items[i].layer.normalizer);
    return by_row;
}

const char *attention_beyond_plain(const AttentionList *list) {
    for (size_t i = 0; i < list->count; i++) {
        const LayerAttention *layer = &list->items[i].layer;
        if (layer->window) return "+window=";
        if (layer->rope != 0) return "+rope=";
        if (layer->normalizer.cap != 0) return "+cap=";
    }
    return NULL;
}

// ---------------------------------------------------------------------------------------------------------------------
// Printing

const char *attention_shortest(const AttentionList *list, char *out, size_t size) {
    size_t at = 0;
    out[0] = 0;
    for (size_t i = 0; i < list->count && at < size; i++) {
        const LayerAttention *layer = &list->items[i].layer;
        char name[NORMALIZER_TEXT], count[32] = "", window[32] = "", rope[48] = "";
        if (list->items[i].count > 1) snprintf(count, sizeof count, "%zu*", list->items[i].count);
        if (layer->window) snprintf(window, sizeof window, "+window=%zu", layer->window);
        if (layer->rope == NO_ROPE) snprintf(rope, sizeof rope, "+rope=none");
        else if (layer->rope != 0) snprintf(rope, sizeof rope, "+rope=%s", number_text(layer->rope).text);
        at += (size_t)snprintf(out + at, size - at, "%s%s%s%s%s", i ? "," : "", count,
                               normalizer_shortest(&layer->normalizer, name, sizeof name), window, rope);
    }
    return out;
}

const char *attention_description(const AttentionList *list, size_t layers, char *out, size_t size) {
    size_t at = 0;
    out[0] = 0;
    for (size_t i = 0; i < list->count && at < size; i++) {
        const LayerAttention *layer = &list->items[i].layer;
        char window[32] = "", rope[48] = "";
        size_t count = 0, same = 0;
        for (size_t j = 0; j < i; j++) same += same_layer(layer, &list->items[j].layer);
        for (size_t l = 0; l < layers; l++) count += same_layer(layer, attention_at(list, l));
        if (same) continue;
        if (layer->window) snprintf(window, sizeof window, ", window %zu", layer->window);
        if (layer->rope == NO_ROPE) snprintf(rope, sizeof rope, ", no RoPE");
        else if (layer->rope != 0) snprintf(rope, sizeof rope, ", RoPE's theta %s", number_text(layer->rope).text);
        at += (size_t)snprintf(out + at, size - at, "%s%zu x %s%s%s", i ? "; " : "", count, layer->normalizer.text,
                               window, rope);
    }
    return out;
}
