#include "runtime/number.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool number_read(const char *text, size_t length, double *number) {
    char copy[64], *end;
    size_t n = 0;
    for (size_t i = 0; i < length; i++) {
        bool digits_beside =
            i > 0 && i + 1 < length && isdigit((unsigned char)text[i - 1]) && isdigit((unsigned char)text[i + 1]);
        if (text[i] == '_' && digits_beside) continue;                                    // 1_000_000
        if (!strchr("0123456789+-.eE", text[i]) || n + 1 == sizeof copy) return false;    // no hex, inf or nan
        copy[n++] = text[i];
    }
    copy[n] = 0;
    *number = strtod(copy, &end);
    return n > 0 && *end == 0 && isfinite(*number);
}

// A decimal of up to 15 digits survives the conversion to a double and back, so %.15g already finds the fewest digits.
NumberText number_text(double x) {
    NumberText out;
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(out.text, sizeof out.text, "%.*g", digits, x);
        if (strtod(out.text, NULL) == x) break;
    }
    return out;
}
