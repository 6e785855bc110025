// Parses a hostile --attn: either it is rejected with a message, or parsing its stages or its shortest name gives the
// same normalizer again.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attention/normalizer.h"

static void parse_again(const Normalizer *expected, const char *text) {
    Normalizer again;
    char message[1024];
    if (!normalizer_parse(&again, text, message, sizeof message) || !normalizer_equal(expected, &again)) abort();
    if (isnan(expected->s_start) ? !isnan(again.s_start) : expected->s_start != again.s_start) abort();
}

// A message is not empty and ends within its buffer, however small that is.
static void check_message(const char *text, size_t room) {
    Normalizer normalizer;
    char *message = malloc(room);
    memset(message, '#', room);
    if (normalizer_parse(&normalizer, text, message, room)) abort();
    if (!memchr(message, 0, room) || !message[0]) abort();
    free(message);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    Normalizer normalizer;
    char message[1024] = "", stage[64], shortest[NORMALIZER_TEXT], written[1024] = "softmax";
    char *text = malloc(size + 1);    // an allocation of the exact size, so that a read past its end is detected
    memcpy(text, bytes, size);
    text[size] = 0;
    if (!normalizer_parse(&normalizer, text, message, sizeof message)) {
        check_message(text, sizeof message);
        check_message(text, 8);
        free(text);
        return 0;
    }
    if (strcmp(normalizer.text, text)) abort();
    for (size_t i = 0; i < STAGE_COUNT; i++)
        sprintf(written + strlen(written), "+%s=%s", stage_names[i],
                normalizer_stage_text(&normalizer, i, stage, sizeof stage));
    if (!isnan(normalizer.s_start)) sprintf(written + strlen(written), "+s=%.17g", normalizer.s_start);
    if (normalizer.cap != 0) sprintf(written + strlen(written), "+cap=%.17g", normalizer.cap);
    if (normalizer.fixed) strcat(written, "+fixed");
    if (strlen(written) < NORMALIZER_TEXT) parse_again(&normalizer, written);
    if (strlen(normalizer_shortest(&normalizer, shortest, sizeof shortest)) > strlen(text)) abort();
    parse_again(&normalizer, shortest);
    free(text);
    return 0;
}
