// Opens a tokenizer.json. Every setting that would produce other ids than tokenizer.c is a reason to reject it.
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/json.h"
#include "runtime/utf8.h"
#include "text/tokenizer_parts.h"

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))
#define ID_LIMIT (1 << 24)
#define NAME_LIMIT 1024    // the most bytes of a token's name in a merge; GPT-2's longest has 256
#define LOW_LINE "\xE2\x96\x81"    // U+2581, which SentencePiece writes for a space

const char *const tokenizer_files[] = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", NULL};

// The token between documents is the first of these that exists.
static const char *const DOCUMENT_TOKENS[] = {"<|endoftext|>", "<|begin_of_text|>", "<s>"};

// The name of an added token, and the id of this name in model.vocab if it is written in other characters than the
// others there, or -1.
typedef struct {
    const char *text;
    int32_t id;
} AddedName;

typedef struct {
    Tokenizer *t;
    const cJSON *root, *model, *vocab, *added;
    AddedName *names;    // of `added`, in order
    size_t names_count;
    int16_t byte_of[0x180];    // ByteLevel's alphabet: the byte that a character stands for, or -1
    Error *error;
} Opening;

static bool bad(Opening *o, const char *what, const char *name) {
    return error_set(o->error, EXIT_INPUT, "%s: %s%.60s.", o->t->path, what, name);
}

static bool no_memory(Opening *o) {
    return error_set(o->error, EXIT_RESOURCE, "%s: out of memory to read the tokenizer.", o->t->path);
}

static uint32_t *table_create(size_t entries, size_t *mask) {
    size_t size = 16;
    while (size < 2 * entries) size *= 2;
    *mask = size - 1;
    return calloc(size, sizeof(uint32_t));
}

static const cJSON *get(const cJSON *object, const char *key) {
    return cJSON_GetObjectItemCaseSensitive(object, key);
}

static bool is_empty(const cJSON *item) {
    return !item || cJSON_IsNull(item) || cJSON_IsFalse(item) || (cJSON_IsString(item) && !item->valuestring[0]);
}

static bool is_text(const cJSON *item, const char *text) {
    return cJSON_IsString(item) && strcmp(item->valuestring, text) == 0;
}

static bool has_type(const cJSON *item, const char *type) {
    return is_text(get(item, "type"), type);
}

// Is this a Sequence of two? Sets them.
static bool is_pair(const cJSON *item, const char *key, const cJSON **first, const cJSON **second) {
    const cJSON *parts = get(item, key);
    if (!has_type(item, "Sequence") || !cJSON_IsArray(parts) || cJSON_GetArraySize(parts) != 2) return false;
    *first = parts->child;
    *second = parts->child->next;
    return true;
}

// ---- which kind of tokenizer it is

static bool is_byte_level(const cJSON *words, bool regex) {
    return has_type(words, "ByteLevel") && is_empty(get(words, "add_prefix_space")) &&
           cJSON_IsFalse(get(words, "use_regex")) == !regex;
}

// The pre_tokenizer of a byte-level tokenizer. Returns false if it is none that we know.
static bool read_split(const cJSON *words, Split *split) {
    const cJSON *first, *second;
    if (is_byte_level(words, true)) {
        *split = SPLIT_GPT2;
        return true;
    }
    if (!is_pair(words, "pretokenizers", &first, &second)) return false;
    if (has_type(first, "Digits") && cJSON_IsTrue(get(first, "individual_digits")) && is_byte_level(second, true)) {
        *split = SPLIT_DIGITS;
        return true;
    }
    const cJSON *pattern = get(get(first, "pattern"), "Regex");
    return has_type(first, "Split") && is_text(get(first, "behavior"), "Isolated") && is_empty(get(first, "invert")) &&
           is_byte_level(second, false) && cJSON_IsString(pattern) && split_of_pattern(pattern->valuestring, split);
}

// Is this a Replace of spaces by U+2581?
static bool is_replace(const cJSON *normalizer) {
    return has_type(normalizer, "Replace") && is_text(get(get(normalizer, "pattern"), "String"), " ") &&
           is_text(get(normalizer, "content"), LOW_LINE);
}

// Is this a Prepend of U+2581 and a Replace?
static bool is_prepend(const cJSON *normalizer) {
    const cJSON *first, *second;
    return is_pair(normalizer, "normalizers", &first, &second) && has_type(first, "Prepend") &&
           is_text(get(first, "prepend"), LOW_LINE) && is_replace(second);
}

// The normalizer and pre_tokenizer of a tokenizer with byte fallback. Returns false if they are none that we know.
static bool read_lead(const cJSON *normalizer, const cJSON *words, Lead *lead) {
    static const struct {
        const char *scheme;
        Lead lead;
    } schemes[] = {{"always", LEAD_IF_MISSING}, {"first", LEAD_FIRST_MISSING}, {"never", LEAD_NONE}};
    bool prepends = is_prepend(normalizer);
    if ((prepends || is_replace(normalizer)) && is_empty(words)) {
        *lead = prepends ? LEAD_EVERY_PART : LEAD_NONE;
        return true;
    }
    bool metaspace = is_empty(normalizer) && has_type(words, "Metaspace") && cJSON_IsFalse(get(words, "split")) &&
                     is_text(get(words, "replacement"), LOW_LINE);
    const cJSON *scheme = get(words, "prepend_scheme");
    bool never = cJSON_IsFalse(get(words, "add_prefix_space"));    // of older files
    for (size_t i = 0; metaspace && i < COUNT(schemes); i++) {
        bool chosen = scheme ? is_text(scheme, schemes[i].scheme) : i == (never ? 2 : 0);
        if (!chosen || (never && schemes[i].lead != LEAD_NONE)) continue;
        *lead = schemes[i].lead;
        return true;
    }
    return false;
}

// The item as JSON, cut off if it is long.
static void add_found(Reasons *reasons, const char *expected, const char *name, const cJSON *item) {
    char *text = item ? cJSON_PrintUnformatted(item) : NULL;
    reasons_add(reasons, "expected %s, found %s %.300s", expected, name, text ? text : "null");
    cJSON_free(text);
}

// Adds the reasons that the two kinds have each for itself, and sets what distinguishes tokenizers of a kind.
static void check_text(Opening *o, Reasons *reasons) {
    Tokenizer *t = o->t;
    const cJSON *normalizer = get(o->root, "normalizer"), *words = get(o->root, "pre_tokenizer");
    t->whole_words = cJSON_IsTrue(get(o->model, "ignore_merges"));
    t->characters = cJSON_IsTrue(get(o->model, "byte_fallback"));
    if (t->characters) {
        if (t->whole_words) reasons_add(reasons, "expected model.ignore_merges false, as byte_fallback is true");
        if (read_lead(normalizer, words, &t->lead)) return;
        add_found(reasons, "normalizer and pre_tokenizer like those of Llama 2, TinyLlama or Mistral", "pre_tokenizer",
                  words);
        return;
    }
    t->nfc = has_type(normalizer, "NFC");
    if (!t->nfc && !is_empty(normalizer)) reasons_add(reasons, "expected normalizer \"NFC\" or none");
    if (!read_split(words, &t->split))
        add_found(reasons, "a pre_tokenizer like that of GPT-2, SmolLM2, Llama 3, Qwen2 or Qwen3 (see doc/data.md)",
                  "pre_tokenizer", words);
}

// Are all added tokens special, or else found in the text as it is? Like data/vocabulary.py, we never search for
// special tokens in text.
static bool are_found_as_they_are(const cJSON *added) {
    const cJSON *token;
    cJSON_ArrayForEach(token, added) {
        if (!cJSON_IsFalse(get(token, "special"))) continue;
        if (!cJSON_IsFalse(get(token, "normalized")) || !is_empty(get(token, "single_word")) ||
            !is_empty(get(token, "lstrip")) || !is_empty(get(token, "rstrip"))) {
            return false;
        }
    }
    return true;
}

// Rejects every setting that would produce other ids, and lists all of them at once.
static bool check_kind(Opening *o) {
    const cJSON *model = o->model;
    const struct {
        bool right;
        const char *expected;
    } rows[] = {
        {!get(model, "type") || has_type(model, "BPE"), "model.type \"BPE\""},
        {cJSON_IsObject(o->vocab), "an object model.vocab"},
        {cJSON_IsArray(get(model, "merges")), "an array model.merges"},
        {is_empty(get(model, "continuing_subword_prefix")), "no model.continuing_subword_prefix"},
        {is_empty(get(model, "end_of_word_suffix")), "no model.end_of_word_suffix"},
        {is_empty(get(model, "dropout")), "no model.dropout"},
        {are_found_as_they_are(o->added),
         "special false in added_tokens only where normalized, single_word, lstrip and rstrip are false"},
    };
    Reasons reasons = {0};
    for (size_t i = 0; i < COUNT(rows); i++)
        if (!rows[i].right) reasons_add(&reasons, "expected %s", rows[i].expected);
    check_text(o, &reasons);
    return !reasons.count ||
           error_set(o->error, EXIT_INPUT,
                     "%s: the C programs cannot encode text with this tokenizer; data/text.py --tokenizer can:%s",
                     o->t->path, reasons_text(&reasons).text);
}

// ---- the names of tokens

// vocab.json writes each byte as a printable character: the byte itself if it is printable, otherwise the next free
// character from U+0100 on.
static void byte_alphabet(int16_t byte_of[0x180]) {
    memset(byte_of, -1, 0x180 * sizeof(*byte_of));
    for (int byte = 0, next = 0x100; byte < 256; byte++) {
        bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
        byte_of[printable ? byte : next++] = (int16_t)byte;
    }
}

// Writes the bytes that a name (`length` bytes of UTF-8) stands for, never more than it has: in ByteLevel's alphabet,
// or with U+2581 for spaces. Returns false if the name contains a character that stands for nothing.
static bool bytes_of_name(const Opening *o, const char *name, size_t length, char *out, size_t *out_length) {
    *out_length = 0;
    for (size_t at = 0, width; at < length; at += width) {
        uint32_t code = utf8_get((const uint8_t *)name + at, length - at, &width);
        if (o->t->characters && code != 0x2581) {
            if (code == ' ') return false;
            memcpy(out + *out_length, name + at, width);
            *out_length += width;
            continue;
        }
        if (!o->t->characters && (code >= 0x180 || o->byte_of[code] < 0)) return false;
        out[(*out_length)++] = o->t->characters ? ' ' : (char)o->byte_of[code];
    }
    return true;
}

// The byte of a name such as "<0x0A>" in a tokenizer with byte fallback, or -1.
static int fallback_byte(const Opening *o, const char *name) {
    static const char digits[] = "0123456789ABCDEF";
    const char *high = NULL, *low = NULL;
    if (!o->t->characters || strlen(name) != 6 || memcmp(name, "<0x", 3) != 0 || name[5] != '>') return -1;
    if (!(high = strchr(digits, name[3])) || !(low = strchr(digits, name[4]))) return -1;
    return (int)((high - digits) * 16 + (low - digits));
}

static int compare_texts(const void *a, const void *b) {
    return strcmp(((const AddedName *)a)->text, ((const AddedName *)b)->text);
}

static AddedName *find_added(const Opening *o, const char *text) {
    AddedName wanted = {.text = text};
    return bsearch(&wanted, o->names, o->names_count, sizeof(wanted), compare_texts);
}

static bool is_id(const cJSON *item) {
    return cJSON_IsNumber(item) && item->valuedouble >= 0 && item->valuedouble < ID_LIMIT &&
           item->valuedouble == (int)item->valuedouble;
}

// Checks all ids and allocates memory for the tokens.
static bool make_room(Opening *o) {
    Tokenizer *t = o->t;
    const cJSON *item;
    size_t entries = 0, bytes = 0, added = 0;
    cJSON_ArrayForEach(item, o->vocab) {
        if (!is_id(item)) return bad(o, "expected a whole number from 0 as the id of ", item->string);
        if (item->valueint >= t->vocab) t->vocab = item->valueint + 1;
        bytes += strlen(item->string);
        entries++;
    }
    cJSON_ArrayForEach(item, o->added) {
        const cJSON *id = get(item, "id"), *content = get(item, "content");
        if (!is_id(id) || !cJSON_IsString(content)) return bad(o, "expected id and content in added_tokens", "");
        if (!content->valuestring[0]) return bad(o, "an empty content in added_tokens", "");
        if (id->valueint >= t->vocab) t->vocab = id->valueint + 1;
        bytes += strlen(content->valuestring);
        added++;
    }
    t->tokens = calloc((size_t)t->vocab + 1, sizeof(*t->tokens));
    t->added = calloc(added + 1, sizeof(*t->added));
    o->names = calloc(added + 1, sizeof(*o->names));
    t->bytes = malloc(bytes + NAME_LIMIT);    // id_in_vocab() needs room beyond the names
    t->names = table_create(entries, &t->names_mask);
    if (!t->tokens || !t->added || !o->names || !t->bytes || !t->names) return no_memory(o);
    cJSON_ArrayForEach(item, o->added) {
        o->names[o->names_count++] = (AddedName){get(item, "content")->valuestring, -1};
    }
    qsort(o->names, added, sizeof(*o->names), compare_texts);
    return true;
}

// Takes the last `length` bytes of t->bytes.
static Token take_bytes(Tokenizer *t, size_t length) {
    Token token = {t->bytes + t->bytes_used, length};
    t->bytes_used += length;
    return token;
}

// ---- model.vocab

static bool set_token(Opening *o, int id, size_t length, const char *name) {
    if (o->t->tokens[id].bytes) return bad(o, "another token has the id of ", name);
    o->t->tokens[id] = take_bytes(o->t, length);
    return true;
}

static bool read_token(Opening *o, const cJSON *item) {
    Tokenizer *t = o->t;
    size_t length;
    int byte = fallback_byte(o, item->string);
    if (byte >= 0) {
        t->bytes[t->bytes_used] = (char)byte;
        t->byte_id[byte] = item->valueint;
        return set_token(o, item->valueint, 1, item->string);
    }
    bool plain = bytes_of_name(o, item->string, strlen(item->string), t->bytes + t->bytes_used, &length);
    AddedName *added = plain ? NULL : find_added(o, item->string);    // whose name may be any text
    if (added) {
        added->id = item->valueint;
        return true;
    }
    if (!plain) return bad(o, "a character that does not represent a byte in the token ", item->string);
    uint32_t *slot = tokenizer_name_slot(t, t->bytes + t->bytes_used, length);
    if (*slot) return bad(o, "two ids for the token ", item->string);
    if (!set_token(o, item->valueint, length, item->string)) return false;
    *slot = (uint32_t)item->valueint + 1;
    return true;
}

// Finds the tokens of single bytes. Without unk_token, a byte-level tokenizer may lack some.
static bool find_bytes(Opening *o) {
    const cJSON *unknown = get(o->model, "unk_token");
    bool all = o->t->characters || (unknown && !cJSON_IsNull(unknown));
    for (int byte = 0; byte < 256; byte++) {
        char bytes[1] = {(char)byte}, number[8];
        if (!o->t->characters) o->t->byte_id[byte] = (int32_t)*tokenizer_name_slot(o->t, bytes, 1) - 1;
        snprintf(number, sizeof(number), "0x%02X", byte);
        if (o->t->byte_id[byte] < 0 && all) return bad(o, "no token for the single byte ", number);
    }
    return true;
}

static bool read_vocab(Opening *o) {
    const cJSON *item;
    memset(o->t->byte_id, -1, sizeof(o->t->byte_id));
    cJSON_ArrayForEach(item, o->vocab) {
        if (!read_token(o, item)) return false;
    }
    return find_bytes(o);
}

// ---- model.merges

// Parses one merge, "left right" or ["left", "right"].
static bool read_merge(const Opening *o, const cJSON *item, Merge *merge) {
    const char *left = NULL, *right = NULL;
    char room[2 * NAME_LIMIT];
    size_t left_length = 0, lengths[2];
    if (cJSON_IsString(item) && (right = strchr(item->valuestring, ' '))) {
        left = item->valuestring;
        left_length = (size_t)(right++ - left);
    } else if (cJSON_GetArraySize(item) == 2 && cJSON_IsString(item->child) && cJSON_IsString(item->child->next)) {
        left = item->child->valuestring;
        right = item->child->next->valuestring;
        left_length = strlen(left);
    }
    if (!left || left_length > NAME_LIMIT || strlen(right) > NAME_LIMIT) return false;
    if (!bytes_of_name(o, left, left_length, room, &lengths[0]) ||
        !bytes_of_name(o, right, strlen(right), room + lengths[0], &lengths[1])) {
        return false;
    }
    merge->left = (int32_t)*tokenizer_name_slot(o->t, room, lengths[0]) - 1;
    merge->right = (int32_t)*tokenizer_name_slot(o->t, room + lengths[0], lengths[1]) - 1;
    merge->result = (int32_t)*tokenizer_name_slot(o->t, room, lengths[0] + lengths[1]) - 1;
    return merge->left >= 0 && merge->right >= 0 && merge->result >= 0;
}

static bool bad_row(Opening *o, const char *what) {
    char row[64];
    snprintf(row, sizeof(row), ", in row %zu of model.merges", o->t->merges_count);
    return bad(o, what, row);
}

// Is there a space after something else?
static bool has_inner_space(Token token) {
    size_t lead = 0;
    while (lead < token.length && token.bytes[lead] == ' ') lead++;
    return memchr(token.bytes + lead, ' ', token.length - lead) != NULL;
}

static bool read_merges(Opening *o) {
    Tokenizer *t = o->t;
    const cJSON *merges = get(o->model, "merges"), *item;
    size_t entries = (size_t)cJSON_GetArraySize(merges);
    if (entries >= ID_LIMIT) return bad(o, "more than 16 million rows in model.merges", "");
    t->merges = malloc((entries + 1) * sizeof(*t->merges));
    t->pairs = table_create(entries, &t->pairs_mask);
    if (!t->merges || !t->pairs) return no_memory(o);
    // The library merges a whole text. If no merge crosses the start of a run of spaces, words give the same, faster.
    if (t->characters) t->split = SPLIT_SPACES;
    cJSON_ArrayForEach(item, merges) {
        Merge *merge = &t->merges[t->merges_count];
        if (!read_merge(o, item, merge)) return bad_row(o, "expected two tokens whose concatenation is a token");
        uint32_t *slot = tokenizer_pair_slot(t, merge->left, merge->right);
        if (*slot) return bad_row(o, "a duplicate pair");
        *slot = (uint32_t)++t->merges_count;
        if (t->characters && has_inner_space(t->tokens[merge->result])) t->split = SPLIT_NONE;
    }
    return true;
}

// ---- added_tokens

// The id of a name in model.vocab, or -1.
static int32_t id_in_vocab(const Opening *o, const char *name) {
    size_t length = strlen(name), out_length;
    int byte = fallback_byte(o, name);
    char *room = o->t->bytes + o->t->bytes_used;    // has room for the name
    if (byte >= 0) return o->t->byte_id[byte];
    if (bytes_of_name(o, name, length, room, &out_length))
        return (int32_t)*tokenizer_name_slot(o->t, room, out_length) - 1;
    const AddedName *added = find_added(o, name);
    return added ? added->id : -1;
}

static int compare_added(const void *a, const void *b) {
    const Added *left = a, *right = b;
    size_t shorter = left->name.length < right->name.length ? left->name.length : right->name.length;
    int order = memcmp(left->name.bytes, right->name.bytes, shorter);
    if (order) return order;
    if (left->name.length != right->name.length) return left->name.length < right->name.length ? -1 : 1;
    return (left->id < right->id) - (left->id > right->id);
}

static bool starts_with(Token name, Token start) {
    return name.length >= start.length && memcmp(name.bytes, start.bytes, start.length) == 0;
}

// Orders the added tokens by name. A name's prefixes are the one before it, or that one's prefixes.
static void order_added(Tokenizer *t) {
    qsort(t->added, t->added_count, sizeof(*t->added), compare_added);
    for (size_t i = 0; i < t->added_count; i++) {
        int32_t prefix = (int32_t)i - 1;
        while (prefix >= 0 && !starts_with(t->added[i].name, t->added[prefix].name)) prefix = t->added[prefix].prefix;
        t->added[i].prefix = prefix;
    }
}

// The `tokenizers` library, whatever the file says, reuses the ids of added tokens that are in model.vocab and numbers
// the others from its size on.
static bool read_added(Opening *o) {
    Tokenizer *t = o->t;
    const cJSON *item;
    int32_t next = cJSON_GetArraySize(o->vocab);
    cJSON_ArrayForEach(item, o->added) {
        const char *content = get(item, "content")->valuestring;
        int32_t id = get(item, "id")->valueint, known = id_in_vocab(o, content);
        if (id != (known < 0 ? next : known)) {
            return bad(o, "expected ids in added_tokens that continue those of model.vocab, found another for ",
                       content);
        }
        if (id >= next) next = id + 1;
        memcpy(t->bytes + t->bytes_used, content, strlen(content));
        Added added = {.name = take_bytes(t, strlen(content)),
                       .id = id,
                       .special = !cJSON_IsFalse(get(item, "special")),
                       .normalized = cJSON_IsTrue(get(item, "normalized"))};
        if (!t->tokens[id].bytes) t->tokens[id] = added.name;
        t->starts_added[(uint8_t)content[0]] |= !added.normalized;
        t->added[t->added_count++] = added;
    }
    order_added(t);
    return true;
}

static bool find_end_of_text(Opening *o) {
    for (size_t i = 0; i < COUNT(DOCUMENT_TOKENS); i++) {
        const char *name = DOCUMENT_TOKENS[i];
        o->t->end_of_text = tokenizer_special(o->t, name);
        if (o->t->end_of_text < 0) o->t->end_of_text = id_in_vocab(o, name);
        if (o->t->end_of_text >= 0) return true;
    }
    return bad(o, "no token <|endoftext|>, <|begin_of_text|> or <s>, one of which must be between documents", "");
}

// ---- post_processor

// The first step of a TemplateProcessing, alone or in a Sequence, is the token in front of a text, if it is a token.
static bool read_begins(Opening *o) {
    const cJSON *processor = get(o->root, "post_processor"), *item, *found = NULL;
    const cJSON *all = has_type(processor, "Sequence") ? get(processor, "processors") : NULL;
    if (has_type(processor, "TemplateProcessing")) found = processor;
    cJSON_ArrayForEach(item, all) {
        if (has_type(item, "TemplateProcessing")) found = item;
    }
    const cJSON *first = get(get(cJSON_GetArrayItem(get(found, "single"), 0), "SpecialToken"), "id");
    o->t->begins = -1;
    if (!cJSON_IsString(first)) return true;
    o->t->begins = tokenizer_special(o->t, first->valuestring);
    return o->t->begins >= 0 ||
           bad(o, "expected a special token of added_tokens at the start of post_processor, found ",
               first->valuestring);
}

// ---- the file

static bool read_json(Opening *o) {
    byte_alphabet(o->byte_of);
    o->model = get(o->root, "model");
    o->vocab = get(o->model, "vocab");
    o->added = get(o->root, "added_tokens");
    return check_kind(o) && make_room(o) && read_vocab(o) && read_merges(o) && read_added(o) && find_end_of_text(o) &&
           read_begins(o);
}

static char *file_in(const char *path) {
    struct stat info;
    bool folder = stat(path, &info) == 0 && S_ISDIR(info.st_mode);
    size_t size = strlen(path) + strlen(tokenizer_files[0]) + 2;
    char *full = malloc(size);
    if (full) snprintf(full, size, "%s%s%s", path, folder ? "/" : "", folder ? tokenizer_files[0] : "");
    return full;
}

// transformers' classes for Llama put no space in front of a text if tokenizer_config.json has add_prefix_space false,
// whatever tokenizer.json says; data/vocabulary.py does the same.
static bool read_settings(Tokenizer *t, Error *error) {
    static const char *const classes[] = {"LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer"};
    const char *slash = strrchr(t->path, '/');
    char path[PATH_MAX];
    snprintf(path, sizeof(path), "%.*s%s", slash ? (int)(slash + 1 - t->path) : 0, t->path, tokenizer_files[1]);
    if (t->lead == LEAD_NONE || access(path, F_OK) != 0) return true;
    cJSON *json = json_read(path, JSON_LARGE, error);
    const char *class = cJSON_GetStringValue(get(json, "tokenizer_class"));
    for (size_t i = 0; class && i < COUNT(classes); i++) {
        size_t length = strlen(classes[i]);
        bool same = strncmp(class, classes[i], length) == 0 && (!class[length] || !strcmp(class + length, "Fast"));
        if (same && cJSON_IsFalse(get(json, "add_prefix_space"))) t->lead = LEAD_NONE;
    }
    cJSON_Delete(json);
    return json != NULL;
}

static bool open_file(Tokenizer *t, Error *error) {
    if (getentropy(&t->seed, sizeof(t->seed)) != 0) t->seed = (uintptr_t)t;
    t->seed |= 1;
    cJSON *root = json_read(t->path, JSON_LARGE, error);
    Opening opening = {.t = t, .root = root, .error = error};
    bool right = root && read_json(&opening) && read_settings(t, error);
    free(opening.names);
    cJSON_Delete(root);
    return right;
}

Tokenizer *tokenizer_open(const char *path, Error *error) {
    Tokenizer *t = calloc(1, sizeof(*t));
    if (!t || !(t->path = file_in(path))) {
        error_set(error, EXIT_RESOURCE, "%s: out of memory to read the tokenizer.", path);
    } else if (open_file(t, error)) {
        return t;
    }
    tokenizer_close(t);
    return NULL;
}

// Counts an id, and keeps it if it is that of a better token between documents than the one of `rank`.
static void count_id(const cJSON *id, const char *name, int *vocab, int *end_of_text, size_t *rank) {
    if (!is_id(id)) return;
    if (id->valueint >= *vocab) *vocab = id->valueint + 1;
    for (size_t i = 0; name && i < *rank; i++) {
        if (strcmp(name, DOCUMENT_TOKENS[i]) != 0) continue;
        *end_of_text = id->valueint;
        *rank = i;
    }
}

bool tokenizer_ids(const char *path, int *vocab, int *end_of_text) {
    Error error;
    char *file = file_in(path);
    cJSON *root = file ? json_read(file, JSON_LARGE, &error) : NULL;
    const cJSON *ids = get(get(root, "model"), "vocab"), *item;
    size_t rank = COUNT(DOCUMENT_TOKENS);
    *vocab = cJSON_IsArray(ids) ? cJSON_GetArraySize(ids) : 0;    // Unigram has a list, whose indices are the ids
    *end_of_text = -1;
    cJSON_ArrayForEach(item, ids) {
        count_id(item, item->string, vocab, end_of_text, &rank);
    }
    cJSON_ArrayForEach(item, get(root, "added_tokens")) {
        count_id(get(item, "id"), cJSON_GetStringValue(get(item, "content")), vocab, end_of_text, &rank);
    }
    cJSON_Delete(root);
    free(file);
    return *vocab > 0;
}
