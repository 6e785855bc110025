#include "run/parts.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "math/random.h"
#include "runtime/error.h"
#include "runtime/own.h"
#include "runtime/path.h"
#include "runtime/utf8.h"
#include "text/sampler.h"

// ---- a step

// Appends "attn_scale": [[mean, least, largest] per layer], or the same for another learned scalar of the heads; nulls
// for a layer that does not train it.
static size_t scalar_statistics(char *out, size_t size, size_t at, const Weights *w, Scalar scalar) {
    const AttentionList *attn = &w->config->attn;
    if (!attention_trains(attn, scalar)) return at;
    at += (size_t)snprintf(out + at, size - at, ", \"%s\": [", scalar_names[scalar]);
    for (size_t l = 0; l < w->config->layers; l++) {
        const float *x = w->params + w->list->layers[l].scalar[scalar];
        const char *comma = l ? ", " : "";
        if (!normalizer_trains(normalizer_of(w->config, l), scalar)) {
            at += (size_t)snprintf(out + at, size - at, "%s[null, null, null]", comma);
            continue;
        }
        double sum = 0, least = x[0], largest = x[0];
        for (size_t h = 0; h < w->config->heads; h++) {
            sum += x[h];
            least = fmin(least, x[h]);
            largest = fmax(largest, x[h]);
        }
        at += (size_t)snprintf(out + at, size - at, "%s[%.6g, %.6g, %.6g]", comma, sum / (double)w->config->heads,
                               least, largest);
    }
    return at + (size_t)snprintf(out + at, size - at, "]");
}

static bool trains_scalars_of_heads(const ModelConfig *config) {
    bool any = false;
    for (Scalar scalar = 0; scalar < SCALAR_COUNT; scalar++)
        any |= scalar_width(scalar) == PER_HEAD && attention_trains(&config->attn, scalar);
    return any;
}

bool run_reports_scalars(const Run *run) {
    return run->last.validated && trains_scalars_of_heads(run->config);
}

// The share of all-zero rows among this rank's attention rows of the last step.
static double all_zero_share(const Run *run) {
    return run->rows ? (double)run->all_zero / (double)run->rows : 0;
}

// Fills in the members of the metrics line that only some runs have.
static void more_metrics(Run *run, const char *more) {
    size_t at = (size_t)snprintf(run->more, run->more_size, "%s", more);
    if (run->all_zero)
        at += (size_t)snprintf(run->more + at, run->more_size - at, ", \"all_zero_rows\": %.6g", all_zero_share(run));
    for (Scalar scalar = 0; scalar < SCALAR_COUNT && run->last.validated; scalar++)
        if (scalar_width(scalar) == PER_HEAD)
            at = scalar_statistics(run->more, run->more_size, at, &run->weights, scalar);
    norms_text(run, run->more, run->more_size, at);
    run->last.more = run->more;
}

void run_report(Run *run, const char *more, const char *line) {
    char text[512];
    if (run->metrics) {
        more_metrics(run, more);
        metrics_write(run->metrics, &run->last);
    }
    if (!run_is_main()) return;
    metrics_line(text, sizeof text, &run->last, run->o.steps, run->seconds * (double)(run->o.steps - run->step));
    size_t length = strlen(text);
    length += (size_t)snprintf(text + length, sizeof text - length, "%s", line);
    double share = 100 * all_zero_share(run);
    int digits = 0;
    if (share < 9.95) digits = 1;
    if (share < 0.1) digits = 4;
    if (share > 0) snprintf(text + length, sizeof text - length, " | %.*f%% all-zero rows", digits, share);
    progress_show(&run->progress, text, run->step == run->o.steps || run->last.validated);
}

// ---- samples

static void show_text(FILE *file, const Run *run, const int32_t *ids, size_t count) {
    Utf8Printer printer = utf8_printer(file);
    for (size_t i = 0; i < count; i++) {
        size_t length;
        const char *bytes = run->tokenizer ? tokenizer_token(run->tokenizer, ids[i], &length) : NULL;
        if (bytes) utf8_print(&printer, bytes, length);
        else fprintf(file, "%d ", ids[i]);
    }
    utf8_print_end(&printer);
}

// Appends a sample to samples.txt. Warns on failure.
static void keep_sample(Run *run, const int32_t *ids, size_t count) {
    Error error;
    if (!restore_run_folder(run, &error)) {
        warn("%s\n  The sample of step %lld is lost. Training continues.", error.text, (long long)run->step);
        return;
    }
    const char *reason = NULL;
    int fd = own_open(folder_path(run->o.out, "samples.txt").text, O_WRONLY | O_APPEND | O_CREAT, &reason);
    FILE *file = fd < 0 ? NULL : fdopen(fd, "a");
    if (file) {
        fprintf(file, "---- step %lld\n", (long long)run->step);
        show_text(file, run, ids, count);
        fprintf(file, "\n");
    }
    bool whole = file && fflush(file) == 0 && !ferror(file);
    int why = errno;
    if (file) fclose(file);
    if (!whole)
        warn("%s/samples.txt: cannot write the sample of step %lld: %s. Training continues.", run->o.out,
             (long long)run->step, reason ? reason : strerror(why));
}

size_t run_sample_length(const Run *run) {
    if (!run->o.sample_every) return 0;
    return run->T < SAMPLE_TOKENS ? run->T : SAMPLE_TOKENS;
}

void run_sample_start(const Run *run, Sample *sample) {
    *sample = (Sample){.ids = {run->config->end_of_text}, .count = 1};
}

bool run_sample_add(const Run *run, Sample *sample, float *logits) {
    double u = random_uniform((uint64_t)run->o.seed, (uint64_t)run->step, sample->count - 1);
    int32_t id = sample_token(logits, run->candidates, run->config->vocab, 0.9, 50, 1.0, u);
    if (id < 0)
        warn(
            "the sample of step %lld ends after %zu tokens, because its logits are not finite or all equal. Training continues.",
            (long long)run->step, sample->count - 1);
    if (id < 0 || model_ends_text(run->config, id)) return false;
    sample->ids[sample->count++] = id;
    return sample->count <= run_sample_length(run);
}

void run_sample_end(Run *run, const Sample *sample) {
    progress_end(&run->progress);
    printf("sample at step %lld: ", (long long)run->step);
    show_text(stdout, run, sample->ids + 1, sample->count - 1);
    printf("\n");
    fflush(stdout);
    if (run->o.out) keep_sample(run, sample->ids + 1, sample->count - 1);
}
