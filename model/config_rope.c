// Reads RoPE's keys of config.json.
#include <stdio.h>
#include <string.h>

#include "model/config.h"

// The kind of scaling: of rope_type, called type in the oldest files. Returns ROPE_KINDS with the reason if it is
// unsupported.
static RopeKind read_rope_type(Reader *r, const cJSON *rope, const char *prefix) {
    static const char *const keys[] = {"rope_type", "type"};
    RopeKind found = ROPE_KINDS;
    for (size_t i = 0; i < COUNT(keys); i++) {
        const cJSON *type = cJSON_GetObjectItemCaseSensitive(rope, keys[i]);
        RopeKind kind = ROPE_NONE;
        if (!type || cJSON_IsNull(type)) continue;
        while (kind < ROPE_KINDS && !(cJSON_IsString(type) && !strcmp(type->valuestring, rope_shapes[kind].type)))
            kind++;
        if (kind == ROPE_KINDS)
            reasons_add(&r->reasons,
                        "%s%s is %s; expected \"default\", \"linear\", \"dynamic\", \"llama3\" or \"yarn\"", prefix,
                        keys[i], value_of(type).text);
        else if (found != ROPE_KINDS && found != kind)
            reasons_add(&r->reasons, "%srope_type and %stype differ; remove the wrong one", prefix, prefix);
        if (kind == ROPE_KINDS) return kind;
        if (found == ROPE_KINDS) found = kind;
    }
    return found == ROPE_KINDS ? ROPE_NONE : found;
}

static void read_rope_theta(Reader *r, const cJSON *item, const char *prefix, double *theta) {
    if (!cJSON_IsNumber(item)) {
        if (!cJSON_IsNull(item))
            reasons_add(&r->reasons, "%srope_theta is %s; expected a number", prefix, value_of(item).text);
        return;
    }
    if (!isnan(*theta) && *theta != item->valuedouble)
        reasons_add(&r->reasons, "rope_theta is %.15g, but %srope_theta is %.15g; remove the wrong one", *theta, prefix,
                    item->valuedouble);
    *theta = item->valuedouble;
}

static void read_rope_number(Reader *r, const cJSON *rope, const char *prefix, const RopeNumber *number,
                             RopeScaling *scaling) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(rope, number->key);
    if (cJSON_IsNumber(item) && rope_scaling_set(scaling, number, item->valuedouble)) return;
    rope_scaling_set(scaling, number, number->min);    // so that what depends on it can be checked
    if (number->min == number->max)
        reasons_add(&r->reasons, "%s%s is %s; only %.15g is supported with rope_type \"%s\"", prefix, number->key,
                    value_of(item).text, number->min, rope_shapes[scaling->kind].type);
    else
        reasons_add(&r->reasons, "%s%s is %s; expected a %snumber from %.15g to %.15g", prefix, number->key,
                    value_of(item).text, number->whole ? "whole " : "", number->min, number->max);
}

// The part of each head that RoPE rotates. transformers reads it in every family, beside RoPE's parameters or in them.
static void read_rotary_part(Reader *r, const cJSON *item, const char *prefix) {
    if (!item || says_nothing(item) || (cJSON_IsNumber(item) && item->valuedouble == 1)) return;
    reasons_add(&r->reasons, "%s" ROTARY_PART " is %s; only 1 is supported: RoPE rotates whole heads", prefix,
                value_of(item).text);
}

static bool is_number_of(RopeKind kind, const char *key) {
    for (size_t n = 0; n < ROPE_NUMBERS && rope_shapes[kind].numbers[n]; n++)
        if (!strcmp(key, rope_shapes[kind].numbers[n]->key)) return true;
    return false;
}

// transformers lets a file replace these constants of yarn. Only the values that it uses by default are supported.
// Returns false if the key is none of them.
static bool read_yarn_constant(Reader *r, const cJSON *item, const char *prefix, const RopeScaling *scaling) {
    const struct {
        const char *key;
        double value;    // NAN: only null
    } constants[] = {{"beta_fast", 32},
                     {"beta_slow", 1},
                     {"attention_factor", rope_amplitude(scaling)},
                     {"mscale", NAN},
                     {"mscale_all_dim", NAN}};
    if (!strcmp(item->string, "truncate")) {
        if (!cJSON_IsNull(item) && !cJSON_IsTrue(item))
            reasons_add(&r->reasons, "%struncate is %s; only true is supported", prefix, value_of(item).text);
        return true;
    }
    for (size_t i = 0; i < COUNT(constants); i++) {
        if (strcmp(item->string, constants[i].key) != 0) continue;
        double value = constants[i].value;
        bool same = cJSON_IsNumber(item) && fabs(item->valuedouble - value) <= 1e-7 * value;
        if (same || cJSON_IsNull(item)) return true;
        if (isnan(value))
            reasons_add(&r->reasons, "%s%s is %s; it is not supported", prefix, item->string, value_of(item).text);
        else
            reasons_add(&r->reasons, "%s%s is %s; only transformers' default, %.8g, is supported", prefix, item->string,
                        value_of(item).text, value);
        return true;
    }
    return false;
}

// Reads rope_parameters, or rope_scaling as it was called before transformers 5. Returns false if the object is missing
// or empty.
static bool read_rope_object(Reader *r, const char *name, double *theta, RopeScaling *scaling) {
    const cJSON *rope = get(r, name), *item;
    char prefix[32];
    snprintf(prefix, sizeof prefix, "%s.", name);
    *scaling = (RopeScaling){.kind = ROPE_NONE};
    if (rope && !cJSON_IsObject(rope) && !cJSON_IsFalse(rope))
        reasons_add(&r->reasons, "\"%s\" is %s; expected an object", name, value_of(rope).text);
    if (!cJSON_IsObject(rope) || !rope->child) return false;
    RopeKind kind = read_rope_type(r, rope, prefix);
    if (kind != ROPE_KINDS) scaling->kind = kind;
    for (size_t n = 0; n < ROPE_NUMBERS && rope_shapes[scaling->kind].numbers[n]; n++)
        read_rope_number(r, rope, prefix, rope_shapes[scaling->kind].numbers[n], scaling);
    cJSON_ArrayForEach(item, rope) {
        if (!strcmp(item->string, "rope_type") || !strcmp(item->string, "type")) continue;
        if (!strcmp(item->string, "rope_theta")) read_rope_theta(r, item, prefix, theta);
        else if (is_number_of(scaling->kind, item->string)) continue;
        else if (scaling->kind == ROPE_YARN && read_yarn_constant(r, item, prefix, scaling)) continue;
        else if (kind == ROPE_KINDS) continue;
        else if (!strcmp(item->string, ROTARY_PART)) read_rotary_part(r, item, prefix);
        else config_unknown(r, prefix, item);
    }
    return true;
}

void config_rope(Reader *r) {
    const cJSON *outer = get(r, "rope_theta");
    double theta = cJSON_IsNumber(outer) ? outer->valuedouble : NAN;
    RopeScaling *scaling = &r->config->rope_scaling, older;
    int reasons = r->reasons.count;
    if (outer && !cJSON_IsNumber(outer))
        reasons_add(&r->reasons, "\"rope_theta\" is %s; expected a number", value_of(outer).text);
    if (!r->foreign) read_rotary_part(r, get(r, ROTARY_PART), "");
    bool newer = read_rope_object(r, "rope_parameters", &theta, scaling);
    if (read_rope_object(r, "rope_scaling", &theta, &older)) {
        if (newer && !rope_scaling_equal(scaling, &older))
            reasons_add(&r->reasons, "rope_parameters and rope_scaling differ; remove the wrong one");
        if (newer && !outer && !cJSON_GetObjectItemCaseSensitive(get(r, "rope_scaling"), "rope_theta") &&
            !isnan(theta) && theta != DEFAULT_ROPE_THETA)
            reasons_add(&r->reasons,
                        "rope_parameters.rope_theta is %.15g, but transformers ignores rope_parameters "
                        "where rope_scaling exists; remove rope_scaling",
                        theta);
        *scaling = older;
    }
    r->config->rope_theta = isnan(theta) ? DEFAULT_ROPE_THETA : theta;
    if (!(r->config->rope_theta > 1 && r->config->rope_theta < 1e12))
        reasons_add(&r->reasons, "rope_theta is %.15g; expected a number between 1 and 1e12", r->config->rope_theta);
    const char *wrong = rope_scaling_wrong(scaling, head_size(r->config));
    if (wrong && r->reasons.count == reasons)
        reasons_add(&r->reasons, "RoPE's scaling \"%s\": %s", rope_shapes[scaling->kind].type, wrong);
}

void config_check_ntk(Reader *r) {
    const cJSON *length = get(r, "max_position_embeddings");
    if (r->config->rope_scaling.kind != ROPE_NTK || r->foreign) return;
    if (!length || (cJSON_IsNumber(length) && length->valuedouble != r->config->seq_len))
        reasons_add(&r->reasons,
                    "\"max_position_embeddings\" is %s, but rope_type \"dynamic\" needs the training length%s",
                    value_of(length).text, length ? ", attention_normalizer.seq_len" : "");
}
