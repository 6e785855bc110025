#include "eval/scores.h"

#include <math.h>
#include <stdio.h>

static void print_values(const char *name, const float *values, size_t count) {
    double sum = 0, least = INFINITY, most = -INFINITY;
    for (size_t i = 0; i < count; i++) {
        sum += values[i];
        least = fmin(least, (double)values[i]);
        most = fmax(most, (double)values[i]);
    }
    printf("  %s %.4f (%.4f to %.4f)", name, rounded(sum / (double)count, 1e4), rounded(least, 1e4),
           rounded(most, 1e4));
}

static void add_values(cJSON *object, const char *name, const float *values, size_t count) {
    cJSON *array = cJSON_AddArrayToObject(object, name);
    for (size_t i = 0; i < count; i++) cJSON_AddItemToArray(array, cJSON_CreateNumber(values[i]));
}

// The scale of head h is c = (a1 ln n + a2)/sqrt(d): a1 = s and a2 = b, or with p_n = p1 ln n + p2 (its fit), a1 = s p1
// and a2 = s p2 + b.
static void add_fits(Eval *e, cJSON *layer, const Scalars *scalars) {
    const float *s = scalars->of[SCALAR_S], *b = scalars->of[SCALAR_B];
    const cJSON *fit_of_pn = scalars->of[SCALAR_P] ? e->pn_fit : NULL;
    const cJSON *p1 = cJSON_GetObjectItem(fit_of_pn, "a1"), *p2 = cJSON_GetObjectItem(fit_of_pn, "a2");
    cJSON *fits = cJSON_AddArrayToObject(layer, "fits");
    double sums[2] = {0, 0}, heads = (double)e->config->heads;
    for (size_t h = 0; h < e->config->heads; h++) {
        double offset = b ? (double)b[h] : 0;
        double a1 = p1 ? s[h] * p1->valuedouble : (double)s[h], a2 = p2 ? s[h] * p2->valuedouble + offset : offset;
        cJSON *fit = cJSON_CreateObject();
        cJSON_AddNumberToObject(fit, "a1", a1);
        cJSON_AddNumberToObject(fit, "a2", a2);
        cJSON_AddItemToArray(fits, fit);
        sums[0] += a1 / heads;
        sums[1] += a2 / heads;
    }
    printf("  scale %.4f ln n %+.4f", rounded(sums[0], 1e4), rounded(sums[1], 1e4));
}

void scores_report(Eval *e, const TensorList *list, const float *params) {
    const AttentionList *attn = &e->config->attn;
    size_t heads = e->config->heads, L = e->config->seq_len;
    cJSON *row = eval_row(e), *layers = cJSON_AddArrayToObject(row, "layers");
    bool any = false;
    for (int x = 0; x < SCALAR_COUNT; x++) any = any || attention_has(attn, (Scalar)x);
    if (!any) printf("%s has no learned scalars\n", attn->text);
    for (int x = 0; x < SCALAR_COUNT; x++)
        if (attention_has(attn, (Scalar)x) && scalar_reach[x] == WHOLE_MODEL)
            add_values(row, scalar_names[x], params + list->scalar[x], scalar_size(x, heads, L));
    for (size_t l = 0; any && l < e->config->layers; l++) {
        Scalars scalars = scalars_of(list, params, l, attn);
        cJSON *layer = cJSON_CreateObject();
        bool own = false;
        printf("layer %2zu:", l);
        for (int x = 0; x < SCALAR_COUNT; x++) {
            if (!scalars.of[x] || scalar_reach[x] != EACH_LAYER) continue;
            own = true;
            print_values(scalar_names[x], scalars.of[x], scalar_size(x, heads, L));
            add_values(layer, scalar_names[x], scalars.of[x], scalar_size(x, heads, L));
        }
        if (scalars.of[SCALAR_S]) add_fits(e, layer, &scalars);
        printf(own ? "\n" : "  none\n");
        cJSON_AddItemToArray(layers, layer);
    }
    if (any) printf("mean over heads (minimum to maximum)\n");
}
