#include "runtime/human.h"

#include <math.h>
#include <stdio.h>

// Three significant digits and a unit; 999.6 rounds up to 1.00 of the next unit.
static Human scaled(double n, const char *const units[], int count) {
    Human h;
    int unit = 0;
    while (fabs(n) >= 999.5 && unit < count - 1) {
        n /= 1000;
        unit++;
    }
    int decimals = 2;
    if (fabs(n) >= 9.995) decimals = 1;
    if (fabs(n) >= 99.95 || unit == 0) decimals = 0;
    snprintf(h.text, sizeof h.text, "%.*f%s%s", decimals, n, units[unit][0] ? " " : "", units[unit]);
    return h;
}

Human human_count(double n) {
    static const char *const units[] = {"", "k", "M", "B", "T"};
    return scaled(n, units, 5);
}

Human human_bytes(double bytes) {
    static const char *const units[] = {"bytes", "kB", "MB", "GB", "TB", "PB"};
    return scaled(bytes, units, 6);
}

Human human_duration(double seconds) {
    Human h = {"unknown"};
    if (!(seconds >= 0 && seconds < 3e12)) return h;
    long long s = llround(seconds), minutes = s / 60, hours = minutes / 60;
    if (s < 60) snprintf(h.text, sizeof h.text, "%lld s", s);
    else if (hours < 1) snprintf(h.text, sizeof h.text, "%lld min %lld s", minutes, s % 60);
    else if (hours < 24) snprintf(h.text, sizeof h.text, "%lld h %lld min", hours, minutes % 60);
    else snprintf(h.text, sizeof h.text, "%lld d %lld h", hours / 24, hours % 24);
    return h;
}

Human human_grouped(uint64_t n) {
    Human h;
    char digits[24];
    int length = snprintf(digits, sizeof digits, "%llu", (unsigned long long)n), out = 0;
    for (int i = 0; i < length; i++) {
        if (i > 0 && (length - i) % 3 == 0) h.text[out++] = ',';
        h.text[out++] = digits[i];
    }
    h.text[out] = 0;
    return h;
}
